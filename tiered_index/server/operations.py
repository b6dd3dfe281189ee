"""The operations of the service: what a route declares beside its handler, for `app` and `description`.

A handler's name is that of its operation, its docstring the text, and the type of its last argument the model of the
query. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar, get_type_hints

from tiered_index.server import parameters
from tiered_index.server.answers import Document

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
    - `told`: the meaning of the answer, whose status is `status`.
    - `forms`: further content types of the answer.
    - `part`: the meaning of the path's parameter.
    - `problems`: further statuses of problems, with their text, or None for that of `PROBLEMS`.
    - `is_open`: it needs no token.
    - `is_light`: it takes no place of the service's calls, so it answers also if none is free.
    - `has_head`: it answers HEAD, too: probes and monitors send it.
    - `is_told_unready`: its answer with 503 is no problem.
    """

    place: str
    _: KW_ONLY
    body: type[parameters.Nothing] | None = None
    bodies: Mapping[str, Any] = field(default_factory=dict)
    answer: type[Document] | None = None
    told: str = "The answer."
    status: int = 200
    forms: tuple[str, ...] = ()
    part: str | None = None
    problems: Mapping[int, str | None] = field(default_factory=dict)
    is_open: bool = False
    is_light: bool = False
    has_head: bool = False
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
