"""The description is correct: it names the routes, their parameters and bodies, and the fields of answers.

Schemathesis sends requests that it allows or forbids. No answer is a server's error or undescribed.
"""

from pathlib import Path
from typing import get_args

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.conftest import DESCRIPTION, index_in, put_entries, service_of, serving
from tiered_index.server.app import HttpService
from tiered_index.server.http import wire
from tiered_index.service.read.answers.messages import MessagesResult, MessageState
from tiered_index.types import (
    FilePlace,
    FileReport,
    Freshness,
    IndexItem,
    LostFile,
    QueryResult,
    TopicsResult,
    TopicSummary,
)

load_all_checks()
SCHEMAS = DESCRIPTION["components"]["schemas"]


@pytest.fixture(scope="module")
def routes(index):
    with pytest.MonkeyPatch.context() as patch:
        made = []
        patch.setattr(HttpService, "__enter__", lambda self: made.append(self) or self)
        with serving(index):
            yield made[0].routes


def operations():
    return {
        (method.upper(), path): operation
        for path, methods in DESCRIPTION["paths"].items()
        for method, operation in methods.items()
    }


def test_it_names_every_route_and_no_other(routes):
    served = {
        (method, route.path_format, route.endpoint.handle.func.__name__)
        for route in routes
        for method in route.methods - {"HEAD"}
    }
    assert served == {(*place, operation["operationId"]) for place, operation in operations().items()}


def test_it_names_the_parameters_of_every_route(routes):
    for route in routes:
        for method in route.methods - {"HEAD"}:
            named = {
                parameter["name"]: parameter
                for parameter in operations()[method, route.path_format].get("parameters", ())
            }
            assert {name for name, parameter in named.items() if parameter["in"] == "path"} == {*route.param_convertors}
            taken = {} if route.endpoint.model is None else route.endpoint.model.__struct_fields__
            in_query = {name: parameter for name, parameter in named.items() if parameter["in"] == "query"}
            assert {*in_query} == {*taken} and all(parameter["description"] for parameter in in_query.values())


@pytest.mark.parametrize(
    "document",
    [
        FileReport(file="a", place="storage", outcome="read", begin_ms=0, end_ms=0),
        LostFile(file="a", begin_ms=0, end_ms=0, entries=1),
        TopicSummary(topic="orders", entries=1, bytes_of_entries=1, begin_ms=0, end_ms=0),
        Freshness(source="memory://a", as_of_ms=None, positions={}),
        QueryResult(items=(), status="complete"),
        TopicsResult(topics=(), status="complete"),
        MessagesResult(messages=(), status="complete"),
    ],
)
def test_it_requires_the_members_that_documents_of_the_library_have(document):
    described = SCHEMAS[type(document).__name__]
    assert {*described["required"]} == document.to_dict().keys()
    assert described["properties"].keys() - described["required"] <= {"not_asked", "source"}


def test_it_requires_the_members_that_entries_of_messages_and_of_files_have():
    item = IndexItem(topic="orders", topic_id=1, queue_id=0, offset=0, size=1, timestamp_ms=0, key_hash=1)
    places = FilePlace("file:///a", 0, "byte"), None
    of_file, of_message = QueryResult(items=(item, item), status="complete", places=places).to_dict()["items"]
    described = SCHEMAS["IndexItem"]
    assert {*described["required"]} == of_file.keys() & of_message.keys() == {"topic", "timestamp_ms"}
    assert described["properties"].keys() == {*of_file, *of_message, "source"}


def test_it_names_every_state_of_a_message_and_so_does_the_page_on_rocketmq():
    # msgspec sorts them
    assert SCHEMAS["FetchedMessage"]["properties"]["state"]["enum"] == sorted(get_args(MessageState))
    page = (Path(__file__).parents[2] / "docs" / "rocketmq-lookups.md").read_text()
    assert all(f"| `{state}` |" in page for state in get_args(MessageState))


def test_it_is_one_of_openapi(client):
    document = client.get("/openapi.json").json()
    assert [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()] == []
    for path in ("/livez", "/readyz"):
        # it marks the routes that need no token
        assert document["paths"][path]["get"]["security"] == []


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
