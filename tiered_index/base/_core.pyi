"""The types of the compiled loops. `_core.pyx` documents each function."""

from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]

REVISION: int

def hash_rows(
    units: npt.NDArray[Any],
    offsets: Int64,
    topic_index: Int64,
    java_of_topic: UInt32,
    second_of_topic: UInt32,
    java: UInt32,
    second: UInt32,
) -> None: ...
def hash_key(key: str, java: int, second: int) -> int: ...
def insert(hashes: Int32, slots: int, first: int, heads: Int32, previous: Int32) -> int: ...
def write_entries(
    entries: UInt8,
    first: int,
    columns: list[UInt8],
    places: Int64,
    times: Int64,
    unit_ms: int,
    begin_ms: int,
    time_place: int,
) -> None: ...
def place_by_slot(data: UInt8, size: int, slots: int, placed: UInt64, order: Int32, counts: Int64) -> None: ...
def gather(data: UInt8, size: int, order: Int32, slots: int, fingerprint: int, items: UInt8, hashes: UInt64) -> int: ...
def distinct(hashes: UInt64, found: UInt64) -> int: ...
def set_bits(hashes: UInt64, words: UInt32) -> None: ...
def filter_hash(value: int) -> int: ...
def block_may_hold(block: bytes, low: int) -> bool: ...
def match(stored: Int32, wanted: Int32, starts: Int64, items: Int64, first: Int64, counts: Int64) -> int: ...
def pack_items(
    data: UInt8,
    starts: Int64,
    base: int,
    of_keys: int,
    columns: Int64,
    line: Int64,
    topics: Int32,
    packed: UInt8,
    ends: Int64,
) -> bool: ...
def find_items(
    words: UInt64,
    runs: Int64,
    wanted: Int64 | None,
    base: int,
    most: int,
    of_keys: int,
    columns: Int64,
    line: Int64,
    topics: Int32,
    items: UInt8,
    counts: Int64,
) -> int: ...
def find_one(
    words: UInt64,
    begin: int,
    size: int,
    count: int,
    key_hash: int,
    base: int,
    most: int,
    of_keys: int,
    columns: Int64,
    line: Int64,
    topics: Int32,
    items: UInt8,
) -> int: ...
def file_states(paths: tuple[bytes, ...], folders: int) -> bytes | None: ...

class PutRows:
    keys: list[str]
    data: bytearray
    size_bytes: int
    def __init__(
        self,
        topics: dict[str, int],
        row_size: int,
        marks: object,
        rows: int,
        room: int,
        room_bytes: int,
        longest_key: int,
        last_ms: int,
    ) -> None: ...
    def add(
        self,
        topic: object,
        queue_id: object,
        keys: object,
        offset: object,
        size: object,
        timestamp_ms: object,
        source: object = ...,
        position: object = ...,
    ) -> int: ...
    def extend(
        self, keys: list[str], row: bytes, size_bytes: int, source: str | None = ..., position: int | None = ...
    ) -> bool: ...
    def close(self) -> None: ...
