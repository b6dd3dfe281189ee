"""`openapi.json` is correct: it names the routes, their parameters and bodies, and the fields of answers."""

import dataclasses
from typing import Any, get_args

import msgspec
import pytest

from tests.server.conftest import DESCRIPTION, serving
from tiered_index.server import parameters
from tiered_index.server.app import Service
from tiered_index.server.verifying import Verification
from tiered_index.service.lookup.messages import MessageState
from tiered_index.types import Explain, FileReport, Freshness, IndexItem, LostFile, TopicSummary

SCHEMAS = DESCRIPTION["components"]["schemas"]


@pytest.fixture(scope="module")
def routes(index):
    with pytest.MonkeyPatch.context() as patch:
        made = []
        patch.setattr(Service, "__enter__", lambda self: made.append(self) or self)
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
        (method, route.path_format, route.endpoint.handle.__name__)
        for route in routes
        for method in route.methods - {"HEAD"}
    }
    assert served == {(*place, operation["operationId"]) for place, operation in operations().items()}


def test_it_names_the_parameters_of_every_route(routes):
    for route in routes:
        for method in route.methods - {"HEAD"}:
            operation, model = operations()[method, route.path_format], route.endpoint.model
            named = {one["name"]: one for one in map(resolved, operation.get("parameters", ()))}
            assert {name for name, one in named.items() if one["in"] == "path"} == {*route.param_convertors}
            taken = {} if model is None else schema_of(model)
            required = taken.get("required", ())
            asked = {name: one for name, one in named.items() if one["in"] == "query"}
            assert all(one["description"] for one in asked.values())
            shown = {name: (one.get("required", False), plain(one["schema"])) for name, one in asked.items()}
            assert shown == {name: (name in required, plain(one)) for name, one in taken.get("properties", {}).items()}


@pytest.mark.parametrize(
    ("path", "model"), [("/v1/query:batch", parameters.BatchBody), ("/v1/verify", parameters.VerifyBody)]
)
def test_it_describes_the_bodies(path, model):
    described = DESCRIPTION["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert plain(described) == plain(schema_of(model))
    assert plain(SCHEMAS["OneLookup"]) == plain(schema_of(parameters.OneLookup))


def schema_of(model):
    (_,), components = msgspec.json.schema_components(
        [model], schema_hook=lambda kind: {"type": "integer"}, ref_template="#/components/schemas/{name}"
    )
    return components[model.__name__]


@pytest.mark.parametrize(
    ("kind", "optional"),
    [
        (IndexItem, {"source"}),
        (FileReport, set()),
        (Freshness, {"not_asked"}),
        (LostFile, {"reason"}),
        (TopicSummary, set()),
        (Explain, {"files"}),
        (Verification, set()),
    ],
)
def test_it_names_the_fields_of_the_library_s_types(kind, optional):
    # `bounds` is no member of a document
    fields = {field.name for field in dataclasses.fields(kind)} - {"bounds"}
    described = SCHEMAS[kind.__name__]
    assert fields <= described["properties"].keys()
    assert {*described["required"]} - fields == set() and fields - {*described["required"]} == optional


def test_it_names_every_state_of_a_message():
    message = SCHEMAS["MessagesResult"]["properties"]["messages"]["items"]
    assert message["properties"]["state"]["enum"] == [*get_args(MessageState)]


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


def plain(schema: Any) -> Any:
    """Return a schema without names, meanings, examples, and defaults of null. A time is an integer, or a text."""
    if not isinstance(schema, dict):
        return [plain(one) for one in schema] if isinstance(schema, list) else schema
    bounds = {"ge": "minimum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
    shown = {bounds.get(name, name): one for name, one in schema.items()}
    for name in ("title", "examples", "description"):
        shown.pop(name, None)
    if shown.get("default", 0) is None:
        del shown["default"]
    if shown.get("type") == "integer":
        shown.pop("anyOf", None)
    if "enum" in shown:
        shown |= {"type": "string", "enum": sorted(shown["enum"])}
    if not shown.get("required", True):
        del shown["required"]
    fields = shown.pop("properties", None)
    if fields is not None:
        return {**plain(shown), "properties": {name: plain(one) for name, one in fields.items()}}
    return {name: plain(one) for name, one in shown.items()}
