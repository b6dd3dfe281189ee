"""The page of the service's routes and objects, made from its description (OpenAPI)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tiered_index.server.app import OPERATIONS
from tiered_index.server.http.operations import described

__all__ = ["page"]

_DESCRIPTION = described(OPERATIONS)


def page() -> str:
    """Return a section for each route: its parameters, body and answers. Then one for each object, with its members."""
    parts = ["# HTTP\n", "`/openapi.json` of a running service has the same.\n"]
    for path, methods in _DESCRIPTION["paths"].items():
        for method, route in methods.items():
            parts += [f"## {method.upper()} {path}\n", *_route(route)]
    parts.append("## Objects\n")
    for name, schema in sorted(_DESCRIPTION["components"]["schemas"].items()):
        parts += [f"### {name}\n", schema.get("description", "").strip() + "\n", _members(schema)]
    return "\n".join(parts)


def _route(route: dict[str, Any]) -> Iterator[str]:
    yield f"{route['summary']}. {route.get('description', '')}\n"
    if parameters := [_resolved(parameter) for parameter in route.get("parameters", ())]:
        rows = [
            (
                f"`{parameter['name']}`",
                parameter["in"],
                _type(parameter["schema"]),
                "required"
                if parameter.get("required")
                else json.dumps(parameter["schema"].get("default", "")).strip('"'),
                parameter.get("description", ""),
            )
            for parameter in parameters
        ]
        yield _table(("parameter", "in", "type", "default", "meaning"), rows)
    for kind, content in route.get("requestBody", {}).get("content", {}).items():
        yield f"Body: `{kind}`{_named(content)}\n"
        if "properties" in content.get("schema", ()):
            yield _members(content["schema"])
    rows = []
    for status, response in ((status, _resolved(response)) for status, response in route["responses"].items()):
        kinds = ", ".join(f"`{kind}`{_named(body)}" for kind, body in response.get("content", {}).items())
        rows.append((status, f"{response['description']} {kinds if status < '300' else ''}".strip()))
    yield _table(("status", "answer"), rows)


def _resolved(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of the description, or the part that it names."""
    target: Any = _DESCRIPTION if "$ref" in part else part
    for name in part.get("$ref", "").removeprefix("#/").split("/") if "$ref" in part else ():
        target = target[name]
    return dict(target)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ["---"] * len(columns), *rows))


def _members(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = []
    for name, member in schema.get("properties", {}).items():
        below = ", ".join(f"`{part}`" for part in member.get("items", member).get("properties", ()))
        text = member.get("description") or _resolved(member).get("description", "")
        row = f"`{name}`", _type(member), "yes" if name in required else "no"
        rows.append((*row, f"{text} Members of each: {below}." if below else text))
    return _table(("member", "type", "required", "meaning"), rows)


def _named(body: dict[str, Any]) -> str:
    name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return f" ([{name}](#{name.lower()}))" if name else ""


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    kinds = schema.get("type", "any")
    items = f"array of {_type(schema['items'])}" if "items" in schema else "array"
    return " or ".join(items if kind == "array" else kind for kind in ([kinds] if isinstance(kinds, str) else kinds))
