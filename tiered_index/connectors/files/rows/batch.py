"""The rows of files as entries: batches of rows, and what all files of rows can do.

The position of a row is the byte of its line in the decompressed text, or its number in a file with columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.connectors.files.rows.mapping import KEY_TYPE, RowMapping, key_column
from tiered_index.connectors.files.rows.places import Place
from tiered_index.connectors.files.rows.restart import RestartPoint
from tiered_index.connectors.files.rows.values import key_value, rows_as_json, run_ends_decoded
from tiered_index.connectors.json_paths import key_texts
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectArchived, ObjectNotFound, TieredIndexError
from tiered_index.format.segments.segment import Times, times_of
from tiered_index.service.write.validation import keys_of_rows

MOST_BAD_ROWS = 10
"""The number of bad rows of a batch that are named."""
UNREADABLE = (CorruptFile, InvalidArgument, ObjectArchived, ObjectNotFound)
"""The errors of one file that say nothing of the others."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ShownLine = Callable[[bytes, int], bytes]
"""Shows the row of a line at a position, as `TextFile.shown_line`."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is no entry: its place for people, the problem, and its position."""

    where: str
    problem: str
    position: int


@dataclass(frozen=True, slots=True)
class Damage:
    """Why not all rows of a file can be read: the first of them is at `position`. `error` names the file, too."""

    error: TieredIndexError
    position: int
    where: str

    @property
    def problem(self) -> str:
        """The problem, without the name of the file."""
        return self.error.problem if isinstance(self.error, CorruptFile) else str(self.error)


@dataclass(frozen=True)
class RowBatch:
    """Rows up to position `end` of a file.

    `positions`, `sizes`, `times_ms`, and `topics` if the topic is a field, have a value for each row with a key; a row
    that was read by itself is there once for each key. `keys` are columns with at most one key for each of them: a row
    has an entry for each key that is not null, and no key twice. `rows` also counts the `keyless`. There are `bad_rows`
    others, and `bad` has the first ones.
    """

    end: int
    rows: int
    keys: tuple[pa.Array, ...]
    positions: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    times_ms: npt.NDArray[np.int64]
    keyless: int = 0
    bad: tuple[BadRow, ...] = ()
    topics: pa.DictionaryArray | None = None
    begin: int = 0
    """The position of the first row of `source`."""
    source: bytes | pa.Table = b""
    """The lines of a text from `begin` on; the rows with all their columns, if the reading is whole."""
    lines_before: int | None = None
    """The number of lines of a text before `begin`; None: not known."""
    has_keys: tuple[bool, ...] = ()
    """Whether a row has a key, for each path of keys; empty: no row is known to have one."""
    has_repeated_keys: bool = False
    """Whether a row has a key by two paths, so that `keys` have it by the first one only."""
    shown_line: ShownLine | None = None
    """Shows a line of `source`; None: it is a table."""
    paths: npt.NDArray[np.int64] | None = None
    """The number of the path in `RowMapping.keys` of each key of the only column; None: each path has a column."""
    bad_rows: int = 0

    def of_paths(self, first: int, end: int) -> RowBatch:
        """Return the rows with a key by paths [`first`, `end`) of `RowMapping.keys`, and only these keys."""
        if self.paths is not None:
            return self.only((self.paths >= first) & (self.paths < end))
        keys = self.keys[first:end]
        have_keys = [column.is_valid().to_numpy(zero_copy_only=False) for column in keys]
        nothing = np.zeros(len(self.positions), np.bool_)
        return replace(self, keys=keys).only(np.logical_or.reduce([nothing, *have_keys]))

    def within(self, begin: int, end: int) -> RowBatch:
        """Return the rows at positions [`begin`, `end`)."""
        return self.only((self.positions >= begin) & (self.positions < end))

    def only(self, chosen: npt.NDArray[np.bool_]) -> RowBatch:
        """Return those of the rows, as `positions` has them, that are chosen (bool, n)."""
        if chosen.all():
            return self
        mask = pa.array(chosen)
        return replace(
            self,
            keys=tuple([column.filter(mask) for column in self.keys]),
            positions=self.positions[chosen],
            sizes=self.sizes[chosen],
            times_ms=self.times_ms[chosen],
            topics=None if self.topics is None else self.topics.filter(mask),
            paths=None if self.paths is None else self.paths[chosen],
        )

    def lines(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Return the number of the line at each position, from 1; None: not known."""
        if self.lines_before is None or not isinstance(self.source, bytes):
            return None
        ends = np.flatnonzero(np.frombuffer(self.source, np.uint8) == 10)
        return np.searchsorted(ends, positions - self.begin) + self.lines_before + 1

    def texts(self, positions: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> list[bytes]:
        """Return the rows at positions, whose lines have these sizes, as they are shown."""
        places = (positions - self.begin).tolist()
        if isinstance(self.source, bytes):
            assert self.shown_line is not None, "of a text"
            lines = zip(places, sizes.tolist(), strict=True)
            return [self.shown_line(self.source[at : at + size], self.begin + at) for at, size in lines]
        return rows_as_json(run_ends_decoded(self.source).take(pa.array(places, pa.int64())))

    @property
    def entries(self) -> int:
        """The number of entries."""
        return sum(len(column) - column.null_count for column in self.keys)

    def by_entry(self) -> tuple[npt.NDArray[np.int64], pa.ChunkedArray]:
        """Return, for each entry, the number of its row in `positions` (i64), and its key."""
        keys, rows = keys_of_rows(self.keys)
        every_row = np.arange(len(self.positions))
        return np.tile(every_row, len(keys)) if rows is None else rows, pa.chunked_array(keys, KEY_TYPE)

    @property
    def times(self) -> Times | None:
        """The least and the greatest time of the entries."""
        return times_of(self.times_ms)


def batch_of_columns(
    columns: Sequence[Sequence[Any] | pa.Array], mapping: RowMapping, positions: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64], end: int,
    may_be_minus_zero: Callable[[npt.NDArray[np.int64]], bool] = lambda rows: False,
) -> RowBatch | None:  # fmt: skip
    """Return the batch of rows by their columns, as `RowMapping.names`; None: rows must be read by themselves."""
    unclear = mapping.unclear_times
    batch = _batch_of_columns(columns, mapping, positions, sizes, end, may_be_minus_zero)
    if batch is None and mapping.zone is not None:
        # their times are read again
        mapping.zone.unclear = unclear
    return batch


def _batch_of_columns(
    columns: Sequence[Sequence[Any] | pa.Array], mapping: RowMapping, positions: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64], end: int, may_be_minus_zero: Callable[[npt.NDArray[np.int64]], bool],
) -> RowBatch | None:  # fmt: skip
    count, rows, keys, has_keys = len(mapping.keys), len(positions), list[pa.Array](), list[bool]()
    has_repeated = False
    times_ms = mapping.times_ms(columns[count])
    topics = None if mapping.topic is None else mapping.topics_of(columns[count + 1])
    if times_ms is None or (mapping.topic is not None and topics is None):
        return None
    for values, name in zip(columns[:count], mapping.key_names, strict=True):
        if (column := key_column(values, may_be_minus_zero, name)) is None:
            return None
        has_keys.append(column.null_count < len(column))
        for earlier in keys:
            # a row has no key twice
            same = pc.equal(column, earlier)
            if pc.any(same).as_py():
                has_repeated = True
                column = pc.if_else(same.fill_null(False), pa.scalar(None, KEY_TYPE), column)
        keys.append(column)
    keyless = 0
    if all(column.null_count for column in keys):
        has_key = np.logical_or.reduce([column.is_valid().to_numpy(zero_copy_only=False) for column in keys])
        if keyless := rows - int(has_key.sum()):
            mask = pa.array(has_key)
            keys = [column.filter(mask) for column in keys]
            positions, sizes, times_ms = positions[has_key], sizes[has_key], times_ms[has_key]
            topics = None if topics is None else topics.filter(mask)
    return RowBatch(
        end, rows, tuple(keys), positions, sizes, times_ms, keyless, topics=topics, has_keys=tuple(has_keys),
        has_repeated_keys=has_repeated,
    )  # fmt: skip


class SingleRows:
    """Gathers rows that are read one by one."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.paths: list[int] = []
        self.topics: list[str] = []
        self.places: list[tuple[int, int, int]] = []
        self.bad: list[BadRow] = []
        self.rows = self.keyless = self.bad_rows = 0
        self._has_keys: list[bool] = []

    def add(self, members: Sequence[Any], mapping: RowMapping, position: int, size: int) -> None:
        """Add a row by its members, as `RowMapping.names`. Raises `InvalidArgument`."""
        count = len(mapping.keys)
        time_ms = mapping.time_ms(members[count])
        topics = [mapping.topic_of(topic) for topic in members[count + 1 :]]
        try:
            keys = mapping.paths_of_keys(members[:count])
        except ValueError as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument(f"a key is a number of too many digits: {error}") from error
        self.rows += 1
        self.keyless += not keys
        self._has_keys = self._has_keys or [False] * count
        if not all(self._has_keys):
            members_of_keys = zip(self._has_keys, members, strict=False)
            self._has_keys = [has or any(key_texts(key_value(member))) for has, member in members_of_keys]
        self.keys += keys
        self.paths += keys.values()
        self.topics += topics * len(keys)
        self.places += [(position, size, time_ms)] * len(keys)

    def refuse(self, where: str, problem: str, position: int) -> None:
        """Count a bad row, and name it if it is one of the first."""
        self.bad_rows += 1
        if len(self.bad) < MOST_BAD_ROWS:
            self.bad.append(BadRow(where, problem, position))

    def batch(self, end: int, mapping: RowMapping) -> RowBatch:
        """Return the rows so far as a batch that ends at position `end`."""
        columns = np.array(self.places, np.int64).reshape(-1, 3)
        arrays = columns[:, 0], columns[:, 1], columns[:, 2]
        topics = None if mapping.topic is None else pa.array(self.topics, pa.string()).dictionary_encode()
        keys, bad = (pa.array(self.keys, KEY_TYPE),), tuple(self.bad)
        return RowBatch(
            end, self.rows, keys, *arrays, self.keyless, bad, topics=topics, paths=np.array(self.paths, np.int64),
            has_keys=tuple(self._has_keys), bad_rows=self.bad_rows,
        )  # fmt: skip


_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


def partition_of(place: str) -> dict[str, str]:
    """Return the fields that the folders of a path or a URI name, as Hive and Spark write them."""
    # a URI has escapes of its own
    folders = place.split("/")[:-1] if place.startswith("/") else map(unquote, place.split("/")[:-1])
    pairs = [folder.partition("=") for folder in folders]
    return {unquote(name): unquote(value) for name, mark, value in pairs if name and mark and value != _NO_VALUE}


class RowFile(ABC):
    """The rows of one file. Raises `InvalidArgument` for a file of another form, `CorruptFile` for damage."""

    format: str
    is_text = True

    def __init__(self, file: Place) -> None:
        self.file = file
        self.partition = partition_of(str(file))
        """The values of the folders above the file, such as ``dt=2026-01-02``: fields that its rows lack."""

    @abstractmethod
    def length_bound(self, position: int) -> int:
        """Return a number of positions to reserve for the file behind `position`: all that it has, unless unknown."""

    @abstractmethod
    def fields(self) -> list[str]:
        """Return the names of the fields of the first row, or of all columns."""

    def lacking(self, mapping: RowMapping) -> dict[tuple[str, str], InvalidArgument | None]:
        """Return the fields of `RowMapping.names` that the file has no column for, as far as it has columns.

        The error is that of a column which is no key.
        """
        return dict.fromkeys(mapping.names)

    @abstractmethod
    def reading(self, mapping: RowMapping, position: int, end: int, *, whole: bool = False) -> RowReading:
        """Return a reading of the rows at positions [`position`, `end`). `whole`: batches have all columns.

        Raises `InvalidArgument` if no row can have a time or a topic.
        """


class RowReading(ABC):
    """One reading of a part of a file. It goes as far as the file can be read: see `damage` after it."""

    damage: Damage | None = None
    """Why some rows were not read, the first reason; None: all rows were read."""

    end: int
    """The position behind the last whole row that was read."""
    is_whole = False
    """Whether the file has no whole row behind `end`, as far as `end` of the reading lets know."""
    held_back_bytes = 0
    """The bytes of a last line without newline, or of a last row with an open quote: they may still be written."""
    held_back_lines = 0
    """The number of newlines in them: 0, unless a quote is open."""
    blocks: tuple[int, tuple[int, ...]] | None = None
    lines_before: int | None = None
    """The number of lines of a text before the reading's begin; None: not known."""
    lines: tuple[int, tuple[int, ...]] | None = None
    """As `LinkedSegment.lines`."""

    @property
    def points(self) -> list[RestartPoint]:
        """The restart points that were found, of packed text; the caller may remove some."""
        return []

    @abstractmethod
    def batches(self, start: int) -> Iterator[RowBatch]:
        """Yield the rows from position `start` on, the end of a row. Rows before it are checksummed only."""
