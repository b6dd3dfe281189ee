"""The end of the chaos campaign: every root publishes its files, all files are merged, and orphans are deleted.

Then the index must have all entries that the journals confirm as durable, and no others, before and after the last
merge. Erased entries are gone, counts agree, no orphans are left, and `verify` finds nothing. One thread. All other
processes of the campaign have ended.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.reliability.chaos_crew import LEASE_TTL_S, SETTINGS, WRITERS
from tests.reliability.chaos_oracle import KEYS, Declared, Gone, problem_with
from tests.support.later import Later
from tests.support.log_records import open_log
from tests.support.processes import without_settings
from tiered_index import IndexReader, IndexService
from tiered_index.base.clock import SystemClock
from tiered_index.errors import LockHeld, StorageError
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import open_storage

_PATIENCE_S = 60.0
_TWO_DAYS_S = 2 * 86400
Count = Callable[[str, int], None]
Fail = Callable[[str, str], None]


def settle(folder: Path, uri: str, count: Count, fail: Fail) -> None:
    """Publish all files, merge, delete orphans, and check everything. Typed errors are findings here."""
    declared = {name: Declared(folder / f"journal-{name}") for name in WRITERS}
    for name, said in declared.items():
        said.look()
        count("entries declared durable", said.durable + 1)
        _publish(name, said, folder, uri, fail)
    with open_storage(uri) as storage:
        log = open_log(storage, SystemClock())
        count("writers' epochs", log.state.epoch)
        gone = Gone(folder / "journal-gone")
        _erase_all(storage, log, gone, fail)
        entries = _entries(log.state)
        _check_all(declared, gone, log.state.number, entries, uri, count, fail)
        for window_s in (86400, 30 * 86400):
            entries -= merge(storage, log, SystemClock(), MergeOptions(window_s=window_s, min_age_s=0)).expired
        if _entries(log.refresh()) != entries:
            fail("wrong", f"{entries} entries to be left by the last merge, {_entries(log.state)} are")
        count("orphans deleted", sweep(storage))
        left = {info.name for prefix in ("data/", "segments/", "probe/") for info in storage.list(prefix)}
        if left != set(log.refresh().objects) or sweep(storage) or storage.purge(0):
            left_over = f"{sorted(left ^ set(log.state.objects))[:5]}, {storage.purge(0)[:5]}"
            fail("wrong", f"after the sweep: {left_over}")
        _check_all(declared, gone, log.state.number, entries, uri, count, fail)
    for place in (["--storage", uri], *(["--root", str(folder / f"root-{name}")] for name in WRITERS)):
        _verify(place, fail)


def sweep(storage: Storage) -> int:
    """Delete orphans as if two days had passed. Return the number of objects."""
    log = open_log(storage, SystemClock())
    orphans = delete_orphans(storage, find_orphans(Later(storage, _TWO_DAYS_S), log))
    return len(orphans.objects)


def _erase_all(storage: Storage, log: StorageLog, gone: Gone, fail: Fail) -> None:
    """Repeat every erasure that has begun. Then no entry of it may remain."""
    gone.look()
    for topic, key, queue, before_s in {erasure[:4] for erasure in gone.said}:
        if key < 0 and queue < 0:
            continue
        keys = (f"key-{key}",) if key >= 0 else ()
        request = EraseRequest(topic, keys, None if keys else queue, before_s * 1000)
        done = erase(storage, log, request, SystemClock(), yes=True, now=True, grace_s=0)
        if done.remaining:
            fail("wrong", f"{request} leaves {done.remaining[:3]} at the end")
        gone.state(topic, before_s, done.log_number, key=key, queue=queue)
    gone.look()


def _entries(state: LogState) -> int:
    return sum(stored.count for stored in state.objects.values())


def _publish(name: str, said: Declared, folder: Path, uri: str, fail: Fail) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            settings = {"lease_ttl_s": LEASE_TTL_S, "background": False, **SETTINGS}
            index = IndexService.open(root=folder / f"root-{name}", storage=uri, **settings)
            break
        except (LockHeld, StorageError):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)
    with index:
        position = index.durable_position(name)
        if (-1 if position is None else position) < said.durable:
            fail("lost", f"writer {name} is at position {position}, and declared {said.durable} durable")
        index.seal()
        while True:
            try:
                index.run_lifecycle()
                index.run_lifecycle()
                break
            except StorageError:
                if time.monotonic() > deadline_s:
                    raise
        if problems := index.health()["problems"]:
            fail("wrong", f"writer {name} has problems at the end: {problems}")


def _check_all(
    declared: dict[str, Declared], gone: Gone, log_number: int, entries: int, uri: str, count: Count, fail: Fail
) -> None:
    """Look up every key of every writer by a new reader."""
    answers = 0
    with IndexReader.open(uri, **SETTINGS) as reader:
        for topic, said in declared.items():
            for key in range(KEYS):
                result = reader.query(topic, f"key-{key}", max_count=10**7)
                known = (topic, key, said.durable, said.offered)
                problem = problem_with(result.items, *known, gone=gone, log_number=log_number)
                if result.status != "complete":
                    problem = "wrong", f"{topic} key-{key} is {result.status} at the end"
                if problem is not None:
                    fail(problem[0], f"at the end: {problem[1]}")
                answers += len(result)
                count("answers checked", 1)
    puts = sum(said.puts for said in declared.values())
    if not answers <= entries <= puts:
        fail("wrong", f"{answers} answers of {entries} stored entries of {puts} that were put")


def _verify(place: list[str], fail: Fail) -> None:
    environment = without_settings()
    command = [sys.executable, "-m", "tiered_index.cli", "verify", "--deep", "--json", *place]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    # a root's notes name local copies of merged files; a storage's name objects that the sweep should have deleted
    notes = json.loads(done.stdout)["notes"] if done.returncode == 0 and place[0] == "--storage" else []
    if done.returncode or notes:
        output = f"{notes[:3]} {done.stdout[-2000:]} {done.stderr[-2000:]}"
        fail("wrong", f"verify {' '.join(place)} ended with {done.returncode}: {output}")
