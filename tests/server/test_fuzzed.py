"""Schemathesis sends requests that the description allows or forbids. No answer is a server's error or undescribed."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.conftest import index_in, put_entries, service_of
from tiered_index.server import wire

load_all_checks()


@schemathesis.serializer(wire.NDJSON, wire.ARROW)
def as_it_is(_, value):
    """Return a body of lines or bytes unchanged."""
    return str(value).encode()


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """The description of a service whose index accepts entries."""
    with index_in(tmp_path_factory.mktemp("fuzzed")) as index:
        put_entries(index)
        with service_of(index) as service:
            yield schemathesis.openapi.from_asgi("/openapi.json", service.app)


def test_every_answer_is_described(described):
    checks = [status_code_conformance, content_type_conformance, response_schema_conformance]
    checks.append(schemathesis.checks.not_a_server_error)
    paths = set()
    for operation in (result.ok() for result in described.get_all_operations()):

        @settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=HealthCheck)
        @given(case=operation.as_strategy())
        def ask(case):
            case.call_and_validate(checks=checks)

        ask()
        paths.add(operation.path)
    assert paths == described.raw_schema["paths"].keys()
