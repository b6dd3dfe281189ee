"""The types of the compiled lookups. `_views.pyx` documents each of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]

REVISION: int

class RowForm:
    def __init__(self, extra: Int64, fingerprint_at: int) -> None: ...

class HiddenOf:
    def __init__(
        self,
        begin_s: int,
        hashes: UInt32,
        fingerprints: npt.NDArray[np.uint64],
        key_begins: Int64,
        queues: Int32,
        queue_begins: Int64,
        ranges: list[tuple[int, Int64, Int64, Int64, Int64]],
    ) -> None: ...

class LocalFile:
    def __init__(
        self, form: RowForm, data: Any, ids: dict[str, frozenset[int]] | None, rule: int, begin_s: int, slots: int
    ) -> None: ...
    def with_chains(self, heads: Int32, items_at: int, items: int) -> LocalFile: ...
    def within(self, second_min: int, second_max: int) -> None: ...
    def appended(self, first: int, seconds: Int64) -> None: ...
    def with_groups(
        self, groups: UInt8, crc32: Any, filter_at: int, filter_size: int, filter_crc: int
    ) -> LocalFile: ...
    def from_source(
        self, source: Any, second_min: int, second_max: int, slots: tuple[int, int, int, int] | None = None
    ) -> LocalFile: ...
    def opened(
        self,
        ids: dict[str, frozenset[int]] | None,
        begin_s: int,
        slots: int,
        groups: UInt8,
        size: int,
        packing: tuple[int, Int64, Int64, Int32] | None = None,
    ) -> bool: ...
    def close(self) -> None: ...
    def with_filter(self, held: bytes | None) -> None: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def has_filter(self) -> bool: ...
    @property
    def uses(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def with_packing(self, of_keys: int, columns: Int64, line: Int64, topics: Int32) -> LocalFile: ...

class ItemForm:
    def __init__(self, kind: type[Any], keyed: bool) -> None: ...
    def items(self, topic: str, rows: npt.NDArray[Any], sources: Sequence[str] | None = None) -> tuple[Any, ...]: ...

class ViewRows:
    @property
    def handles(self) -> list[Any]: ...
    @property
    def topic(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def about(self) -> Any: ...
    @property
    def key_hash(self) -> int: ...
    @property
    def masked_hash(self) -> int: ...
    @property
    def second_min(self) -> int: ...
    @property
    def second_max(self) -> int: ...
    @property
    def max_count(self) -> int: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def knows_topic(self) -> bool: ...
    @property
    def has_left(self) -> bool: ...
    @property
    def has_more(self) -> bool: ...
    @property
    def elapsed_ms(self) -> float: ...
    @property
    def rows(self) -> bytearray: ...
    @property
    def retired(self) -> bytes | bytearray: ...
    @property
    def hidden(self) -> HiddenOf | None: ...
    @property
    def notes(self) -> list[int]: ...
    @property
    def steps(self) -> int: ...
    @property
    def spent_by(self) -> dict[int, tuple[int, int]]: ...
    def __len__(self) -> int: ...
    def items(self, form: ItemForm) -> tuple[Any, ...]: ...
    def field(self, name: str) -> Any: ...
    def table(self) -> Any: ...
    def documents(self) -> list[dict[str, Any]] | None: ...

class View:
    def __init__(self, form: RowForm, files: list[tuple[LocalFile | None, int, int]], handles: list[Any]) -> None: ...
    @property
    def bytes_together(self) -> int: ...
    def find(
        self,
        topic: str,
        key_hash: int,
        masked_hash: int,
        fingerprint: int,
        low: int,
        high: int,
        most: int,
        after: tuple[int, ...] | None = None,
        hidden: HiddenOf | None = None,
        call: Any = None,
    ) -> ViewRows | None: ...

class ViewBatch:
    def __init__(
        self,
        view: View,
        topics: list[str],
        topic_index: Int64,
        key_hash: Int32,
        masked_hash: Int32,
        fingerprint: UInt32,
        low: Int64,
        high: Int64,
        most: Int64,
        stored: bool = False,
        after: Int64 | None = None,
        hidden: list[HiddenOf | None] | None = None,
    ) -> None: ...
    @property
    def left(self) -> list[int]: ...
    def find(
        self, start: int, stop: int
    ) -> tuple[bytearray, bytearray, bytearray, bytearray, bytearray, bytearray]: ...
    def chosen(self) -> bytearray: ...
    def picked(
        self, pieces: list[Any], counts: Int64, starts: Int64, lookups: Int64
    ) -> tuple[bytearray, bytearray, bytearray, bytearray] | None: ...

class Answers:
    def __init__(self, kind: type[Any], fields: Any, most_topic: int, most_key: int, last_millisecond: int) -> None: ...
    @property
    def complete(self) -> int: ...
    @property
    def truncated(self) -> int: ...
    def find(
        self,
        view: View,
        about: Any,
        topic: object,
        key: object,
        begin_ms: object,
        end_ms: object,
        max_count: object,
        has_topics: bool = True,
        after: tuple[int, ...] | None = None,
        hidden: dict[str, Any] | None = None,
        call: Any = None,
    ) -> Any: ...
    def rows(
        self,
        view: View,
        about: Any,
        topic: object,
        key: object,
        begin_ms: object,
        end_ms: object,
        max_count: object,
        after: tuple[int, ...] | None = None,
        hidden: Any | None = None,
        call: Any = None,
    ) -> ViewRows | None: ...

def cursor_parts(cursor: object, columns: int) -> tuple[str, tuple[int, ...]] | None: ...
def merged_items(parts: list[ViewRows], sources: list[str], form: ItemForm, most: int) -> tuple[Any, ...]: ...
