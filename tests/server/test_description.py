"""The description is correct: it names the routes, their parameters and bodies, and the fields of answers."""

import dataclasses
from typing import Any, get_args

import msgspec
import pytest

from tests.server.conftest import DESCRIPTION, serving
from tiered_index.server import answers, parameters
from tiered_index.server.app import OPERATIONS, HttpService
from tiered_index.service.read.messages import MessageState
from tiered_index.types import Explain, FileReport, Freshness, IndexItem, LostFile, TopicSummary

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
            named = {one["name"]: one for one in operations()[method, route.path_format].get("parameters", ())}
            assert {name for name, one in named.items() if one["in"] == "path"} == {*route.param_convertors}
            taken = {} if route.endpoint.model is None else route.endpoint.model.__struct_fields__
            asked = {name: one for name, one in named.items() if one["in"] == "query"}
            assert {*asked} == {*taken} and all(one["description"] for one in asked.values())


@pytest.mark.parametrize("of", [answers, parameters])
def test_every_model_belongs_to_an_operation_and_describes_its_members(of):
    models = {kind for kind in vars(of).values() if isinstance(kind, type) and kind.__module__ == of.__name__}
    used = [model for one in OPERATIONS for model in (one.query, one.body, one.answer)]
    bases = {base for model in used if model is not None for base in model.__mro__}
    of_parts = {kind for kind in models if kind.__name__ in SCHEMAS}
    counting = {parameters._Listed, parameters._AnyObject}
    assert {kind for kind in models if issubclass(kind, msgspec.Struct)} - counting <= bases | of_parts
    for name, schema in SCHEMAS.items():
        members = schema["properties"].values()
        assert all("description" in one or "$ref" in one for one in members), name


def test_it_names_the_fields_of_an_explain():
    fields = {field.name for field in dataclasses.fields(Explain)}
    described = SCHEMAS["Explain"]
    assert fields <= described["properties"].keys()
    assert {*described["required"]} == fields - {"files"}


@pytest.mark.parametrize(
    "document",
    [
        IndexItem(topic="orders", topic_id=1, queue_id=0, offset=0, size=1, timestamp_ms=0, key_hash=1),
        FileReport(file="a", place="storage", outcome="read", begin_ms=0, end_ms=0),
        LostFile(file="a", begin_ms=0, end_ms=0, entries=1),
        TopicSummary(topic="orders"),
        Freshness(source="memory://a", as_of_ms=None, positions={}),
    ],
)
def test_it_requires_the_members_that_documents_of_the_library_have(document):
    described = SCHEMAS[type(document).__name__]
    assert {*described["required"]} == document.to_dict().keys()
    assert described["properties"].keys() - described["required"] <= {"not_asked", "source"}


def test_it_names_every_state_of_a_message():
    # msgspec sorts them
    assert SCHEMAS["FetchedMessage"]["properties"]["state"]["enum"] == sorted(get_args(MessageState))


def test_every_reference_leads_somewhere_and_nothing_is_left_over():
    named = {f"#/components/{kind}/{name}" for kind, those in DESCRIPTION["components"].items() for name in those}
    assert {*references(DESCRIPTION)} == {name for name in named if "/securitySchemes/" not in name}


def resolved(document: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in document:
        return document
    _, _, kind, name = document["$ref"].split("/")
    return DESCRIPTION["components"][kind][name]


def references(value):
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from references(one)


def test_it_is_made_once(client, monkeypatch):
    """It needs no token, and takes a while."""
    described = client.get("/openapi.json").json()
    monkeypatch.setattr("tiered_index.server.app.described", None)
    assert client.get("/openapi.json").json() == described == DESCRIPTION
