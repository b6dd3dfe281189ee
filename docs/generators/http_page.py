"""The routes and objects in docs/http.md, made from the service's description."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tiered_index.server.app import OPERATIONS
from tiered_index.server.description import described

__all__ = ["objects", "routes"]

_DESCRIPTION = described(OPERATIONS)
# an answer or a parameter that this many routes share appears once
_COMMON, _SHARED = 8, 4
_PARAMETER = ("parameter", "in", "type", "default", "meaning")


def routes() -> str:
    """Return a section for each route: its parameters, its body, and its answers."""
    routes = [route for methods in _DESCRIPTION["paths"].values() for route in methods.values()]
    counts = Counter(row for route in routes for row in _answers(route["responses"]))
    common = sorted(row for row, count in counts.items() if count >= _COMMON)
    rows = Counter(row for route in routes for row in _parameters(route))
    shared = [row for row, count in rows.items() if count >= _SHARED]
    parts = ["## Errors of most routes\n", _table(("status", "answer"), common)]
    parts += ["## Shared parameters\n", _table(_PARAMETER, shared)]
    for path, methods in _DESCRIPTION["paths"].items():
        for method, route in methods.items():
            parts += [f"## {method.upper()} {path}\n", *_route(route, common, shared)]
    return "\n" + "\n".join(parts) + "\n"


def _route(
    route: dict[str, Any], common: Sequence[tuple[str, str]], shared: Sequence[tuple[str, ...]]
) -> Iterator[str]:
    summary = route["summary"]
    yield f"{summary}.\n"
    more = route.get("description", "").removeprefix(f"{summary}.").strip()
    if more and more != summary:
        yield f"{more}\n"
    rows = _parameters(route)
    if own := [row for row in rows if row not in shared]:
        yield _table(_PARAMETER, own)
    if others := ", ".join(row[0] for row in rows if row in shared):
        yield f"[Shared parameters](#shared-parameters): {others}.\n"
    body = route.get("requestBody", {}).get("content", {})
    if body:
        yield "Body: " + ", ".join(f"`{kind}`{_named(content)}" for kind, content in body.items()) + ".\n"
        yield from (
            _members(content["schema"]) for content in body.values() if "properties" in content.get("schema", ())
        )
    answers = _answers(route["responses"])
    yield _table(("status", "answer"), [row for row in answers if row not in common])
    if others := ", ".join(status for status, text in answers if (status, text) in common):
        yield f"[Errors of most routes](#errors-of-most-routes): {others}.\n"


def objects() -> str:
    """Return a section for each object that a body or an answer has, with its members."""
    parts = []
    for name, schema in sorted(_DESCRIPTION["components"]["schemas"].items()):
        parts.append(f"### {name}\n")
        if schema.get("description"):
            parts.append(schema["description"].strip() + "\n")
        parts.append(_members(schema))
    return "\n" + "\n".join(parts) + "\n"


def _resolved(part: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in part:
        return part
    target: Any = _DESCRIPTION
    for name in part["$ref"].removeprefix("#/").split("/"):
        target = target[name]
    return dict(target)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ["---"] * len(columns), *rows))


def _members(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    members = schema.get("properties", {}).items()
    rows = [
        (f"`{name}`", _type(member) + _or_null(member), "yes" if name in required else "no", _meaning(member))
        for name, member in members
    ]
    return _table(("member", "type", "required", "meaning"), rows)


def _meaning(member: dict[str, Any]) -> str:
    """Return the description of a member, with the names of the members of its objects."""
    names = ", ".join(f"`{name}`" for name in member.get("items", member).get("properties", ()))
    text = member.get("description") or _resolved(member).get("description", "")
    return " ".join([text, *([f"Members of each: {names}."] if names else [])]).strip()


def _parameters(route: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = list[tuple[str, ...]]()
    for parameter in map(_resolved, route.get("parameters", ())):
        schema = parameter["schema"]
        default = "required" if parameter.get("required") else _shown(schema.get("default"))
        rows.append(
            (f"`{parameter['name']}`", parameter["in"], _type(schema), default, parameter.get("description", ""))
        )
    return rows


def _answers(responses: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for status, response in ((status, _resolved(response)) for status, response in responses.items()):
        kinds = ", ".join(f"`{kind}`{_named(body)}" for kind, body in response.get("content", {}).items())
        text = response["description"]
        if kinds and status < "300":
            text = kinds if text == "The answer." else f"{text.rstrip('.')}: {kinds}"
        rows.append((status, text))
    return rows


def _named(body: dict[str, Any]) -> str:
    name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return f" ([{name}](#{name.lower()}))" if name else ""


def _shown(default: Any) -> str:
    return "" if default is None else f"`{json.dumps(default)}`"


def _or_null(schema: dict[str, Any]) -> str:
    """Return the addition to the type of a member that may be null."""
    return " or null" if {"type": "null"} in schema.get("anyOf", ()) else ""


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        # a bound or a time without a value is no bound
        return " or ".join(dict.fromkeys(_type(choice) for choice in schema["anyOf"] if choice.get("type") != "null"))
    kinds = schema.get("type", "any")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    items = f"array of {_type(schema['items'])}" if "items" in schema else "array"
    return " or ".join(items if kind == "array" else kind for kind in kinds)
