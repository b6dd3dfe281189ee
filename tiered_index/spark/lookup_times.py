"""Bounds of lookups that are text, as all is in CSV: made epoch milliseconds as the command line does it. Runs in tasks; pure."""

from __future__ import annotations

import pyarrow as pa

from tiered_index.errors import InvalidArgument
from tiered_index.types import parse_time

__all__ = ["shown", "times_of"]

_SHOWN = 40


def shown(text: str) -> str:
    """Return a text as errors show it: what is longer is cut, and is no time any more."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def times_of(texts: pa.Array, column: str) -> pa.Array:
    """Return the epoch milliseconds (i64, n) of texts, null for null. Raises `InvalidArgument` naming the column and what is no time."""
    encoded = texts.dictionary_encode()
    times = []
    for text in encoded.dictionary.to_pylist():
        try:
            times.append(parse_time(shown(text.strip())))
        except ValueError as error:
            raise InvalidArgument(f"column {column}: {error}") from error
    return pa.array(times, pa.int64()).take(encoded.indices)
