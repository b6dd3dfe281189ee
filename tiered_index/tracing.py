"""What a call is made for, as logs and traces show it: the id of its request, and spans of OpenTelemetry.

Spans are made where the process has set OpenTelemetry's SDK up: this package neither needs nor loads it, and without it
a span costs a look into a dict. Spans tell topics, statuses, objects and costs,
and no key. Both travel with the context, into other threads, too. Threads: any.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

request_id: ContextVar[str | None] = ContextVar("tiered_index_request_id", default=None)
"""The id of the request that is being answered; None: there is none."""
_NAME = "tiered_index"


class Span(Protocol):
    """What is used of OpenTelemetry's spans."""

    def is_recording(self) -> bool: ...
    def set_attributes(self, attributes: Mapping[str, Any]) -> None: ...


class _NoSpan:
    """Stands for every span where OpenTelemetry isn't loaded."""

    def is_recording(self) -> bool:
        return False

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        pass

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_NO_SPAN = _NoSpan()


def span(name: str, **attributes: Any) -> AbstractContextManager[Span]:
    """Return a block of work as a span ``tiered_index.NAME``, below the present one; what the block raises is noted."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(provider := trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return _NO_SPAN
    own = {f"{_NAME}.{key}": value for key, value in attributes.items()}
    if (asked := request_id.get()) is not None:
        own[f"{_NAME}.request_id"] = asked
    return provider.get_tracer(_NAME).start_as_current_span(f"{_NAME}.{name}", attributes=own)  # type: ignore[no-any-return]
