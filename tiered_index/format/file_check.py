"""What the checks of compacted files (`verify`) and of shards (`verify_shard`) have in common: trailer, filter, header, blocks, runs.

Nothing is believed that wasn't checked, and everything that is found is reported. Pure: reads through `read(position, length)`; one thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile, UnsupportedVersion
from tiered_index.format.bloom import FILTER_BLOCK_BYTES, block_numbers, blocks_may_hold, filter_hashes
from tiered_index.format.foreign import Read, read_exactly
from tiered_index.format.hashing import normal_hashes
from tiered_index.format.layout import HEADER_SIZE, Header, read_header
from tiered_index.format.trailer import TAIL_SIZE, Metadata, Run, Tail, Trailer, parse_trailer

__all__ = ["FileCheck", "Finding"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect. `part` is ``file``, ``tail``, ``directory``, ``metadata``, ``filter``, ``header``, ``slots``, ``run``, ``slot``,
    ``order``, ``interval``, ``bounds``, ``topic`` or ``checksum``; `offset` is a byte position where there is one."""

    part: str
    problem: str
    offset: int | None = None


class FileCheck:
    """One file being checked; `findings` is what was found so far.

    After its runs were read, `whole` says whether all were sound, `interval` is the first and the last second in those that were.
    """

    def __init__(self, read: Read, file_size: int, file: str) -> None:
        self._read, self._size, self._file = read, file_size, file
        self.findings: list[Finding] = []
        self.whole = True
        self.interval: tuple[int, int] | None = None

    def _add(self, part: str, problem: str, offset: int | None = None) -> None:
        self.findings.append(Finding(part, problem, offset))

    def _bytes(self, part: str, position: int, length: int) -> bytes | None:
        try:
            return read_exactly(self._read, position, length, self._file)
        except CorruptFile as error:
            self._add(part, error.problem, position)
            return None

    def trailer(self) -> Trailer | None:
        """Return the verified trailer, or None where it can't be believed, which is reported."""
        if self._size < TAIL_SIZE:
            self._add("file", f"{self._size} bytes are too few for a trailer")
            return None
        part = "tail"
        try:
            raw = read_exactly(self._read, self._size - TAIL_SIZE, TAIL_SIZE, self._file)
            tail = Tail.decode(raw, self._file, self._size)
            part = "directory"
            start = tail.directory_position
            trailer = parse_trailer(read_exactly(self._read, start, self._size - start, self._file), self._file, self._size)
        except UnsupportedVersion:
            raise
        except CorruptFile as error:
            if part == "directory" and "metadata" in error.problem:
                part = "metadata"
            self._add(part, str(error), error.offset)
            return None
        return trailer

    def filter(self, tail: Tail) -> Array | None:
        """Return the filter's words (u32, blocks x 8), or None where there is none or it can't be believed."""
        data = self._bytes("filter", tail.position, tail.filter_length)
        if data is None:
            return None
        if zlib.crc32(data) != tail.filter_crc32:
            self._add("filter", "CRC32 does not match", tail.position)
            return None
        if tail.filter_length % FILTER_BLOCK_BYTES:
            self._add("filter", f"{tail.filter_length} bytes are no whole number of blocks", tail.position)
            return None
        return np.frombuffer(data, "<u4").reshape(-1, 8) if data else None

    def header(self, meta: Metadata, expected: Header) -> None:
        """Report in what the header differs from `expected` and from its CRC32."""
        data = self._bytes("header", 0, HEADER_SIZE)
        if data is None:
            return
        if zlib.crc32(data) != meta.header_crc32:
            self._add("header", "CRC32 does not match", 0)
        try:
            found = read_header(data, self._file)
        except CorruptFile as error:
            self._add("header", str(error), 0)
            return
        for name in Header._fields:
            if getattr(found, name) != getattr(expected, name):
                self._add("header", f"{name} is {getattr(found, name)}, the metadata says {getattr(expected, name)}")

    def _sound_runs(self, trailer: Trailer, words: Array | None) -> Iterator[tuple[Run, Array, Array, Array]]:
        """Yield the runs whose bytes are sound: the run, its items, their seconds, and its items behind the last one of the run before.

        Reports what is wrong with bytes, seconds, topics, block bounds and, with the filter's `words`, with the filter.
        """
        meta, dtype = trailer.metadata, trailer.metadata.layout.schema.item
        bounds = {int(block["offset"]): block for block in trailer.directory.blocks}
        topics = np.array(sorted({topic_id for topic_id, _ in meta.topics}), np.int64)
        last = b""
        denied = first_denied = 0
        for run in trailer.directory.all_runs():
            data = self._bytes("run", run.offset, run.length)
            if data is None or zlib.crc32(data) != run.crc32:
                if data is not None:
                    self._add("run", f"CRC32 of {run.length} bytes does not match", run.offset)
                self.whole, last = False, b""
                continue
            items = np.frombuffer(data, dtype)
            seconds = items["time_diff_s"].astype(np.int64) + meta.begin_ms // 1000
            low, high = self.interval or (int(seconds[0]), int(seconds[0]))
            self.interval = min(low, int(seconds.min())), max(high, int(seconds.max()))
            outside = (seconds < meta.second_min) | (seconds > meta.second_max)
            self._report("interval", outside, "lie outside the file's interval", run, items)
            if len(topics):
                self._report("topic", ~np.isin(items["topic_id"], topics), "have a topic id without name", run, items)
            if words is not None and len(absent := self._denied(items, meta, words)):
                first_denied = run.offset + dtype.itemsize * int(absent[0]) if not denied else first_denied
                denied += len(absent)
            if run.offset in bounds:
                self._block_bounds(run, bounds[run.offset], items, seconds)
            yield run, items, seconds, np.frombuffer(last + data, dtype)
            last = data[-dtype.itemsize :]
        if denied:
            self._add("filter", f"{denied} items are absent, says the filter", first_denied)

    def _report(self, part: str, wrong: Array, problem: str, run: Run, items: Array) -> None:
        """Report the items of a run that are `wrong` (bool, n), if any."""
        if wrong.any():
            self._add(part, f"{int(wrong.sum())} items {problem}", run.offset + items.itemsize * int(np.flatnonzero(wrong)[0]))

    def _denied(self, items: Array, meta: Metadata, words: Array) -> Array:
        """Return which items are absent, says the filter."""
        hashes = filter_hashes(items["key_hash"], items["fingerprint"] if meta.layout.schema.keyed else None)
        return np.flatnonzero(~blocks_may_hold(words[block_numbers(hashes, len(words))], hashes))

    def _block_bounds(self, run: Run, block: Any, items: Array, seconds: Array) -> None:
        hashes = normal_hashes(items["key_hash"])
        found = (int(hashes.min()), int(hashes.max()), int(seconds.min()), int(seconds.max()))
        stored = tuple(int(block[name]) for name in ("hash_min", "hash_max", "second_min", "second_max"))
        if found != stored:
            self._add("bounds", f"block's hashes and seconds are {found}, the directory says {stored}", run.offset)
