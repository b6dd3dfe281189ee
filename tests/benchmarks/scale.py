"""`make bench SUITE=scale`: the costs of an index of many objects and archived segments, without their bytes.

The log, the checkpoint, the catalogs and the skip list are the real ones. The log names synthetic objects, which are
empty, and segments, which are missing. Nothing here reads an entry. Each phase runs in a new process, so that its
memory counts.
"""

import itertools
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from tests.benchmarks.memory import memory_bytes
from tests.benchmarks.report import finish, note, numbers, options, scratch
from tests.support.log_records import publish
from tiered_index import IndexReader
from tiered_index.base.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.format.layout import SlotMap
from tiered_index.format.names import checkpoint_name, log_name
from tiered_index.format.segments.segment import ArchivedSegment
from tiered_index.service.jobs.segments.catalogs import merge_catalogs, send_catalog
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import IndexDescriptor, LogRecord, StoredObject, TableShard
from tiered_index.storage.local import LocalStorage

_DAY_S = 86_400
_LONG_S = 30 * _DAY_S
_BEGIN_S = 1_480_000_000 // _LONG_S * _LONG_S
# ten years
_END_S = _BEGIN_S + 122 * _LONG_S
# of all objects: daily tables of the last two windows, and files of the last day; the rest are shards of 30 days
_DAYS, _DAILY_SHARE, _FILE_SHARE = 60, 0.1, 0.05
_ENTRIES, _BYTES = 1_000_000, 14_000_000
_REPEATED = 5
_MOST_INDEXES = 100


# archived segments: as many as a gigabyte each make of a petabyte
_STORES, _SEGMENT_BYTES, _ROUND, _LOOKUPS = ("broker-a", "broker-b", "broker-c"), 1 << 30, 4_095, 2_000

Figures = dict[str, float]
Phase = Callable[[str, int], Figures]


def synthetic_objects(count: int, base: int) -> Iterator[StoredObject]:
    """Yield about `count` objects of ten years, the oldest first: shards of 30 days, then of days, then files."""
    files = max(1, int(count * _FILE_SHARE))
    daily = max(_DAYS, int(count * _DAILY_SHARE))
    days_begin_s = _END_S - _DAYS * _DAY_S
    windows = (days_begin_s - _BEGIN_S) // _LONG_S
    numbers = itertools.count()
    yield from _tables(numbers, windows, max(1, (count - daily - files) // windows), _BEGIN_S, _LONG_S, base)
    # objects of the last day are still files
    yield from _tables(numbers, _DAYS - 1, max(1, daily // _DAYS), days_begin_s, _DAY_S, base)
    for number in range(files):
        begin_s = _END_S - _DAY_S + number * _DAY_S // files
        yield _object(next(numbers), begin_s, begin_s + _DAY_S // files, None)


def _tables(
    numbers: Iterator[int], windows: int, shards: int, begin_s: int, window_s: int, base: int
) -> Iterator[StoredObject]:
    for window in range(windows):
        first_s = begin_s + window * window_s
        for shard in range(shards):
            low, high = (base * (shard + step) // shards for step in (0, 1))
            # a small index has fewer slots than shards here
            high = max(high, low + 1)
            part = TableShard(f"{window_s:016x}{window:016x}", first_s, window_s, SlotMap(base), low, high, "writer")
            yield _object(next(numbers), first_s, first_s + window_s - 1, part)


def _object(number: int, second_min: int, second_max: int, shard: TableShard | None) -> StoredObject:
    file_id = f"{number:032x}"
    return StoredObject(
        name=f"data/{file_id}/{number * 0x9E3779B97F4A7C15 % 2**64:016x}",
        file_id=file_id,
        lane="main",
        sequence=number,
        second_min=second_min,
        second_max=second_max,
        count=_ENTRIES,
        size_bytes=_BYTES,
        trailer_position=_BYTES - 1_700_000,
        filter_length=1 << 20,
        directory_length=600_000,
        metadata_length=2_000,
        published_ms=second_max * 1000,
        shard=shard,
    )


def _cpu_s(call: Callable[[], object], times: int = 1) -> float:
    taken = []
    for _ in range(times):
        begun = time.process_time()
        call()
        taken.append(time.process_time() - begun)
    return statistics.median(taken)


def _mib(name: str) -> float:
    return memory_bytes("self", name) / 2**20


def _written(folder: str, count: int) -> Figures:
    """Write the log of about `count` objects, and the empty objects."""
    layout = IndexConfig.load(environment=False).geometry()
    storage = LocalStorage(folder)
    log = StorageLog(storage, SystemClock())
    log.create(IndexDescriptor("0" * 32, layout, "scale"))
    epoch = log.claim_epoch()
    objects = tuple(synthetic_objects(count, layout.slots))
    number = log.state.number + 1
    data = LogRecord(number, "publish", epoch, "0" * 16, 0, objects, previous=log.state.digest).encode()
    storage.put_if_absent(log_name(number), data)
    state = log.state.apply(LogRecord.decode(data, log_name(number)), log_name(number))
    checkpoint = state.encode()
    storage.put(checkpoint_name(state.number, state.digest), checkpoint)
    for stored in objects:
        # without the syncs of a put
        path = storage._path(stored.name)
        path.parent.mkdir(parents=True)
        path.touch()
    return {
        "objects in the log": len(objects),
        "checkpoint, MB": len(checkpoint) / 1e6,
        "checkpoint, bytes an object": len(checkpoint) / len(objects),
    }


def _opened(folder: str, _: int) -> Figures:
    """Open a reader, as a new process does, and choose files."""
    storage, before = LocalStorage(folder), _mib("VmRSS")
    begun = time.process_time()
    with IndexReader.open(storage_backend=storage, environment=False, refresh_interval_s=10**6) as reader:
        return {
            "open a reader, CPU s": time.process_time() - begun,
            "open a reader, requests": reader.storage.total.requests,
            "open a reader, MiB kept": _mib("VmRSS") - before,
            "open a reader, MiB at most": _mib("VmHWM") - before,
        }


def _refreshed(folder: str, _: int) -> Figures:
    """Append records, and read each in a reader."""
    storage = LocalStorage(folder)
    reader = IndexReader.open(storage_backend=storage, environment=False, refresh_interval_s=10**6)
    log = StorageLog(LocalStorage(folder), SystemClock())
    epoch = log.open().epoch
    appended, refreshed = [], []
    for number in range(_REPEATED):
        stored = _object((1 << 40) + number, _END_S, _END_S + 1, None)
        appended.append(_cpu_s(partial(publish, log, epoch, (stored,))))
        refreshed.append(_cpu_s(reader.refresh))
    reader.close()
    with IndexReader.open(storage_backend=storage, environment=False, refresh_interval_s=10**6) as again:
        requests = again.storage.total.requests
    return {
        "open a reader after these records, requests": requests,
        "append a record, CPU ms": statistics.median(appended) * 1e3,
        "refresh after one record, CPU ms": statistics.median(refreshed) * 1e3,
    }


def _several(folder: str, count: int) -> Figures:
    """Read as many objects as one index has, but in the indexes of up to 100 writers below a prefix."""
    layout = IndexConfig.load(environment=False).geometry()
    indexes = min(_MOST_INDEXES, count // 100)
    for place in range(indexes):
        log = StorageLog(LocalStorage(Path(f"{folder}-several/{place}")), SystemClock())
        log.create(IndexDescriptor(f"{place:032x}", layout, "scale"))
        publish(log, log.claim_epoch(), tuple(synthetic_objects(max(200, count // indexes), layout.slots)))
    before, begun = _mib("VmRSS"), time.process_time()
    with IndexReader.open(f"file://{folder}-several", environment=False, refresh_interval_s=10**6) as reader:
        assert len(reader.sources) == indexes
        return {
            "many indexes": indexes,
            "many indexes: open a reader, CPU s": time.process_time() - begun,
            "many indexes: open a reader, requests": sum(storage.total.requests for storage in reader.storages),
            "many indexes: MiB kept": _mib("VmRSS") - before,
            "many indexes: threads": threading.active_count(),
            "many indexes: refresh without a new record, CPU ms": _cpu_s(reader.refresh, _REPEATED) * 1e3,
        }


def _archived(folder: str, count: int) -> Figures:
    """Write the log of `count` archived segments of three stores. A round's segments are in a catalog of their own."""
    log = StorageLog(LocalStorage(folder), SystemClock())
    log.create(IndexDescriptor("0" * 32, IndexConfig.load(environment=False).geometry(), "segments"))
    epoch, of_store, of_round = log.claim_epoch(), count // len(_STORES), _ROUND // len(_STORES)
    for first in range(0, of_store, of_round):
        numbers = range(first, min(first + of_round, of_store))
        catalog, _ = send_catalog(log, (_segment(store, number) for store in _STORES for number in numbers), epoch)
        record = LogRecord(0, "archive", epoch, "", 0, catalogs=(catalog,))
        log.append("scale", epoch, lambda _, record=record: record)
        merge_catalogs(log, epoch)
    checkpoint = log.state.encode()
    log.storage.put(checkpoint_name(log.state.number, log.state.digest), checkpoint)
    return {
        "segments": sum(stored.rows.count for stored in log.state.catalogs.values()),
        "catalogs": len(log.state.catalogs),
        "checkpoint, MB": len(checkpoint) / 1e6,
    }


def _segment(store: str, number: int) -> ArchivedSegment:
    start, drawn = number * _SEGMENT_BYTES, (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    name = f"segments/{store}/{start:020d}/{1:020d}-{drawn:016x}.log"
    return ArchivedSegment(name, store, start, _SEGMENT_BYTES, drawn % 2**32, 2, _SEGMENT_BYTES + 52, 3)


def _looked_up(folder: str, count: int) -> Figures:
    """Open a reader, as a new process does, and find the segments of offsets of the whole log."""
    before, chance, most = _mib("VmRSS"), Random(1), 0
    with IndexReader.open(storage_backend=LocalStorage(folder), environment=False, refresh_interval_s=10**6) as reader:
        opened, archive, begun = reader.storage.total.requests, reader.segment_archive, time.process_time()
        for _ in range(_LOOKUPS):
            reads, store = list[int](), chance.choice(_STORES)
            offset = chance.randrange(count // len(_STORES) * _SEGMENT_BYTES)
            (segment,) = archive.holding(offset, store, reads)
            assert (segment.store, segment.start) == (store, offset - offset % _SEGMENT_BYTES)
            most = max(most, len(reads))
        return {
            "open a reader, requests": opened,
            "find a segment, CPU us": (time.process_time() - begun) / _LOOKUPS * 1e6,
            "find a segment, ranged reads at most": most,
            "reader after this, MiB": _mib("VmRSS"),
            "reader after this, MiB more than before": _mib("VmRSS") - before,
        }


_PHASES: tuple[Phase, ...] = (_written, _opened, _refreshed, _several)
_SEGMENT_PHASES: tuple[Phase, ...] = (_archived, _looked_up)


def measured(folder: Path, count: int, phases: tuple[Phase, ...]) -> Figures:
    """Return the figures of an index of about `count` objects or segments, each phase in a new process."""
    figures: Figures = {}
    for phase in phases:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            figures |= pool.apply(phase, (str(folder), count))
    return figures


def main(suite: str, arguments: list[str]) -> None:
    """Measure each size, and print the table."""
    parser = options(suite, __doc__)
    parser.add_argument("--objects", type=numbers, default=[1_000, 10_000, 100_000], help="sizes, by commas")
    parser.add_argument("--segments", type=numbers, default=[10_000, 1_000_000], help="numbers of segments, by commas")
    flags = parser.parse_args(arguments)
    figures, tables = list[Figures](), dict[str, list[tuple[object, ...]]]()
    for what, sizes, phases in (("objects", flags.objects, _PHASES), ("segments", flags.segments, _SEGMENT_PHASES)):
        columns = list[Figures]()
        for size in sizes:
            note(f"{size:,} {what}")
            with scratch(flags.root_dir) as folder:
                columns.append(measured(folder / "index", size, phases))
        if columns:
            rows = [(name, *(of_size[name] for of_size in columns)) for name in columns[0]]
            tables[f"an index of so many {what}"] = [("figure", *(f"{size:,}" for size in sizes)), *rows]
        figures += columns
    finish(flags, {"figures": figures, "tables": tables})
