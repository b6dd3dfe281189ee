"""The routes and objects in docs/http.md, made from the service's description `openapi.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tiered_index.server.app import OPENAPI

__all__ = ["objects", "routes"]

_DESCRIPTION = json.loads(OPENAPI.read_bytes())
# an answer of so many routes is shown once
_COMMON = 8


def routes() -> str:
    """Return a section for each route: its parameters, its body, and its answers."""
    routes = [route for methods in _DESCRIPTION["paths"].values() for route in methods.values()]
    counts = Counter(row for route in routes for row in _answers(route["responses"]))
    common = sorted(row for row, count in counts.items() if count >= _COMMON)
    parts = ["## Errors of most routes\n", _table(("status", "answer"), common)]
    for path, methods in _DESCRIPTION["paths"].items():
        for method, route in methods.items():
            parts += [f"## {method.upper()} {path}\n", *_route(route, common)]
    return "\n" + "\n".join(parts) + "\n"


def _route(route: dict[str, Any], common: Sequence[tuple[str, str]]) -> Iterator[str]:
    summary = route["summary"]
    yield f"{summary}.\n"
    more = route.get("description", "").removeprefix(f"{summary}.").strip()
    if more and more != summary:
        yield f"{more}\n"
    if "parameters" in route:
        yield _parameters([_resolved(one) for one in route["parameters"]])
    body = route.get("requestBody", {}).get("content", {})
    if body:
        yield "Body: " + ", ".join(f"`{kind}`{_named(one)}" for kind, one in body.items()) + ".\n"
        yield from (_members(one["schema"]) for one in body.values() if "properties" in one.get("schema", ()))
    answers = _answers(route["responses"])
    yield _table(("status", "answer"), [row for row in answers if row not in common])
    shared = ", ".join(status for status, text in answers if (status, text) in common)
    if shared:
        yield f"Errors of most routes: {shared}.\n"


def objects() -> str:
    """Return a section for each object that a body or an answer has, with its members."""
    parts = []
    for name, schema in _DESCRIPTION["components"]["schemas"].items():
        parts.append(f"### {name}\n")
        if schema.get("description"):
            parts.append(schema["description"].strip() + "\n")
        parts.append(_members(schema))
    return "\n" + "\n".join(parts) + "\n"


def _resolved(one: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in one:
        return one
    found: Any = _DESCRIPTION
    for name in one["$ref"].removeprefix("#/").split("/"):
        found = found[name]
    return dict(found)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ["---"] * len(columns), *rows))


def _members(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    members = schema.get("properties", {}).items()
    rows = [(f"`{name}`", _type(one), "yes" if name in required else "no") for name, one in members]
    return _table(("member", "type", "required"), rows)


def _parameters(parameters: list[dict[str, Any]]) -> str:
    rows = []
    for one in parameters:
        schema = one["schema"]
        default = "required" if one.get("required") else _shown(schema.get("default"))
        rows.append((f"`{one['name']}`", one["in"], _type(schema), default, one.get("description", "")))
    return _table(("parameter", "in", "type", "default", "meaning"), rows)


def _answers(responses: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for status, one in ((status, _resolved(one)) for status, one in responses.items()):
        kinds = ", ".join(f"`{kind}`{_named(body)}" for kind, body in one.get("content", {}).items())
        rows.append((status, f"{one['description']}{' As ' + kinds if kinds and status < '300' else ''}"))
    return rows


def _named(body: dict[str, Any]) -> str:
    name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return f" ([{name}](#{name.lower()}))" if name else ""


def _shown(default: Any) -> str:
    return "" if default is None else f"`{json.dumps(default)}`"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        # a bound or a time without a value is no bound
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"] if one.get("type") != "null"))
    kinds = schema.get("type", "any")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    items = f" of {_type(schema['items'])}" if "items" in schema else ""
    return " or ".join(kinds) + items
