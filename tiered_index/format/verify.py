"""Full check of a compacted file or shard: every byte against its CRC32, every item against the metadata.

The checks report every defect, not only the first one. Memory: the trailer, the filter, and the items of one run or of
several runs with about 16,384 items together. A compacted file needs 24 more bytes per slot. Pure; one thread. SPEC.md
sections 2, 4, 6 and 10.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.base.kernels import crc32
from tiered_index.errors import CorruptFile, InvalidArgument, UnsupportedVersion
from tiered_index.format.foreign import Read, read_exactly
from tiered_index.format.keys.bloom import FILTER_BLOCK_BYTES, block_numbers, blocks_may_hold, filter_hashes
from tiered_index.format.keys.hashing import normal_hashes
from tiered_index.format.layout import HEADER_SIZE, SHARD_MAGIC, SLOT_SIZE, Header, hash_rank, read_header
from tiered_index.format.metadata import Metadata
from tiered_index.format.shard import entry_checksum
from tiered_index.format.trailer import TAIL_SIZE, Run, Tail, Trailer, parse_trailer

Array = npt.NDArray[Any]
# Items of neighbouring runs that are checked together: NumPy takes as long for one run of some hundred items.
_TOGETHER = 1 << 14


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect: the part of the file, the problem, and the byte position if it is known.

    `part` is ``file``, ``tail``, ``directory``, ``metadata``, ``filter``, ``header``, ``slots``, ``run``, ``slot``,
    ``order``, ``interval``, ``bounds``, ``topic`` or ``checksum``.
    """

    part: str
    problem: str
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class _SoundRuns:
    """One or more successive runs that pass their CRC32: their items (n) and epoch seconds (i64, n).

    `ends` has the end of each run's items. `before` has the last item of the run before all of them, or nothing if that
    run was not sound.
    """

    runs: Sequence[Run]
    items: Array
    seconds: Array
    ends: Sequence[int]
    before: Array

    def each(self) -> Iterator[tuple[Run, slice]]:
        """Yield each run and the slice of its items."""
        for run, (start, stop) in zip(self.runs, itertools.pairwise([0, *self.ends]), strict=True):
            yield run, slice(start, stop)

    def falling(self, meta: Metadata) -> Array:
        """Return which items (bool, n) are out of order: they should come before the item in front of them.

        SPEC.md sections 4 and 10 define the order.
        """
        # as bytes, because NumPy copies records column by column
        joined = np.frombuffer(self.before.tobytes() + self.items.tobytes(), self.items.dtype)
        columns: list[Array] = [hash_rank(normal_hashes(joined["key_hash"]), meta.slot_map.base)]
        columns += [~joined[name].astype(np.int64) for name in ("time_diff_s", "offset")]
        columns += [joined[name] for name in ("queue_id", *meta.layout.schema.identity_extra)]
        tied, falling = np.ones(len(joined) - 1, bool), np.zeros(len(joined) - 1, bool)
        for column in columns:
            falling |= tied & (column[1:] < column[:-1])
            tied &= column[1:] == column[:-1]
        return falling if len(self.before) else np.append(False, falling)


class _FileCheck:
    """The checks of one compacted file or shard.

    After the runs were read, `whole` says whether all passed their CRC32. `interval` has the seconds of those that did.
    """

    def __init__(self, read: Read, file_size: int, file: str) -> None:
        self._read, self._size, self._file = read, file_size, file
        self.findings: list[Finding] = []
        self.whole = True
        # 0 for packed items, whose place in a run is unknown
        self._item_bytes = 0
        self._before: Array
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
        """Return the verified trailer; None, with a finding, if it is damaged."""
        if self._size < TAIL_SIZE:
            self._add("file", f"{self._size} bytes are too few for a trailer")
            return None
        part = "tail"
        try:
            raw = read_exactly(self._read, self._size - TAIL_SIZE, TAIL_SIZE, self._file)
            start = Tail.decode(raw, self._file, self._size).directory_position
            part = "directory"
            raw = read_exactly(self._read, start, self._size - start, self._file)
            return parse_trailer(raw, self._file, self._size)
        except UnsupportedVersion:
            raise
        except CorruptFile as error:
            if part == "directory" and "metadata" in error.problem:
                part = "metadata"
            self._add(part, str(error), error.offset)
            return None

    def filter(self, tail: Tail) -> Array | None:
        """Return the filter's words (u32, blocks x 8); None if there is none or it is damaged."""
        data = self._bytes("filter", tail.position, tail.filter_length)
        if data is None:
            return None
        if zlib.crc32(data) != tail.filter_crc32:
            self._add("filter", "CRC32 does not match", tail.position)
            return None
        if tail.filter_length % FILTER_BLOCK_BYTES:
            self._add("filter", f"{tail.filter_length} bytes are not a whole number of blocks", tail.position)
            return None
        return np.frombuffer(data, "<u4").reshape(-1, 8) if data else None

    def header(self, meta: Metadata, expected: Header) -> None:
        """Report differences of the header from `expected` and from its CRC32."""
        data = self._bytes("header", 0, HEADER_SIZE)
        if data is None:
            return
        if zlib.crc32(data) != meta.header_crc32:
            self._add("header", "CRC32 does not match", 0)
        try:
            stored = read_header(data, self._file)
        except CorruptFile as error:
            self._add("header", str(error), 0)
            return
        for name in Header._fields:
            if getattr(stored, name) != getattr(expected, name):
                self._add("header", f"{name} is {getattr(stored, name)}, the metadata says {getattr(expected, name)}")

    def _sound_runs(self, trailer: Trailer, words: Array | None) -> Iterator[_SoundRuns]:
        """Yield all runs that pass their CRC32, several neighbours together. Report all other defects."""
        meta = trailer.metadata
        bounds = {int(block["offset"]): block for block in trailer.directory.blocks}
        topics = np.array(sorted({topic_id for topic_id, _ in meta.topics}), np.int64)
        self._item_bytes = meta.layout.schema.item.itemsize if meta.packing is None else 0
        denied = first_denied = 0
        for sound in self._neighbours(trailer):
            items, seconds = sound.items, sound.seconds
            low, high = self.interval or (int(seconds[0]), int(seconds[0]))
            self.interval = min(low, int(seconds.min())), max(high, int(seconds.max()))
            outside = (seconds < meta.second_min) | (seconds > meta.second_max)
            self._report("interval", outside, "are outside the file's interval", sound)
            nameless = ~np.isin(items["topic_id"], topics)
            self._report("topic", nameless, "have a topic id without name", sound)
            if words is not None:
                keys = filter_hashes(items["key_hash"], items["fingerprint"] if meta.layout.schema.keyed else None)
                absent = np.flatnonzero(~blocks_may_hold(words[block_numbers(keys, len(words))], keys))
                if len(absent) and not denied:
                    run, rows = next(pair for pair in sound.each() if pair[1].stop > absent[0])
                    first_denied = run.offset + self._item_bytes * (int(absent[0]) - rows.start)
                denied += len(absent)
            self._bounds(sound, bounds)
            yield sound
        if denied:
            self._add("filter", f"{denied} items are excluded by the filter", first_denied)

    def _neighbours(self, trailer: Trailer) -> Iterator[_SoundRuns]:
        """Yield all runs that pass their CRC32, several neighbours together. Report the other runs."""
        held: list[tuple[Run, bytes]] = []
        count = 0
        self._before = np.empty(0, trailer.metadata.layout.schema.item)
        for run in trailer.directory.all_runs():
            data = self._bytes("run", run.offset, run.length)
            if data is not None and crc32(data) != run.crc32:
                self._add("run", f"CRC32 of {run.length} bytes does not match", run.offset)
                data = None
            if data is not None:
                held.append((run, data))
                count += run.count
                if count < _TOGETHER:
                    continue
            yield from self._unpacked(held, trailer.metadata)
            held, count = [], 0
            if data is None:
                self.whole, self._before = False, self._before[:0]
        yield from self._unpacked(held, trailer.metadata)

    def _unpacked(self, held: Sequence[tuple[Run, bytes]], meta: Metadata) -> Iterator[_SoundRuns]:
        """Yield runs together. If they can't be unpacked, yield each by itself, and report those that are damaged."""
        if not held:
            return
        try:
            if meta.packing is None:
                items = np.frombuffer(b"".join(data for _, data in held), meta.layout.schema.item)
            else:
                items, _ = meta.packing.unpack(
                    [data for _, data in held], np.array([run.count for run, _ in held]), self._file
                )
        except CorruptFile as error:
            if len(held) > 1:
                for pair in held:
                    yield from self._unpacked([pair], meta)
            else:
                self._add("run", error.problem, held[0][0].offset)
                self.whole, self._before = False, self._before[:0]
            return
        seconds = items["time_diff_s"].astype(np.int64) + meta.begin_ms // 1000
        ends = list(itertools.accumulate(run.count for run, _ in held))
        before, self._before = self._before, items[-1:]
        yield _SoundRuns([run for run, _ in held], items, seconds, ends, before)

    def _bounds(self, sound: _SoundRuns, bounds: Mapping[int, Array]) -> None:
        """Report blocks whose hashes and seconds differ from the directory's `bounds`, which are by position."""
        for run, rows in sound.each() if bounds else ():
            if (block := bounds.get(run.offset)) is None:
                continue
            hashes, seconds = normal_hashes(sound.items["key_hash"][rows]), sound.seconds[rows]
            actual = (int(hashes.min()), int(hashes.max()), int(seconds.min()), int(seconds.max()))
            stored = tuple(int(block[name]) for name in ("hash_min", "hash_max", "second_min", "second_max"))
            if actual != stored:
                problem = f"block's hashes and seconds are {actual}, the directory says {stored}"
                self._add("bounds", problem, run.offset)

    def _report(self, part: str, wrong: Array, problem: str, sound: _SoundRuns) -> None:
        """Report for each run the items that `wrong` (bool, n) marks, if any."""
        for run, rows in sound.each() if wrong.any() else ():
            if (count := int(wrong[rows].sum())) > 0:
                self._add(part, f"{count} items {problem}", run.offset + self._item_bytes * int(wrong[rows].argmax()))

    def runs(self, trailer: Trailer, words: Array | None, starts: Array | None = None) -> None:
        """Check every run's bytes and, if they are sound, its items. `words` are the filter's, or None.

        `starts`, of a file with a slot table, has the begin of each slot and the end of the last (i64, slots + 1).
        """
        meta, groups = trailer.metadata, trailer.directory.groups
        begins = groups["offset"].astype(np.int64)
        first = np.append(groups["first_slot"].astype(np.int64), meta.slot_range[1])
        checksum, slots_in_use, last_slot = 0, 0, -1
        for sound in self._sound_runs(trailer, words):
            checksum += entry_checksum(sound.items, sound.seconds) if meta.is_shard else 0
            slots = meta.slot_map.slots_of(normal_hashes(sound.items["key_hash"]))
            slots_in_use += int(np.count_nonzero(np.diff(slots, prepend=last_slot)))
            last_slot = int(slots[-1])
            if starts is None:
                lies_in = np.searchsorted(begins, [run.offset for run in sound.runs], "right") - 1
                lies_in = np.repeat(lies_in, np.diff(sound.ends, prepend=0))
                wrong = (slots < first[lies_in]) | (slots >= first[lies_in + 1])
                self._report("slot", wrong, "are in the wrong slot group", sound)
            else:
                positions = sound.runs[0].offset + self._item_bytes * np.arange(len(slots), dtype=np.int64)
                wrong = slots != np.searchsorted(starts[:-1], positions, "right") - 1
                self._report("slot", wrong, "are in the wrong slot", sound)
            if meta.in_answer_order:
                self._report("order", sound.falling(meta), "are out of order", sound)
        if not self.whole:
            return
        sum_found = f"{checksum % 2**64:016x}"
        for part, name, computed, said in (
            ("interval", "seconds are", self.interval, (meta.second_min, meta.second_max)),
            ("metadata", "slots in use are", slots_in_use, meta.slots_in_use if starts is None else slots_in_use),
            ("checksum", "the entries' sum is", sum_found, meta.more.get("checksum", sum_found)),
        ):
            if computed != said:
                self._add(part, f"{name} {computed}, the metadata says {said}")

    def slot_table(self, trailer: Trailer) -> Array | None:
        """Return the begin of each slot and the end of the last (i64, slots + 1); None if the table is inconsistent."""
        meta, layout = trailer.metadata, trailer.metadata.layout
        data = self._bytes("slots", HEADER_SIZE, SLOT_SIZE * layout.slots)
        if data is None:
            return None
        if zlib.crc32(data) != meta.slots_crc32:
            self._add("slots", "CRC32 does not match", HEADER_SIZE)
        table = np.frombuffer(data, ">i4").reshape(-1, 2)
        lengths = table[:, 1].astype(np.int64)
        starts = np.append(table[:, 0].astype(np.int64), trailer.tail.position)
        broken = np.flatnonzero(
            (np.diff(starts) != lengths) | (lengths < 0) | (lengths % layout.schema.item.itemsize != 0)
        )
        if len(broken) or starts[0] != layout.items_position:
            slot = int(broken[0]) if len(broken) else 0
            at = HEADER_SIZE + SLOT_SIZE * slot
            self._add("slots", f"{max(len(broken), 1)} slots do not join their neighbour, first slot {slot}", at)
            return None
        in_use = int(np.count_nonzero(lengths))
        if in_use != meta.slots_in_use:
            self._add("slots", f"{in_use} slots are in use, the metadata says {meta.slots_in_use}")
        return starts

    def directory(self, trailer: Trailer, starts: Array) -> bool:
        """Return whether the groups agree with the slot table. Report differences."""
        groups = trailer.directory.groups
        first = np.append(groups["first_slot"].astype(np.int64), trailer.metadata.layout.slots)
        before = len(self.findings)
        for name, expected in (("offset", starts[first[:-1]]), ("length", np.diff(starts[first]))):
            if (groups[name].astype(np.int64) != expected).any():
                self._add("directory", f"groups' {name} contradicts the slot table")
        return len(self.findings) == before

    def metadata(self, meta: Metadata) -> bool:
        """Return whether the metadata is that of a shard, with the times of its window. Report differences."""
        before = len(self.findings)
        missing = [name for name in ("slot_map", "window_s", "checksum") if name not in meta.more]
        if missing:
            self._add("metadata", f"no {missing[0]}: this is not a shard")
            return False
        window_s = meta.more["window_s"]
        if meta.begin_ms % 1000 or meta.end_ms != meta.begin_ms + 1000 * window_s - 1:
            times = f"{meta.begin_ms}..{meta.end_ms}"
            self._add("metadata", f"header's times {times} are not those of a window of {window_s} s")
        begin_s = meta.begin_ms // 1000
        if not begin_s <= meta.second_min <= meta.second_max < begin_s + window_s:
            seconds = f"{meta.second_min}..{meta.second_max}"
            self._add("interval", f"seconds {seconds} are not within the window of {window_s} s from {begin_s}")
        return len(self.findings) == before


def verify_compacted(read: Read, file_size: int, file: str) -> list[Finding]:
    """Return all defects of a compacted file with a trailer. An empty list proves that there are none.

    A damaged trailer or geometry ends the check. Raises `UnsupportedVersion` for another version, `InvalidArgument` if
    the metadata names only a part of the slots, and the errors of `read`.
    """
    check = _FileCheck(read, file_size, file)
    trailer = check.trailer()
    if trailer is None:
        return check.findings
    meta = trailer.metadata
    slots = meta.layout.slots
    if (meta.slot_base, meta.slot_range) != (slots, (0, slots)):
        raise InvalidArgument(
            f"{file} holds slots {meta.slot_range} of {meta.slot_base}: a part of a file is not verified"
        )
    words = check.filter(trailer.tail)
    check.header(meta, Header(meta.layout.preset.end_magic, meta.begin_ms, meta.end_ms, meta.slots_in_use, meta.count))
    if meta.packing is not None:
        check.runs(trailer, words)
        return check.findings
    starts = check.slot_table(trailer)
    if starts is not None and check.directory(trailer, starts):
        check.runs(trailer, words, starts)
    return check.findings


def verify_shard(read: Read, file_size: int, file: str) -> list[Finding]:
    """Return all defects of a shard. An empty list proves that there are none.

    A damaged trailer or metadata ends the check. Raises `UnsupportedVersion` for another version, and the errors of
    `read`.
    """
    check = _FileCheck(read, file_size, file)
    trailer = check.trailer()
    if trailer is None or not check.metadata(trailer.metadata):
        return check.findings
    meta = trailer.metadata
    words = check.filter(trailer.tail)
    check.header(meta, Header(SHARD_MAGIC, meta.begin_ms, meta.end_ms, 0, 0))
    check.runs(trailer, words)
    return check.findings


# Bytes of one window
WINDOW_BYTES = 8 << 20


class WindowedRead:
    """A `Read` that reads windows of 8 MiB and keeps the last. `seen(start, window)` gets each. One thread."""

    def __init__(self, read: Read, size_bytes: int, seen: Callable[[int, bytes], None] | None = None) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._seen = seen
        self._start = 0
        self._window = b""
        self._fetched: set[int] = set()

    def finish(self) -> None:
        """Fetch all windows that no read has touched, so that `seen` gets the whole file."""
        for start in range(0, self._size_bytes, WINDOW_BYTES):
            if start not in self._fetched:
                self._fetch(start)

    def __call__(self, position: int, length: int) -> bytes:
        """Return `length` bytes from `position` on, or fewer at the file's end."""
        pieces = []
        end = min(position + length, self._size_bytes)
        while position < end:
            if not 0 <= position - self._start < len(self._window):
                self._fetch(position // WINDOW_BYTES * WINDOW_BYTES)
                continue
            pieces.append(self._window[position - self._start : end - self._start])
            position += len(pieces[-1])
        return b"".join(pieces)

    def _fetch(self, start: int) -> None:
        self._start = start
        self._fetched.add(start)
        self._window = self._read(start, min(WINDOW_BYTES, self._size_bytes - start))
        if self._seen is not None:
            self._seen(start, self._window)
