"""Whatever is done to an index, on any backend, and whoever is asked: the answers are the reference model's. See `index_machine`."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property import places
from tests.property.rules_of_faults import StruckMachine
from tests.s3_server import s3_server

BACKENDS = ("memory", "file", "sqlite", "s3")
EXAMPLES = {"memory": 25, "file": 8, "sqlite": 6, "s3": 2}
LONG = {"memory": 3000, "file": 1000, "sqlite": 300, "s3": 100}


@pytest.fixture
def machine(request, monkeypatch):
    """The machine on a backend."""
    backend = request.param
    if backend != "s3":
        yield type(f"On{backend.title()}", (StruckMachine,), {"place": staticmethod(getattr(places, backend))})
        return
    with s3_server() as server:
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_REGION"):
            monkeypatch.delenv(name, raising=False)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield type("OnS3", (StruckMachine,), {"place": staticmethod(places.s3(server))})


@pytest.mark.parametrize("machine", BACKENDS, indirect=True)
def test_an_index_answers_as_the_model_does(machine, request):
    backend = request.node.callspec.params["machine"]
    run_state_machine_as_test(machine, settings=settings(max_examples=EXAMPLES[backend], stateful_step_count=30))


@pytest.mark.slow
@pytest.mark.parametrize("machine", BACKENDS, indirect=True)
def test_an_index_answers_as_the_model_does_for_long(machine, request):
    backend = request.node.callspec.params["machine"]
    run_state_machine_as_test(machine, settings=settings(max_examples=LONG[backend], stateful_step_count=60, derandomize=False))
