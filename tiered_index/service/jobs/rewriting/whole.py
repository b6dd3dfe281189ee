"""Checks every byte of an object that the log names: a file, shard, segment, catalog or table of ranges.

`verify`, copies, repairs and giving up all decide by this one check. It reads 8 MiB at a time. One thread.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from tiered_index.errors import CorruptFile, ObjectNotFound, UnsupportedVersion
from tiered_index.format.foreign import Read
from tiered_index.format.segments.archived import SegmentTable
from tiered_index.format.segments.catalog import CatalogLogs, decode_end, decode_group
from tiered_index.format.segments.queue_offsets import check_queues
from tiered_index.format.trailer import TAIL_SIZE, Tail, Trailer, parse_trailer
from tiered_index.format.verify import Finding, WindowedRead, verify_compacted, verify_shard
from tiered_index.service.log.publication import stored_file, unlike
from tiered_index.service.log.range_objects import checked_ranges
from tiered_index.service.log.records import ArchivedSegment, StoredCatalog, StoredObject, StoredRanges
from tiered_index.storage.base import Storage

Named = StoredObject | ArchivedSegment | StoredCatalog | StoredRanges
"""An object that a state of the log names, or a segment that one of its catalogs names."""
N = TypeVar("N", bound=Named)
LENGTHS = ("trailer_position", "filter_length", "directory_length", "metadata_length")
"""Fields of a file in the log that the storage's own object also has, but another upload of the file need not have."""
_STEP_BYTES = 16 << 20


def object_bytes(named: Named) -> int:
    """Return the bytes of an object, by the log."""
    return named.object_bytes if isinstance(named, ArchivedSegment) else named.size_bytes


def kind_of(named: Named) -> str:
    """Return the word for an object in reports."""
    kinds = {ArchivedSegment: "segment", StoredCatalog: "catalog", StoredRanges: "range_table"}
    return kinds.get(type(named), "object")


def defects_of(
    storage: Storage, named: Named, seen: Callable[[int, bytes], None] | None = None, *equal: str
) -> list[Finding]:
    """Read a whole object of a storage, and return its defects. `seen(start, window)` gets all its bytes, in any order.

    The fields `equal` of a file (see `unlike`) must be as the log says. Raises `UnsupportedVersion`, and the errors of
    the storage.
    """
    size = storage.head(named.name).size_bytes
    if size != object_bytes(named):
        return [Finding(kind_of(named), f"it has {size:,} bytes, the log says {object_bytes(named):,}")]
    read = WindowedRead(partial(storage.get_range, named.name), size, seen)
    listed = defects(named, read, size, *equal)
    read.finish()
    return listed


def defects(named: Named, read: Read, size: int, *equal: str) -> list[Finding]:
    """Return the defects of an object of `size` bytes. As `defects_of`; it also raises the errors of `read`."""
    if isinstance(named, StoredObject):
        return _of_file(named, read, size, equal)
    try:
        if isinstance(named, ArchivedSegment):
            return _of_segment(named, read, size)
        if isinstance(named, StoredRanges):
            checked_ranges(named, bytes(read(0, size)))
        else:
            _check_catalog(named, read, size)
    except UnsupportedVersion:
        raise
    except CorruptFile as error:
        return [Finding(kind_of(named), error.problem, error.offset)]
    return []


def is_bad(storage: Storage, named: Named) -> bool:
    """Read an object and return whether it is missing or damaged. An object of another version is not.

    Raises `StorageError`.
    """
    try:
        return bool(defects_of(storage, named, None, *LENGTHS))
    except ObjectNotFound:
        return True
    except UnsupportedVersion:
        return False


def not_there(storage: Storage, objects: Iterable[N]) -> list[N]:
    """Return the objects that the storage does not have: a request each. Raises the errors of the storage."""
    missing = []
    for named in objects:
        try:
            storage.head(named.name)
        except ObjectNotFound:
            missing.append(named)
    return missing


def trailer_of(read: Read, name: str, size: int) -> Trailer:
    """Return the verified trailer of a file of `size` bytes. Raises `CorruptFile`, and the errors of `read`."""
    begin = max(0, size - TAIL_SIZE)
    position = Tail.decode(read(begin, size - begin), name, size).directory_position
    return parse_trailer(read(position, size - position), name, size)


def _of_file(stored: StoredObject, read: Read, size: int, equal: tuple[str, ...]) -> list[Finding]:
    listed = (verify_compacted if stored.shard is None else verify_shard)(read, size, stored.name)
    try:
        trailer = trailer_of(read, stored.name, size)
    except CorruptFile as error:
        return listed or [Finding("object", error.problem, error.offset)]
    problem = unlike(stored, stored_file(stored.name, trailer, size, stored.published_ms, stored.origin), *equal)
    return listed if problem is None else [*listed, Finding("object", f"its trailer says {problem}")]


def _of_segment(segment: ArchivedSegment, read: Read, size: int) -> list[Finding]:
    footer_at = segment.size_bytes - segment.footer_bytes
    behind = read(footer_at, size - footer_at)
    table = SegmentTable.decode(behind, size, segment.name, segment.footer_bytes)
    table.check(segment.name, segment.start, segment.size_bytes, segment.crc32)
    whole, length = 0, table.piece_bytes
    bad: list[tuple[int, int]] = []  # number and CRC32, as read, of each damaged piece
    step = max(_STEP_BYTES // length, 1) * length
    for begin in range(0, segment.size_bytes, step):
        ranges = segment.ranges(begin, min(step, segment.size_bytes - begin))
        data = memoryview(b"".join(read(*extent) for extent in ranges))
        whole = zlib.crc32(data, whole)
        for error in table.damage(segment.name, begin, data):
            at = error.offset or 0
            bad.append((at // length, zlib.crc32(data[at - begin :][:length])))
    listed = []
    # successive pieces have the same difference of number and place
    for _, row in itertools.groupby(enumerate(bad), lambda numbered: numbered[1][0] - numbered[0]):
        pieces = [piece for _, piece in row]
        (first, crc32), last = pieces[0], pieces[-1][0]
        part = f"piece {first}" if first == last else f"pieces {first} to {last}"
        problem = f"CRC32 {crc32:#010x}, its table says {int(table.pieces[first]):#010x}"
        listed.append(Finding(part, problem, first * length))
    if whole != segment.crc32:
        listed.append(Finding("segment", f"CRC32 {whole:#010x}, the log says {segment.crc32:#010x}"))
    if table.queues_bytes:
        try:
            check_queues(behind[: table.queues_bytes], segment.start, segment.size_bytes, segment.name)
        except CorruptFile as error:
            place = None if error.offset is None else segment.size_bytes + error.offset
            listed.append(Finding("queue offsets", error.problem, place))
    return listed


def _check_catalog(stored: StoredCatalog, read: Read, size: int) -> None:
    """Check the rows of a catalog, their order, and what the directory and the log say of them."""
    rows, name, logs = stored.rows, stored.name, CatalogLogs()
    for group in rows.groups:
        in_group = decode_group(read(group.position, group.length), group, rows.logs, name)
        for at in range(len(in_group)):
            logs.add(in_group.row(at))
    end_at = rows.groups[-1].position + rows.groups[-1].length
    directory = decode_end(read(end_at, size - end_at), name)
    CorruptFile.unless_equal(name, "its directory differs from the log's", rows, directory)
    CorruptFile.unless_equal(name, "its rows differ from its directory", rows.logs, logs.rows())
