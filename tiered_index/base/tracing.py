"""Request ids and OpenTelemetry spans, for logs and traces.

Spans are made only if the process has set up OpenTelemetry's SDK. This package neither needs nor loads the SDK; without
it a span costs a dict lookup. Spans have topics, statuses, objects and costs, but no key. The id and the span belong to
the context, also in other threads that get a copy of it. Threads: any.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

request_id: ContextVar[str | None] = ContextVar("tiered_index_request_id", default=None)
"""The id of the request that this context answers; None: no request."""
_NAME = "tiered_index"


class TraceSpan(Protocol):
    """The part of OpenTelemetry's spans that this package uses."""

    def is_recording(self) -> bool: ...
    def set_attributes(self, attributes: Mapping[str, Any]) -> None: ...
    def update_name(self, name: str) -> None: ...
    def record_exception(self, exception: BaseException) -> None: ...
    def set_status(self, status: Any) -> None: ...


_NO_SPAN = nullcontext()


def is_traced() -> bool:
    """Return whether spans are made."""
    return "opentelemetry.trace" in sys.modules and _set_up() is not None


def span(name: str, **attributes: Any) -> AbstractContextManager[TraceSpan | None]:
    """Return a context manager that makes a span ``tiered_index.NAME`` below the present span.

    It gives None if no spans are made. The span records an error that the block raises.
    """
    trace = _set_up()
    if trace is None:
        return _NO_SPAN
    own = {f"{_NAME}.{key}": value for key, value in attributes.items()}
    if (request := request_id.get()) is not None:
        own[f"{_NAME}.request_id"] = request
    return trace.get_tracer(_NAME).start_as_current_span(f"{_NAME}.{name}", attributes=own)  # type: ignore[no-any-return]


def request_span(method: str, headers: Mapping[bytes, bytes]) -> AbstractContextManager[TraceSpan | None]:
    """Return the span of a request, below the span that its ``traceparent`` names. End it with `tell_request`."""
    trace = _set_up()
    if trace is None:
        return _NO_SPAN
    carried = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
    above = importlib.import_module("opentelemetry.propagate").extract(carried)
    own = {"http.request.method": method, f"{_NAME}.request_id": request_id.get() or ""}
    tracer = trace.get_tracer(_NAME)
    return tracer.start_as_current_span(method, above, trace.SpanKind.SERVER, own)  # type: ignore[no-any-return]


def tell_request(traced: TraceSpan | None, method: str, route: str, status: int, error: Exception | None) -> None:
    """Set the route and the status of a request's span. Only a status of 500 or more marks the span as failed."""
    if traced is None or not traced.is_recording():
        return
    traced.update_name(f"{method} {route}")
    traced.set_attributes({"http.route": route, "http.response.status_code": status})
    if status >= 500:
        traced.set_status(_set_up().StatusCode.ERROR)
        if error is not None:
            traced.record_exception(error)


def _set_up() -> Any:
    """Return OpenTelemetry's trace module; None if the process has not set up the SDK."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return trace
