"""The table of formats for `mutations`: the files of each format, the changes to them, and their decoder.

A change corrects the checksums. A decoder gets the bytes of one file, and decodes everything that needs no other file.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.reliability import resealed
from tests.reliability.hostile_tree import NOW_MS
from tests.reliability.resealed import Reseal
from tests.rocketmq import golden_store
from tests.support.classic_writer import ClassicIndexFile
from tests.support.compacted_files import reader
from tests.support.foreign_lookups import find_compacted, find_unsealed
from tiered_index.base.clock import ManualClock
from tiered_index.connectors.rocketmq.classic import infer_geometry
from tiered_index.connectors.rocketmq.log.columns import decode_index_columns
from tiered_index.connectors.rocketmq.log.store import decode_entries
from tiered_index.errors import TieredIndexError
from tiered_index.format.foreign import HEAD_SIZE, ForeignCompacted, ForeignUnsealed, recognise
from tiered_index.format.journal import parse_journal
from tiered_index.format.layout import ROCKETMQ, Layout
from tiered_index.format.segments.archived import SegmentTable
from tiered_index.format.trailer import TAIL_SIZE, parse_trailer
from tiered_index.format.verify import verify_compacted, verify_shard
from tiered_index.service.jobs.rewriting.merge_plan import MergeOptions, plan_merge
from tiered_index.service.log.records import LogRecord
from tiered_index.service.log.session import LeaseWatch
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.rows import decode_cursor, query_digest
from tiered_index.service.read.files.cold_path import ColdPath
from tiered_index.service.read.files.window_table import WindowTable
from tiered_index.service.read.segments.segments import Segments
from tiered_index.service.root import Marker
from tiered_index.storage.memory import MemoryStorage


@dataclass
class Codec:
    """One format: its files in the tree, their changes, their decoder and their other readers.

    `decode` gets the changed bytes and the file's path below the tree. `drives` are names of `Campaign`'s methods, with
    spaces between them. `weight` is its share, `items` whether it has items, whose fields may be changed.
    """

    name: str
    pattern: str
    reseal: Reseal
    decode: Callable[[bytes, str], object]
    drives: str
    weight: float = 1.0
    items: bool = False
    files: list[str] = field(default_factory=list)


def _trailer(data: bytes, path: str) -> None:
    read = reader(data)
    try:
        trailer = parse_trailer(data, path, len(data))
    finally:
        for verify in (verify_compacted, verify_shard):
            verify(read, len(data), path)
    slots = trailer.metadata.slot_map
    assert sum(run.length for run in trailer.directory.all_runs()) <= len(data)
    for key_hash in (0, 77, 2**31 - 1):
        trailer.directory.runs_of(np.array([slots.slot_of(key_hash)]), 0, 2**40)
    trailer.directory.runs_between(*slots.slots_of_base(0, slots.base), -(2**40), 2**40)


def _journal(data: bytes, path: str) -> None:
    journal = parse_journal(data, path, Path(path).stem)
    if journal is not None:
        assert journal.count <= journal.layout.capacity and journal.valid_length <= len(data)
        assert journal.seconds is None or journal.seconds[0] <= journal.seconds[1]


def _log_record(data: bytes, path: str) -> None:
    record = LogRecord.decode(data, path)
    if record.number == 1:
        _state(LogState().apply(record, path))


def _checkpoint(data: bytes, path: str) -> None:
    _state(LogState.decode(data, path))


def _state(state: LogState) -> None:
    cold = ColdPath(MemoryStorage())
    for shards in state.tables.values():
        WindowTable(cold, shards)
    segments = Segments(LogState(catalogs={stored.name: stored for stored in state.inline}))
    for segment in segments.all():
        segments.segment(segment.store, segment.start)
    if state.genesis is not None:
        plan = plan_merge(state, MergeOptions(window_s=3600, min_age_s=0), now_s=NOW_MS // 1000)
        assert sum(len(job.tasks) for job in plan.rewrites) < 100_000


def _lease(data: bytes, path: str) -> None:
    storage = MemoryStorage()
    storage.put("lease/00000000000000000001/00000000000000000001", data)
    LeaseWatch(storage, ManualClock(NOW_MS)).check("somebody")


def _segment(data: bytes, path: str) -> None:
    table = SegmentTable.decode(data, len(data), path)
    assert len(table.pieces) * 4 <= len(data)


def _cursor(data: bytes, path: str) -> None:
    decode_cursor(data.decode("utf-8", "surrogateescape"), query_digest("t", "hot", 0, 10), 3)


def _bare(data: bytes, path: str) -> None:
    read = reader(data)
    kind = recognise(data[:HEAD_SIZE], data[-TAIL_SIZE:], len(data), path)
    if kind.state == "compacted":
        file = ForeignCompacted.open(read, len(data), path)
        for key_hash in (0, 5, 2**31 - 1):
            find_compacted(file, read, key_hash, 0, 2**62)
        for _ in file.items(read):
            pass
    slots = 101 if "m101" in path else 5 if "slots5" in path else 16
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, slots, max(2, (len(data) - 28 - 8 * slots) // 32))
    unsealed = ForeignUnsealed(data, layout, path)
    find_unsealed(unsealed, 5, 0, 2**62)
    for _ in unsealed.items():
        pass
    assert unsealed.interval_ms is None or unsealed.interval_ms[0] <= unsealed.interval_ms[1]


def _classic(data: bytes, path: str) -> None:
    with contextlib.suppress(TieredIndexError):
        infer_geometry(data, path)
    ClassicIndexFile(data, golden_store.GEOMETRY, file=path).entries()


def _queue(data: bytes, path: str) -> None:
    assert len(decode_entries(data)) <= len(data) // 20


def _log(data: bytes, path: str) -> None:
    batch = decode_index_columns(data, int(Path(path).name), segment_bytes=golden_store.SEGMENT_BYTES, check_crc=True)
    assert batch.columns.num_rows <= len(data)


def _nothing(data: bytes, path: str) -> None:
    """Do nothing: only a drive reads these formats."""


_OFFSETS = [wanted["offset"] % golden_store.SEGMENT_BYTES for wanted in golden_store.expected()]
_MESSAGES = resealed.words(*(offset + at for offset in _OFFSETS for at in (0, 4, 28, 36, 56, 84)))
_ENTRIES, _HEADS = resealed.words(0, 8, 12, 20, 28), resealed.words(*range(0, 64, 4))
_WRITES = "write recover read_root verify"


def codecs() -> list[Codec]:
    stored = "read verify merge inspect_object write orphans"
    local = "read_root inspect dump verify write recover"
    log = "read verify merge orphans write files"
    plain, json, sealed = resealed.words(), resealed.plain_json, resealed.sealed_json
    store, segments = "follow/store", "follow/storage/segments%"
    starts = resealed.words(*range(0, 300, 4))
    return [
        Codec("objects", "*/storage/data%/*/*.index", resealed.compacted, _trailer, stored, 4, items=True),
        Codec("local files", "*/root/[cu][op]*/*.index", resealed.compacted, _trailer, local, 2, items=True),
        Codec("journal", "*/root/unsealed/*.journal", resealed.journal, _journal, f"{_WRITES} inspect", 3),
        Codec("entries", "*/root/unsealed/*.index", plain, _nothing, f"{_WRITES} dump", 0.5, items=True),
        Codec("marker", "*/root/tiered_index.json", json, Marker.decode, _WRITES),
        Codec("lock", "*/root/lock", json, _nothing, "write lock", 0.2),
        Codec("log records", "*/storage/log%/*", sealed, _log_record, log, 3),
        Codec("checkpoints", "*/storage/checkpoint%/*", resealed.checkpoint, _checkpoint, log, 3),
        Codec("epochs", "*/storage/epoch%/*", plain, _nothing, "write verify", 0.2),
        Codec("lease", "*/storage/lease%/*/*", json, _lease, "write other_writer"),
        Codec("archived segments", f"{segments}/*/*/*.log", resealed.archived, _segment, "archive verify", items=True),
        Codec("cache entries", "*/root/cache/*/*", plain, _nothing, "read_root", 0.3),
        Codec("cursors", "cursors/*", resealed.cursor, _cursor, "page"),
        Codec("followers", "follow/root/followers/*.json", json, _nothing, "follow messages", 0.5),
        Codec("commit log", f"{store}/commitlog/*", _MESSAGES, _log, "follow messages", items=True),
        Codec("consume queues", f"{store}/consumequeue/*/*/*", _ENTRIES, _queue, "follow messages"),
        Codec("classic index", f"{store}/index/*", starts, _classic, "classic", items=True),
        Codec("bare files", "bare/*", _HEADS, _bare, "inspect dump verify_file", 0.5, items=True),
        Codec("database rows", "sqlite/db", plain, _nothing, "database", 0.2, items=True),
    ]


def object_of(path: str) -> str:
    """Return the name of the object at a path below a storage's folder."""
    return path.partition("/storage/")[2].replace("%/", "/")
