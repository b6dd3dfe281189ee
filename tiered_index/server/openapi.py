"""The routes and their description: paths, parameters, bodies, answers, errors, and an example of each.

Parameters are described by the models that check them, answers by the types that the library returns. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter

from tiered_index.server import parameters, wire
from tiered_index.server.examples import EXAMPLES
from tiered_index.server.problems import MEDIA_TYPE as PROBLEM
from tiered_index.service.lookup.messages import MessageState
from tiered_index.types import Explain, FileReport, Freshness, IndexItem, LostFile, TopicSummary

DESCRIPTION = """Which messages carry this key, in this time range?

Words, order, status and cursor are those of the library. `status` is `complete`, `truncated` (go on with `cursor`), or
`partial`, only where `allow_partial` was given. An answer that is asked for as NDJSON or as an Arrow stream ends with
its status (the last line; the metadata `tiered_index.status` of the last batch, which is empty): one without broke off.
"""
_REASONS = {
    400: "The request is wrong.",
    401: "No token, or an unknown one.",
    403: "The token is not for this.",
    404: "There is no such thing.",
    408: "The body comes too slowly.",
    409: "Another writer, or another request, was first.",
    413: "Too much at once.",
    415: "The body is of another content type.",
    422: "A bound (`timeout_s`, `max_requests`, `max_bytes`, `max_cost_usd`) was reached; `failed` names files.",
    429: "Too many requests a second; `Retry-After` says when to go on.",
    500: "The service's own error.",
    502: "The storage did not answer, or what it holds is damaged.",
    503: "Too much is under way; `Retry-After` says when to go on.",
}
_ALWAYS = (400, 401, 403, 429, 500, 502, 503)
_TEXT, _NUMBER, _NULLABLE = {"type": "string"}, {"type": "integer"}, {"type": ["integer", "null"]}


def _of(kind: type[Any]) -> dict[str, Any]:
    """Return the schema of one of the library's types as its `to_dict` writes it; all of its fields are there."""
    schema: dict[str, Any] = TypeAdapter(kind).json_schema()
    schema.pop("$defs", None)
    schema["properties"] = {name: dict(one) for name, one in schema["properties"].items()}
    optional = {"source", "not_asked"} if kind in (IndexItem, Freshness) else set()
    schema["required"] = [f.name for f in dataclasses.fields(kind) if f.name not in optional or kind is Freshness]
    if kind is Freshness:
        schema["required"].remove("not_asked")
    return schema


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(name: str) -> dict[str, Any]:
    return {"type": "array", "items": _ref(name)}


def _record(*, optional: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [name for name in fields if name not in optional]}


_SEEN: dict[str, Any] = {
    "unknown_topics": {"type": "array", "items": _TEXT},
    "as_of_ms": _NULLABLE,
    "freshness": _list("Freshness"),
    "lost": _list("LostFile"),
    "expired_before_ms": _NULLABLE,
}
_STATUS: dict[str, Any] = {"enum": ["complete", "truncated", "partial"]}
_CURSOR: dict[str, Any] = {"type": ["string", "null"]}


def _explain() -> dict[str, Any]:
    schema = _of(Explain)
    schema["properties"]["files"] = _list("FileReport")
    schema["properties"] |= {"message_requests": _NUMBER, "message_bytes": _NUMBER}
    schema["required"].remove("files")
    return schema


_ANSWER: dict[str, Any] = {"status": _STATUS, "failed": _list("FileReport"), "explain": _ref("Explain"), **_SEEN}
_ANY_TEXT = {"type": ["string", "null"]}
_FILE = _record(
    file_id=_TEXT,
    state=_TEXT,
    lane=_TEXT,
    sequence=_NUMBER,
    begin_ms=_NUMBER,
    end_ms=_NUMBER,
    entries=_NULLABLE,
    bytes=_NULLABLE,
    path=_ANY_TEXT,
    object=_ANY_TEXT,
    table={"type": ["object", "null"]},
    error=_ANY_TEXT,
    topics={"type": ["array", "null"], "items": _TEXT},
    optional=("topics",),
)
_DU_ROW = _record(
    topic=_ANY_TEXT,
    day=_ANY_TEXT,
    state=_TEXT,
    entries=_NUMBER,
    bytes=_NUMBER,
    usd_a_month={"type": "number"},
    estimated={"type": "boolean"},
    optional=("topic", "day", "state"),
)
_MESSAGE = _record(
    state={"enum": list(get_args(MessageState))},
    item={"anyOf": [_ref("IndexItem"), {"type": "null"}]},
    message={"type": ["object", "null"]},
    read_from=_ANY_TEXT,
    problem=_ANY_TEXT,
)
_BATCH_ANSWER = _record(
    items=_list("IndexItem"),
    status=_STATUS,
    cursor=_CURSOR,
    unknown_topics=_SEEN["unknown_topics"],
    expired_before_ms=_NULLABLE,
    failed=_list("FileReport"),
    lost=_list("LostFile"),
    optional=("failed", "lost"),
)


def schemas() -> dict[str, Any]:
    """Return the schemas of what answers consist of."""
    return {
        "IndexItem": _of(IndexItem),
        "FileReport": _of(FileReport),
        "Freshness": _of(Freshness),
        "LostFile": _of(LostFile),
        "TopicSummary": _of(TopicSummary),
        "Explain": _explain(),
        "QueryResult": _record(items=_list("IndexItem"), cursor=_CURSOR, timestamp_resolution_ms=_NUMBER, **_ANSWER),
        "QueryResults": _record(
            results={"type": "array", "items": _BATCH_ANSWER},
            status=_STATUS,
            cursors={"type": "object", "additionalProperties": _TEXT},
            partial={"type": "array", "items": _NUMBER},
            failed=_list("FileReport"),
            explain=_ref("Explain"),
            timestamp_resolution_ms=_NUMBER,
            exceeded=_TEXT,
            **_SEEN,
            optional=("exceeded",),
        ),
        "MessagesResult": _record(
            messages={"type": "array", "items": _MESSAGE}, cursor=_CURSOR, collisions=_NUMBER, **_ANSWER
        ),
        "TopicsResult": _record(topics=_list("TopicSummary"), **_ANSWER),
        "File": _FILE,
        "Files": _record(
            index_id=_TEXT,
            log_number=_NUMBER,
            status=_STATUS,
            files=_list("File"),
            totals={"type": "object"},
            archived={"type": "array", "items": {"type": "object"}},
        ),
        "Du": _record(
            status=_STATUS,
            index_id=_TEXT,
            log_number=_NUMBER,
            by={"type": "array", "items": _TEXT},
            prices_as_of=_TEXT,
            usd_per_gib_month={"type": "number"},
            rows={"type": "array", "items": _DU_ROW},
            totals={"type": "object"},
        ),
        "Health": _record(status=_TEXT, reasons={"type": "array", "items": _TEXT}, optional=("reasons",)),
        "Taken": _record(
            entries=_NUMBER,
            messages=_NUMBER,
            source=_ANY_TEXT,
            position=_NULLABLE,
            durable_position=_NULLABLE,
            repeated={"type": "boolean"},
        ),
        "Verification": _record(
            id=_TEXT,
            state={"enum": ["running", "done", "failed"]},
            deep={"type": "boolean"},
            begun_ms=_NUMBER,
            ended_ms=_NULLABLE,
            checked=_NUMBER,
            doing=_TEXT,
            report={"type": ["object", "null"]},
            problem={"anyOf": [_ref("Problem"), {"type": "null"}]},
        ),
        "Problem": _record(
            type=_TEXT,
            title=_TEXT,
            status=_NUMBER,
            detail=_TEXT,
            error=_TEXT,
            request_id=_TEXT,
            failed=_list("FileReport"),
            optional=("failed",),
        ),
    }


def _parameters(model: type[BaseModel], path: str) -> list[dict[str, Any]]:
    schema = model.model_json_schema()
    found: list[dict[str, Any]] = []
    if "{id}" in path:
        example = EXAMPLES.ids[path]
        found.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string"}, "example": example})
    for name, one in schema.get("properties", {}).items():
        shown = {key: value for key, value in one.items() if key not in ("title", "description", "examples")}
        parameter = {
            "name": name,
            "in": "query",
            "required": name in schema.get("required", ()),
            "description": one.get("description", ""),
            "schema": shown,
        }
        if one.get("examples"):
            parameter["example"] = one["examples"][0]
        found.append(parameter)
    return found


def _responses(
    status: int, schema: str | None, forms: tuple[str, ...], codes: tuple[int, ...]
) -> Mapping[int | str, dict[str, Any]]:
    content: dict[str, Any] = {}
    for form in forms:
        content[form] = {"schema": {"type": "string"}}
        if form == wire.JSON and schema is not None:
            content[form] = {"schema": _ref(schema)}
    problem = {PROBLEM: {"schema": _ref("Problem")}}
    errors: dict[int | str, dict[str, Any]]
    errors = {code: {"description": _REASONS[code], "content": problem} for code in sorted({*codes, *_ALWAYS})}
    return {status: {"description": "The answer.", "content": content}, **errors}


def add_routes(app: FastAPI, api: Any) -> None:
    """Add the routes of `api` and their description."""
    streams = (wire.JSON, wire.NDJSON, wire.ARROW)

    def add(
        method: str,
        path: str,
        handler: Any,
        schema: str | None,
        *,
        model: type[BaseModel] = parameters.Nothing,
        forms: tuple[str, ...] = (wire.JSON,),
        codes: tuple[int, ...] = (),
        body: dict[str, Any] | None = None,
        status: int = 200,
    ) -> None:
        extra: dict[str, Any] = {"parameters": _parameters(model, path)}
        if body is not None:
            extra["requestBody"] = {"required": True, "content": body}
        app.add_api_route(
            path,
            handler,
            methods=[method],
            response_model=None,
            summary=(handler.__doc__ or "").partition(".")[0],
            operation_id=handler.__name__,
            status_code=status,
            responses=dict(_responses(status, schema, forms, codes)),
            openapi_extra=extra,
        )

    batch = {wire.JSON: {"schema": parameters.BatchBody.model_json_schema(ref_template="#/components/schemas/{model}")}}
    defined = batch[wire.JSON]["schema"].pop("$defs")
    batch[wire.JSON]["example"] = EXAMPLES.batch
    add("GET", "/v1/query", api.query, "QueryResult", model=parameters.QueryParameters, forms=streams, codes=(422,))
    add(
        "POST",
        "/v1/query:batch",
        api.query_batch,
        "QueryResults",
        forms=streams,
        codes=(408, 413, 415, 422),
        body=batch,
    )
    add("GET", "/v1/messages", api.messages, "MessagesResult", model=parameters.MessagesParameters, codes=(422,))
    add(
        "GET",
        "/v1/messages/{id:path}",
        api.message,
        "MessagesResult",
        model=parameters.MessageParameters,
        codes=(404, 422),
    )
    add("GET", "/v1/topics", api.topics, "TopicsResult", model=parameters.Range, codes=(422,))
    add("GET", "/v1/files", api.files, "Files", forms=(wire.JSON, wire.NDJSON))
    add("GET", "/v1/files/{id}", api.file, "File", codes=(404,))
    add("GET", "/v1/du", api.du, "Du", model=parameters.DuParameters, codes=(422,))
    lines = {wire.NDJSON: {"schema": {"type": "string"}, "example": EXAMPLES.entries}}
    lines |= {wire.ARROW: {"schema": {"type": "string", "format": "binary"}}}
    add(
        "POST",
        "/v1/entries",
        api.entries,
        "Taken",
        model=parameters.EntriesParameters,
        codes=(408, 409, 413, 415),
        body=lines,
    )
    deep = {wire.JSON: {"schema": parameters.VerifyBody.model_json_schema(), "example": {"deep": True}}}
    add("POST", "/v1/verify", api.verify, "Verification", codes=(408, 409, 413, 415), body=deep, status=202)
    add("GET", "/v1/verify/{id}", api.verification, "Verification", codes=(404,))
    add("GET", "/metrics", api.metrics, None, forms=("text/plain",))
    add("GET", "/livez", api.livez, "Health")
    add("GET", "/readyz", api.readyz, "Health")
    _add_heads(app, api)
    made = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = made()
            components = document.setdefault("components", {})
            components["schemas"] = {**schemas(), **defined}
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"token": []}]
            # afterwards, since FastAPI leaves out what is null
            for place, example in EXAMPLES.answers.items():
                method, path = place.split()
                answers = document["paths"][path][method.lower()]["responses"]
                next(iter(answers.values()))["content"][wire.JSON]["example"] = example
            # readiness is told by the status, and its reasons by the same document
            ready = document["paths"]["/readyz"]["get"]["responses"]
            ready["503"] = ready["200"] | {"description": "Not ready, and why."}
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


def _add_heads(app: FastAPI, api: Any) -> None:
    """Have probes answered that ask for the head only."""
    for path, handler in _health(api):
        app.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)


def _health(api: Any) -> list[tuple[str, Any]]:
    return [("/metrics", api.metrics), ("/livez", api.livez), ("/readyz", api.readyz)]
