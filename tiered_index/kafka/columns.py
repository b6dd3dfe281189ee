"""Records of one partition as columns, of messages of Kafka's client or of records."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tiered_index.kafka.client import leave_out_headers
from tiered_index.kafka.keys import Headers
from tiered_index.kafka.record import KafkaRecord

_NO_TIME_MS = -1


class RecordColumns(NamedTuple):
    """Records of one partition in order of their offsets, n of each.

    `offsets` (i64); `times_ms` (i64): epoch milliseconds, negative for a record without a time; `clocks` (i64): numbers
    of `TimestampType`; `sizes` (i64): the bytes of key, value and headers.
    """

    offsets: npt.NDArray[np.int64]
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[Headers]
    times_ms: npt.NDArray[np.int64]
    clocks: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    @classmethod
    def of_messages(cls, messages: Sequence[Any]) -> Self:
        """Return the columns of messages of the client."""
        keys = [message.key() for message in messages]
        values = [message.value() for message in messages]
        sizes = np.array(
            [len(value or b"") + len(key or b"") for key, value in zip(keys, values, strict=True)], np.int64
        )
        headers = _headers_of_all(messages)
        if any(headers):
            sizes += np.array([_header_bytes(pairs) for pairs in headers], np.int64)
        stamps = itertools.chain.from_iterable(message.timestamp() for message in messages)
        clocks, times_ms = np.fromiter(stamps, np.int64, 2 * len(messages)).reshape(-1, 2).T
        clocks = np.where(times_ms < 0, 0, clocks)
        offsets = np.array([message.offset() for message in messages], np.int64)
        return cls(offsets, keys, values, headers, np.where(clocks == 0, _NO_TIME_MS, times_ms), clocks, sizes)

    @classmethod
    def of_records(cls, records: Sequence[KafkaRecord]) -> Self:
        """Return the columns of records of one partition."""
        times_ms = [_NO_TIME_MS if one.timestamp_ms is None else one.timestamp_ms for one in records]
        return cls(
            np.array([one.offset for one in records], np.int64),
            [one.key for one in records],
            [one.value for one in records],
            [one.headers for one in records],
            np.array(times_ms, np.int64),
            np.array([int(one.timestamp_type) for one in records], np.int64),
            np.array([one.size for one in records], np.int64),
        )

    def rows(self, begin: int, end: int | None = None) -> Self:
        """Return the records of the rows [`begin`, `end`)."""
        columns: list[Any] = [column[begin:end] for column in self]
        return type(self)(*columns)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the records of all parts, in their order."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.of_messages(())
        arrays: list[Any] = [
            np.concatenate(columns) if isinstance(columns[0], np.ndarray) else list(itertools.chain(*columns))
            for columns in zip(*parts, strict=True)
        ]
        return cls(*arrays)


def _header_bytes(headers: Headers) -> int:
    return sum(len(name.encode()) + len(value or b"") for name, value in headers)


def _headers_of_all(messages: Sequence[Any]) -> list[Headers]:
    """Return the headers of each message, none if the client can't return them."""
    headers: list[Headers] = []
    while len(headers) < len(messages):
        try:
            for message in messages[len(headers) :]:
                headers.append(message.headers() or ())
        except SystemError:
            leave_out_headers(messages[len(headers)])
            headers.append(())
    return headers
