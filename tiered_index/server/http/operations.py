"""The operations of the service: what a route declares beside its handler, and their description (OpenAPI).

A handler's name is that of its operation, its docstring the text, and the type of its last argument the model of the
query. The description is made of operations and of the models that check requests and make answers: the docstring of a
model has the meaning of its members. Pure.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import UNSET, structs

from tiered_index import types
from tiered_index.base.version import __version__
from tiered_index.server.http import answers, parameters
from tiered_index.server.http.answers import Document, Problem
from tiered_index.server.http.problems import MEDIA_TYPE
from tiered_index.server.http.wire import ARROW, JSON

H = TypeVar("H", bound=Callable[..., Any])
PROBLEMS: Mapping[int, str] = {
    400: "The request is wrong.",
    401: "No token, or an unknown one.",
    403: "The token does not allow this.",
    408: "The body arrives too slowly.",
    409: "Another writer has the index, the service is read-only, or the source has another position than `after`.",
    413: "The body or the batch is too large, or its answer could be.",
    415: "The content type is not supported.",
    422: "A bound (`timeout_s`, `max_requests`, `max_bytes`, `max_cost_usd`) was reached. `failed` names the unread "
    "files, and the answer has no entries. With `allow_partial` the answer is 200, with the entries found so far.",
    500: "An error of the service.",
    502: "The storage did not answer, or an object is damaged. With `allow_partial`, a lookup answers 200 from the "
    "readable files.",
    503: "Too many running requests, a full write buffer, or an index that is being opened. Wait for `Retry-After` "
    "seconds.",
}
"""The meaning of each status of problems, for operations without a text of their own."""
_OF_OPEN, _OF_TOKENS, _OF_BODIES = (400, 500, 503), (401, 403, 502), (408, 413, 415)


@dataclass(frozen=True)
class Operation:
    """An operation, which decorates its handler. Its `place` is a method and a path.

    - `body`, `answer`: the models; None: no JSON body, no JSON answer.
    - `bodies`: examples of the body by content type.
    - `status`: the status of the answer.
    - `forms`: further content types of the answer.
    - `part`: the meaning of the path's parameter.
    - `problems`: further statuses of problems, with their text, or None for that of `PROBLEMS`.
    - `is_open`: it needs no token.
    - `is_light`: it takes no place of the service's calls, so it answers also if none is free. It answers HEAD, too:
      probes and monitors send it.
    - `is_told_unready`: its answer with 503 is no problem.
    """

    place: str
    _: KW_ONLY
    body: type[parameters.Nothing] | None = None
    bodies: Mapping[str, Any] = field(default_factory=dict)
    answer: type[Document] | None = None
    status: int = 200
    forms: tuple[str, ...] = ()
    part: str | None = None
    problems: Mapping[int, str | None] = field(default_factory=dict)
    is_open: bool = False
    is_light: bool = False
    is_told_unready: bool = False
    handler: Callable[..., Any] = field(init=False)

    def __call__(self, handler: H) -> H:
        """Declare the operation of a handler."""
        object.__setattr__(self, "handler", handler)
        handler.operation = self  # type: ignore[attr-defined]
        return handler

    @property
    def query(self) -> type[parameters.Nothing] | None:
        """The model of the query; None: any query."""
        _, model, _ = get_type_hints(self.handler).values()
        return None if model is type(None) else model

    def texts(self) -> dict[int, str]:
        """Return the meaning of each status of problems."""
        statuses = (*_OF_OPEN, *(() if self.is_open else _OF_TOKENS), *(_OF_BODIES if self.bodies else ()))
        own = {status: text or PROBLEMS[status] for status, text in self.problems.items()}
        return dict(sorted(({status: PROBLEMS[status] for status in statuses} | own).items()))


def operations_of(handlers: type) -> list[Operation]:
    """Return the operations of a class of handlers."""
    return [handler.operation for handler in vars(handlers).values() if hasattr(handler, "operation")]


_TEXT = """\
Find the messages of a key in a time range.

Names, order, status and cursor are those of the library. `status` is `complete`, `truncated` (continue with `cursor`),
or `partial` (only with `allow_partial`). An answer as NDJSON or as an Arrow stream ends with its status: in the last
line, or in the metadata `tiered_index.status` of the last, empty batch. An answer without a status is incomplete.
NDJSON of all entries has a line with `cursor` after each page but the last one: a stream that was cut continues there.
"""
_WHERE = (answers.__name__, parameters.__name__, types.__name__)
# Members that documents of the library may lack
_LEFT_OUT = {(types.Freshness, "not_asked"), (types.IndexItem, "source")}
_LEFT_OUT |= {(types.IndexItem, name) for name in ("topic_id", "queue_id", "offset", "size", "key_hash")}
_LEFT_OUT |= {(types.Explain, name) for name in ("files", "message_requests", "message_bytes")}
# Members that documents of the library may have in place of these
_OF_PLACES: dict[str, Any] = {
    "file": {"description": "URI of the file, of an entry of files.", "type": "string"},
    "row": {
        "description": "Number of the row, from 0; of a text, the byte at which its line begins, after decompression.",
        "type": "integer",
    },
    "entry_id": {"description": "Names an entry of files. Compare it with others only.", "type": "string"},
}
_MODELS: dict[str, Any] = {name: kind for where in (answers, parameters) for name, kind in vars(where).items()}
_MODELS |= {kind.__name__: kind for kind in (types.Freshness, types.TopicSummary)}
_MEMBER = re.compile(r"^- `(\w+)`: (.*?)(?=\n- `|\Z)", re.DOTALL | re.MULTILINE)


def described(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the description of operations as a document."""
    paths, schemas = dict[str, Any](), dict[str, Any]()
    for operation in operations:
        method, path = operation.place.lower().split()
        paths.setdefault(path, {})[method] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "tiered_index", "version": __version__, "description": _TEXT},
        "security": [{"token": []}],
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}, "schemas": schemas},
    }


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an operation, and add the schemas of its models."""
    summary, _, more = inspect.cleandoc(operation.handler.__doc__ or "").partition("\n")
    described: dict[str, Any] = {"operationId": operation.handler.__name__, "summary": summary.rstrip(".")}
    described |= {"description": " ".join(more.split())} if more else {}
    described |= {"security": []} if operation.is_open else {}
    parameters = []
    if operation.part is not None:
        parameter = {"name": "id", "in": "path", "required": True, "description": operation.part}
        parameters.append({**parameter, "schema": {"type": "string"}})
    if operation.query is not None:
        parameters += _parameters(_schemas(operation.query)[operation.query.__name__])
    described |= {"parameters": parameters} if parameters else {}
    if operation.bodies:
        content = {form: _body(operation, form, schemas) for form in operation.bodies}
        described["requestBody"] = {"required": True, "content": content}
    content = dict[str, Any]()
    if operation.answer is not None:
        content[JSON] = _content(operation.answer, schemas)
    content |= {form: {"schema": {"type": "string"}} for form in operation.forms}
    responses = {operation.status: {"description": "The answer.", "content": content}}
    for status, text in operation.texts().items():
        responses[status] = {"description": text, "content": {MEDIA_TYPE: _content(Problem, schemas)}}
    if operation.is_told_unready:
        responses[503]["content"] = content
    described["responses"] = {str(status): response for status, response in responses.items()}
    return described


def _body(operation: Operation, form: str, schemas: dict[str, Any]) -> dict[str, Any]:
    example = operation.bodies[form]
    schema: dict[str, Any] = {"type": "string"} | ({"format": "binary"} if form == ARROW else {})
    if operation.body is not None:
        parts = _schemas(operation.body)
        schema = parts.pop(operation.body.__name__)
        schemas |= parts
    return {"schema": schema} | ({"example": example} if example is not None else {})


def _content(model: type[Document], schemas: dict[str, Any]) -> dict[str, Any]:
    schemas |= _schemas(model)
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}


def _schemas(model: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the schemas of a model and of its parts, by name."""
    _, components = msgspec.json.schema_components([model], ref_template="#/components/schemas/{name}")
    return {name: _described(schema, _MODELS[name]) for name, schema in components.items() if name in _MODELS}


def _described(schema: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return the schema of a model with the meanings of its members; of an answer, its own ones first."""
    meanings: dict[str, str] = {}
    for base in reversed(model.__mro__):
        docstring = inspect.cleandoc(base.__doc__ or "") if base.__module__ in _WHERE else ""
        meanings |= {name: " ".join(text.split()) for name, text in _MEMBER.findall(docstring)}
    properties = dict[str, Any]()
    is_answer = model.__module__ != parameters.__name__
    own = model.__annotations__ if is_answer else ()
    of_struct = issubclass(model, msgspec.Struct)
    # a field of a class of the library without a `repr` is in no document
    names = model.__struct_fields__ if of_struct else [field.name for field in dataclasses.fields(model) if field.repr]
    for name in (*(name for name in own if name in names), *(name for name in names if name not in own)):
        member = schema["properties"][name]
        if is_answer or member.get("default", "") is None:
            member.pop("default", None)
        properties[name] = ({"description": meanings[name]} if name in meanings else {}) | member
    properties |= _OF_PLACES if model is types.IndexItem else {}
    required = schema.get("required", [])
    if is_answer:
        absent = {field.name for field in structs.fields(model) if field.default is UNSET} if of_struct else set()
        required = [name for name in names if name not in absent and (model, name) not in _LEFT_OUT]
    text = _MEMBER.split(inspect.cleandoc(model.__doc__ or ""))[0]
    return {"type": "object", "description": " ".join(text.split()), "properties": properties, "required": required}


def _parameters(schema: dict[str, Any]) -> list[dict[str, Any]]:
    parameters = []
    for name, member in schema["properties"].items():
        parameter: dict[str, Any] = {"name": name, "in": "query", "description": member.pop("description")}
        if name in schema["required"]:
            parameter["required"] = True
        if examples := member.pop("examples", None):
            parameter["example"] = examples[0]
        parameters.append(parameter | {"schema": member})
    return parameters
