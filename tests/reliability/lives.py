"""Scenarios of the crash campaigns: scripts that each use one part of an index. A script continues if a step fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.reliability.world import NOW_MS, World
from tests.support.staging import Job, merge_all
from tiered_index.retention import Retention
from tiered_index.service.erasure.erase import EraseRequest, erase
from tiered_index.service.lifecycle.expiry import record_expiry, sweep
from tiered_index.service.lifecycle.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.service.merge.run import MergeOptions, merge
from tiered_index.storage.disk import Disk

__all__ = ["LIVES", "Life"]

Life = Iterator[Callable[[], object]]


def writing(world: World, disk: Disk) -> Life:
    """Puts and flushes, files that become full, and files that are sealed before."""
    for count in (3, 5, 1, 9, 2):
        yield lambda count=count: world.put(count)  # type: ignore[misc]
        yield world.flush
    yield lambda: world.put(4)
    yield world.seal
    yield world.seal
    yield lambda: world.put(2)
    yield world.flush
    yield lambda: positions_only(world)
    yield world.flush


def positions_only(world: World) -> None:
    """Positions of a source without entries, as for messages without a key."""
    assert world.service is not None
    world.number += 1
    columns = {name: [] for name in ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")}
    world.service.put_batch(columns, source="log", source_position=world.number)
    world.position = world.number


def quarantine(world: World, disk: Disk) -> Life:
    """Every other message has an implausible time."""
    world.wild = 2
    for count in (4, 9, 6):
        yield lambda count=count: world.put(count)  # type: ignore[misc]
        yield world.flush
    yield world.seal
    yield world.run_lifecycle
    world.wild = 1
    yield lambda: world.put(3)
    yield world.flush
    world.wild = 2
    yield lambda: world.put(5)
    yield world.flush


def lifecycle(world: World, disk: Disk) -> Life:
    """The script of fault tests: files on their way from put to storage."""
    yield from world.script()


def keeping(world: World, disk: Disk) -> Life:
    """Local copies of uploaded files are kept for a time, and retired later."""
    world.settings["local_keep_s"] = 50
    yield lambda: world.put(7)
    yield world.seal
    yield world.run_lifecycle
    yield lambda: world.put(7)
    yield world.seal
    yield world.run_lifecycle
    yield lambda: world.clock.advance(100)
    yield lambda: world.put(2)
    yield world.flush
    yield world.run_lifecycle


def reopening(world: World, disk: Disk) -> Life:
    """A writer that is closed, killed and opened again, with files in every state."""

    def again(*, kill: bool) -> None:
        if kill:
            world.abandon()
        elif world.service is not None:
            service, world.service = world.service, None
            service.close()
            world.confirm()
        world.open(disk)
        world.check()
        world.settle()  # after a failed flush, a kill loses the entries of that flush

    yield lambda: world.put(8)
    yield world.flush
    yield lambda: again(kill=True)
    yield lambda: world.put(1)
    yield world.flush
    yield lambda: again(kill=False)
    yield lambda: world.put(7)
    yield world.seal
    yield lambda: again(kill=True)
    yield world.run_lifecycle
    yield lambda: world.put(3)
    yield world.flush
    yield lambda: again(kill=False)


def merging(world: World, disk: Disk) -> Life:
    """Uploaded files are merged while the writer continues."""
    world.settings["refresh_interval_s"] = 0
    for _ in range(2):
        yield lambda: world.put(7)
        yield world.seal
        yield world.run_lifecycle
    yield lambda: world.put(7)
    yield world.seal
    yield lambda: merge_all(world.storage, world.clock)
    yield world.run_lifecycle
    yield lambda: merge_all(world.storage, world.clock)
    yield lambda: world.put(2)
    yield world.flush
    yield world.run_lifecycle


def staging(world: World, disk: Disk) -> Life:
    """Sealed files are staged, and compacted and merged by jobs."""
    world.settings |= {"compaction": "spark", "refresh_interval_s": 0, "compact_timeout_s": 600}
    yield lambda: world.put(7)
    yield world.seal
    yield world.run_lifecycle
    yield lambda: Job(world.storage, world.clock).run()
    yield lambda: world.put(7)
    yield world.seal
    yield world.run_lifecycle
    yield lambda: Job(world.storage, world.clock).run()
    yield lambda: merge_all(world.storage, world.clock)
    yield world.run_lifecycle
    yield world.run_lifecycle
    yield lambda: world.put(3)
    yield world.seal
    yield world.run_lifecycle
    yield lambda: world.clock.advance(700)
    yield world.run_lifecycle


def archiving(world: World, disk: Disk) -> Life:
    """Segments of the source's log are archived during writes."""

    def archive(number: int) -> None:
        assert world.service is not None
        data = bytes([number]) * 3000
        world.service.archive("log", number * 3000, len(data), lambda at, length: data[at : at + length])

    yield lambda: world.put(5)
    yield lambda: archive(0)
    yield world.seal
    yield lambda: archive(1)
    yield world.run_lifecycle
    yield lambda: archive(1)
    yield lambda: world.put(2)
    yield world.flush


def sweeping(world: World, disk: Disk) -> Life:
    """Old orphans are deleted while the writer continues."""

    def sweep() -> None:
        log = StorageLog(world.storage, world.clock)
        log.open()
        delete_orphans(world.storage, find_orphans(world.storage, log, older_than_s=3600))

    yield lambda: world.put(7)
    yield world.seal
    yield world.run_lifecycle
    yield lambda: world.storage.put("data/170000000000000-0123456789ab/left.index", b"of a crash")
    yield lambda: merge_all(world.storage, world.clock)
    yield lambda: world.clock.advance(90_000)
    yield lambda: world.put(7)
    yield world.seal
    yield sweep
    yield world.run_lifecycle
    yield sweep
    yield lambda: world.put(1)
    yield world.flush


def merge_seconds(world: World) -> None:
    """Merge into tables of four seconds each."""
    log = StorageLog(world.storage, world.clock)
    log.open()
    merge(world.storage, log, world.clock, MergeOptions(window_s=4, min_age_s=0), threads=1)


def expiring(world: World, disk: Disk) -> Life:
    """Entries expire by the writer's rule and by a job, in whole files and at merges. Removed objects are deleted."""

    def job() -> None:
        log = StorageLog(world.storage, world.clock)
        log.open()
        record_expiry(log, world.rule, world.clock)
        sweep(world.storage, log, world.rule, delete=True)

    world.rule = Retention(age_s=30, topics={"pay*": 12})
    world.settings |= {"refresh_interval_s": 0, "retention": world.rule}
    for later_s in (32, 4):
        yield lambda: world.put(7)
        yield world.seal
        yield world.run_lifecycle
        yield lambda later_s=later_s: world.clock.advance(later_s)  # type: ignore[misc]
    yield job
    yield world.run_lifecycle
    yield lambda: world.put(7)
    yield world.seal
    yield lambda: merge_seconds(world)
    yield world.run_lifecycle
    yield lambda: world.clock.advance(90_000)
    yield job
    yield lambda: world.put(3)
    yield world.seal
    yield world.run_lifecycle
    yield world.run_lifecycle


def erasing(world: World, disk: Disk) -> Life:
    """A key and a queue are erased during writes: only hidden, or also from the bytes of files and window tables."""

    def job(request: EraseRequest, *, now: bool) -> None:
        world.erasures.append(request)
        log = StorageLog(world.storage, world.clock)
        log.open()
        erase(world.storage, log, request, world.clock, yes=True, now=now, grace_s=0, threads=1)

    world.settings["refresh_interval_s"] = 0
    for _ in range(2):
        yield lambda: world.put(7)
        yield world.seal
        yield world.run_lifecycle
    yield lambda: world.put(4)
    yield lambda: job(EraseRequest("orders", ("a",), before_ms=NOW_MS + 16_000), now=False)
    yield world.run_lifecycle
    yield world.seal
    yield world.run_lifecycle
    yield lambda: world.clock.advance(12)
    yield lambda: merge_seconds(world)
    yield lambda: job(EraseRequest("payments", queue_id=1, before_ms=NOW_MS + 10_000), now=True)
    yield world.run_lifecycle
    yield lambda: world.put(3)
    yield world.seal
    yield world.run_lifecycle


LIVES: dict[str, Callable[[World, Disk], Life]] = {
    life.__name__: life
    for life in (
        *(writing, quarantine, lifecycle, keeping, reopening, merging, staging, archiving, sweeping, expiring),
        erasing,
    )
}
