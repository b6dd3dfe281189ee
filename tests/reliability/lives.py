"""Scenarios of the crash campaigns: scripts that each use one part of an index. A script continues if a step fails."""

from collections.abc import Callable, Iterator
from functools import partial

from tests.reliability.world import NOW_MS, World
from tests.support.batches import columns_of
from tests.support.filled import merge_all
from tests.support.log_records import open_log
from tiered_index.base.retention import Retention
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.jobs.expiry import record_expiry
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans, sweep
from tiered_index.storage.disk import Disk

Life = Iterator[Callable[[], object]]


def writing(world: World, disk: Disk) -> Life:
    """Puts and flushes, files that become full, and files that are sealed before."""
    yield from world.steps("3 flush 5 flush 1 flush 9 flush 2 flush 4 seal seal 2 flush")
    yield from world.steps("positions flush", positions=lambda: positions_only(world))


def positions_only(world: World) -> None:
    """Positions of a source without entries, as for messages without a key."""
    world.number += 1
    world.service.put_batch(columns_of([]), source="log", source_position=world.number)
    world.position = world.number


def quarantine(world: World, disk: Disk) -> Life:
    """Every other message has an implausible time."""
    world.wild = 2
    yield from world.steps("4 flush 9 flush 6 flush seal run_lifecycle")
    world.wild = 1
    yield from world.steps("3 flush")
    world.wild = 2
    yield from world.steps("5 flush")


def lifecycle(world: World, disk: Disk) -> Life:
    """The script of fault tests: files on their way from put to storage."""
    yield from world.script()


def keeping(world: World, disk: Disk) -> Life:
    """Local copies of uploaded files are kept for a time, and retired later."""
    world.settings["local_keep_s"] = 50
    yield from world.steps("7 seal run_lifecycle 7 seal run_lifecycle")
    yield lambda: world.clock.advance(100)
    yield from world.steps("2 flush run_lifecycle")


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

    ways = {"kill": partial(again, kill=True), "close": partial(again, kill=False)}
    yield from world.steps("8 flush kill 1 flush close 7 seal kill run_lifecycle 3 flush close", **ways)


def merging(world: World, disk: Disk) -> Life:
    """Uploaded files are merged while the writer continues."""
    world.settings["refresh_interval_s"] = 0
    script = "7 seal run_lifecycle 7 seal run_lifecycle 7 seal merge run_lifecycle merge 2 flush run_lifecycle"
    yield from world.steps(script, merge=lambda: merge_all(world.storage, world.clock))


def merging_itself(world: World, disk: Disk) -> Life:
    """The writer merges its uploaded files, keeps local copies of others, and deletes replaced objects a day later."""
    world.settings |= {"refresh_interval_s": 0, "merge": "4s,16s", "local_keep_s": 50}
    acts = {f"wait_{seconds}": partial(world.clock.advance, seconds) for seconds in (40, 90_000)}
    script = "7 seal run_lifecycle wait_40 run_merge 7 seal run_lifecycle 3 flush wait_40 run_merge run_lifecycle"
    yield from world.steps(f"{script} 2 flush wait_90000 run_lifecycle run_merge 1 flush", **acts)


def archiving(world: World, disk: Disk) -> Life:
    """Segments of the source's log are archived during writes."""

    def archive(number: int) -> None:
        data = bytes([number]) * 3000
        world.service.archive("log", number * 3000, len(data), lambda at, length: data[at : at + length])

    archives = {"archive_0": lambda: archive(0), "archive_1": lambda: archive(1)}
    yield from world.steps("5 archive_0 seal archive_1 run_lifecycle archive_1 2 flush", **archives)


def sweeping(world: World, disk: Disk) -> Life:
    """Old orphans are deleted while the writer continues."""

    def sweep() -> None:
        log = open_log(world.storage, world.clock)
        delete_orphans(world.storage, find_orphans(world.storage, log, older_than_s=3600))

    def leave() -> None:
        world.storage.put("data/170000000000000-0123456789ab/left.index", b"of a crash")

    acts = {"leave": leave, "sweep": sweep, "merge": lambda: merge_all(world.storage, world.clock)}
    acts["wait"] = lambda: world.clock.advance(90_000)
    script = "7 seal run_lifecycle leave merge wait 7 seal sweep run_lifecycle sweep 1 flush"
    yield from world.steps(script, **acts)


def merge_seconds(world: World) -> None:
    """Merge into tables of four seconds each."""
    log = open_log(world.storage, world.clock)
    merge(world.storage, log, world.clock, MergeOptions(window_s=4, min_age_s=0), threads=1)


def expiring(world: World, disk: Disk) -> Life:
    """Entries expire by the writer's rule and by a job, in whole files and at merges. Removed objects are deleted."""

    def job() -> None:
        log = open_log(world.storage, world.clock)
        record_expiry(log, world.rule, world.clock.now_ms())
        sweep(world.storage, log, world.rule.grace_s)

    world.rule = Retention(age_s=30, topics={"pay*": 12})
    world.settings |= {"refresh_interval_s": 0, "retention": world.rule}
    acts = {f"wait_{seconds}": partial(world.clock.advance, seconds) for seconds in (32, 4, 90_000)}
    acts |= {"job": job, "merge": lambda: merge_seconds(world)}
    script = "7 seal run_lifecycle wait_32 7 seal run_lifecycle wait_4 job run_lifecycle 7 seal merge run_lifecycle"
    yield from world.steps(f"{script} wait_90000 job 3 seal run_lifecycle run_lifecycle", **acts)


def erasing(world: World, disk: Disk) -> Life:
    """A key and a queue are erased during writes: only hidden, or also from the bytes of files and window tables."""

    def job(request: EraseRequest, *, now: bool) -> None:
        world.erasures.append(request)
        log = open_log(world.storage, world.clock)
        erase(world.storage, log, request, world.clock, yes=True, now=now, grace_s=0, threads=1)

    world.settings["refresh_interval_s"] = 0
    key = EraseRequest("orders", ("a",), before_ms=NOW_MS + 16_000)
    queue = EraseRequest("payments", queue_id=1, before_ms=NOW_MS + 10_000)
    acts = {"hide": partial(job, key, now=False), "erase": partial(job, queue, now=True)}
    acts |= {"wait": partial(world.clock.advance, 12), "merge": lambda: merge_seconds(world)}
    script = "7 seal run_lifecycle 7 seal run_lifecycle 4 hide run_lifecycle seal run_lifecycle"
    yield from world.steps(f"{script} wait merge erase run_lifecycle 3 seal run_lifecycle", **acts)


_LIVES = (
    writing,
    quarantine,
    lifecycle,
    keeping,
    reopening,
    merging,
    merging_itself,
    archiving,
    sweeping,
    expiring,
    erasing,
)
LIVES: dict[str, Callable[[World, Disk], Life]] = {life.__name__: life for life in _LIVES}
