"""`make bench SUITE=segments`: an index with a million segments, made by a program, on a local disk.

The figures are times and requests of an opening, and ranged reads of lookups of segments. They are also the
memory of a reader and of jobs that read all segments, and the bytes of a record and of its checkpoint. Each part runs
in a process of its own, so that its peak of memory is its own.
"""

import multiprocessing
import time
from collections.abc import Callable
from random import Random
from typing import Any

from tests.benchmarks.memory import memory_bytes
from tests.benchmarks.report import finish, note, options, scratch
from tests.support.log_records import GENESIS
from tiered_index import IndexReader
from tiered_index.clock import SystemClock
from tiered_index.format.archived import segment_object_bytes
from tiered_index.format.names import log_name
from tiered_index.format.segment import ArchivedSegment
from tiered_index.retention import Retention
from tiered_index.service.jobs.catalogs import merge_catalogs, send_catalog
from tiered_index.service.jobs.copying import _listed_beyond
from tiered_index.service.jobs.expiry import plan_expiry
from tiered_index.service.jobs.verify import check_object
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord
from tiered_index.service.read.segments import Segments
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import open_storage

_STORES, _LOOKUPS = 1000, 1000
_BEGIN_MS = 1_700_000_000_000
_RECORDS = 50_000
"""Records of each segment."""


def _segment(random: Random, store: int, number: int) -> ArchivedSegment:
    name, start = f"kafka:cluster/topic{store // 10:03d}/{store % 10}", number * _RECORDS
    size = random.randrange(1 << 20, 8 << 20)
    object_name = f"segments/{name.replace(':', '=3A').replace('/', '=2F')}/{start:020d}/{3:020d}-"
    return ArchivedSegment(
        f"{object_name}{random.getrandbits(64):016x}.parquet",
        name,
        start,
        size,
        random.getrandbits(32),
        random.getrandbits(32),
        segment_object_bytes(size),
        _BEGIN_MS + number * 3_600_000,
        None,
        (_RECORDS, random.randrange(900, 1100)),
    )


def build(uri: str, segments: int) -> dict[str, Any]:
    """Make the index: one catalog, and rounds of uploads, each with a segment of each store. Then merge some."""
    storage = open_storage(uri)
    log = StorageLog(storage, SystemClock())
    log.create(GENESIS)
    begun_s = time.perf_counter()
    random, stores, each = Random(1), range(_STORES), range(segments // _STORES)
    catalog, _ = send_catalog(log, (_segment(random, store, number) for store in stores for number in each))
    made_s = time.perf_counter() - begun_s
    log.append("segments", None, lambda state: LogRecord(0, "archive", 0, "", 0, catalogs=(catalog,)))
    records = []
    for extra in range(3):
        random = Random(extra)
        part, _ = send_catalog(log, [_segment(random, n, segments // _STORES + extra) for n in range(_STORES)])
        log.append("a round", None, lambda state, part=part: LogRecord(0, "archive", 0, "", 0, catalogs=(part,)))
        records.append(len(storage.get(log_name(log.state.number))))
    merge_catalogs(log)
    return {
        "catalog_bytes_a_segment": round(catalog.size_bytes / segments, 1),
        "catalog_s": round(made_s, 1),
        "bytes_of_a_round_record": records,
        "checkpoint_bytes": len(log.state.encode()),
        "catalogs": len(log.state.catalogs),
    }


def read(uri: str, segments: int) -> dict[str, Any]:
    """Open the index, and look up segments, twice each."""
    storage = MeteredStorage(open_storage(uri))
    begun_s = time.perf_counter()
    with IndexReader.open(storage_backend=storage, background=False) as reader:
        opened_s, opening = time.perf_counter() - begun_s, dict(storage.total.requests_by_kind)
        random = Random(2)
        places = [
            (_segment(random, random.randrange(_STORES), 0).store, random.randrange(segments // _STORES * _RECORDS))
            for _ in range(_LOOKUPS)
        ]
        worst, reads = 0, []
        for _ in range(2):
            for store, offset in places:
                before = storage.total.requests
                segment = reader.segment_archive.segments().holding(store, offset)
                assert segment is not None and segment.start <= offset < segment.end
                worst = max(worst, storage.total.requests - before)
            reads.append(storage.total.requests - sum(opening.values()))
        return {
            "opening_s": round(opened_s, 2),
            "opening_requests": opening,
            "most_reads_of_a_lookup": worst,
            "reads_of_lookups": reads[0],
            "reads_of_the_same_lookups_again": reads[1] - reads[0],
        }


def stream(uri: str, segments: int) -> dict[str, Any]:
    """Read all segments as verify does, compare them with those of a copy as its update does, and plan an expiry."""
    storage = open_storage(uri)
    log = StorageLog(storage, SystemClock())
    state, report = log.open(), Report()
    begun_s = time.perf_counter()
    for catalog in state.catalogs.values():
        check_object(storage, catalog, None, report, deep=True)
    checked_s = time.perf_counter() - begun_s
    assert not report.findings
    begun_s = time.perf_counter()
    ours, theirs = Segments(state, storage), Segments(state, storage)
    assert next(_listed_beyond(ours, theirs), None) is None
    compared_s, begun_s = time.perf_counter() - begun_s, time.perf_counter()
    # all but the last day
    now_ms = _BEGIN_MS + segments // _STORES * 3_600_000
    plan = plan_expiry(Retention(segments_age_s=86_400), state, now_ms, storage=storage)
    return {
        "verify_catalogs_s": round(checked_s, 1),
        "copy_compares_s": round(compared_s, 1),
        "expiry_plans_s": round(time.perf_counter() - begun_s, 1),
        "segments_that_expire": plan.segments_expired.segments,
    }


def _part(act: Callable[[str, int], dict[str, Any]], uri: str, segments: int) -> dict[str, Any]:
    return act(uri, segments) | {"peak_mib": memory_bytes("self", "VmHWM") >> 20}


def main(suite: str, arguments: list[str]) -> None:
    """Run each part in a process of its own, and print the figures."""
    parser = options(suite, __doc__)
    parser.add_argument("--segments", type=int, default=1_000_000)
    flags = parser.parse_args(arguments)
    figures: dict[str, Any] = {}
    with scratch(flags.root_dir) as folder:
        for act in (build, read, stream):
            note(act.__name__)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                figures[act.__name__] = pool.apply(_part, (act, (folder / "index").as_uri(), flags.segments))
    rows = [(part, name, str(value)) for part, values in figures.items() for name, value in values.items()]
    finish(
        flags, {"figures": figures, "tables": {f"{flags.segments:,} segments": [("part", "figure", "value"), *rows]}}
    )
