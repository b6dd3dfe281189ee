"""Records of one partition as columns, of messages of Kafka's client or of records."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.format.segment import Times, times_of
from tiered_index.kafka.client import kafka, leave_out_headers
from tiered_index.kafka.keys import Headers
from tiered_index.kafka.record import KafkaRecord

_NO_TIME_MS = -1


class RecordColumns(NamedTuple):
    """Records of one partition in order of their offsets, n of each.

    `values`: binary, empty if they were left out; `offsets` (i64); `times_ms` (i64): epoch milliseconds, negative for a
    record without a time; `clocks` (i64): numbers of `TimestampType`; `sizes` (i64): the bytes of key, value and
    headers.
    """

    offsets: npt.NDArray[np.int64]
    keys: Sequence[bytes | None]
    values: pa.ChunkedArray
    headers: Sequence[Headers]
    times_ms: npt.NDArray[np.int64]
    clocks: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    @property
    def times(self) -> Times | None:
        """The smallest and the greatest time, epoch milliseconds. None: there is none, or a record has no time."""
        return None if (self.times_ms < 0).any() else times_of(self.times_ms)

    @classmethod
    def of_messages(cls, messages: Sequence[Any]) -> Self:
        """Return the columns of messages of the client."""
        lists = RecordLists()
        lists.add(messages)
        return cls(*lists.columns())

    @classmethod
    def of_records(cls, records: Sequence[KafkaRecord]) -> Self:
        """Return the columns of records of one partition."""
        times_ms = [_NO_TIME_MS if record.timestamp_ms is None else record.timestamp_ms for record in records]
        return cls(
            np.array([record.offset for record in records], np.int64),
            [record.key for record in records],
            _values([pa.array([record.value for record in records], pa.binary())]),
            [record.headers for record in records],
            np.array(times_ms, np.int64),
            np.array([int(record.timestamp_type) for record in records], np.int64),
            np.array([record.size for record in records], np.int64),
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
        columns: list[Any] = [_concatenated(of_parts) for of_parts in zip(*parts, strict=True)]
        return cls(*columns)


def _values(chunks: Sequence[pa.Array]) -> pa.ChunkedArray:
    return pa.chunked_array(chunks, pa.binary())


def _concatenated(columns: Sequence[Any]) -> Any:
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    if isinstance(columns[0], pa.ChunkedArray):
        return _values([chunk for column in columns for chunk in column.chunks])
    return list(itertools.chain(*columns))


class RecordLists:
    """Records of one partition that are added some at a time: no message of the client is kept.

    `with_values`: whether the columns have the values. Otherwise they only have their sizes.
    """

    def __init__(self, *, with_values: bool = True) -> None:
        self.offsets: list[int] = []
        self._keys: list[bytes | None] = []
        self._values: list[pa.Array] = []
        self._headers: list[Headers] = []
        # kind and milliseconds of each record
        self._stamps: list[int] = []
        self._sizes: list[npt.NDArray[np.int64]] = []
        self._with_values = with_values
        # the bytes of all keys, values and headers
        self.size_bytes = 0

    def add(self, messages: Sequence[Any]) -> None:
        """Add messages of the client."""
        message = kafka.Message
        self.offsets.extend(map(message.offset, messages))
        keys = list(map(message.key, messages))
        self._keys += keys
        if self._with_values:
            self._values.append(pa.array(list(map(message.value, messages)), pa.binary()))
        headers = _headers_of_all(messages)
        self._headers += headers
        self._stamps.extend(itertools.chain.from_iterable(map(message.timestamp, messages)))
        # the length of a message is that of its value
        sizes = np.array(list(map(len, messages)), np.int64) + np.array([len(key or b"") for key in keys], np.int64)
        if any(headers):
            sizes += np.array([_header_bytes(pairs) for pairs in headers], np.int64)
        self._sizes.append(sizes)
        self.size_bytes += int(sizes.sum())

    def columns(self) -> RecordColumns:
        """Return the columns of all records that were added."""
        sizes = np.concatenate(self._sizes) if self._sizes else np.zeros(0, np.int64)
        clocks, times_ms = np.array(self._stamps, np.int64).reshape(-1, 2).T
        clocks = np.where(times_ms < 0, 0, clocks)
        times_ms = np.where(clocks == 0, _NO_TIME_MS, times_ms)
        offsets = np.array(self.offsets, np.int64)
        return RecordColumns(offsets, self._keys, _values(self._values), self._headers, times_ms, clocks, sizes)


def _header_bytes(headers: Headers) -> int:
    return sum(len(name.encode()) + len(value or b"") for name, value in headers)


def _headers_of_all(messages: Sequence[Any]) -> list[Headers]:
    """Return the headers of each message, none if the client can't return them."""
    with contextlib.suppress(SystemError):
        return [pairs or () for pairs in map(kafka.Message.headers, messages)]
    headers: list[Headers] = []
    while len(headers) < len(messages):
        try:
            for message in messages[len(headers) :]:
                headers.append(message.headers() or ())
        except SystemError:
            leave_out_headers(messages[len(headers)])
            headers.append(())
    return headers
