"""The end of the demo: what a retention rule would let expire, and one key erased for good, both checked."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

from tiered_index.cli.demo.workload import Workload
from tiered_index.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.retention import Retention
from tiered_index.service.erasure.erase import EraseRequest, erase
from tiered_index.service.lifecycle.expiry import expire
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.opening import open_storage

_KEPT_SHARE = 0.5


@dataclass(frozen=True)
class Ending:
    """What a dry run of retention and an erasure said; `wrong` says where that is not so."""

    retention_objects: int
    retention_entries: int
    erased_key: str
    erased_entries: int
    erased_objects: int
    scanned_entries: int
    wrong: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as the demo's figures have it."""
        return asdict(self)


def end_lives(config: IndexConfig, workload: Workload, topic: str, key: str, expected: int) -> Ending:
    """Plan retention over the older half of the time, and erase a key that has `expected` answers; check both."""
    clock, wrong = SystemClock(), []
    first_ms, last_ms = int(workload.timestamp_ms.min()), int(workload.timestamp_ms.max())
    before_ms = last_ms - (last_ms - first_ms) * _KEPT_SHARE
    with contextlib.closing(open_storage(str(config.storage), options=config.s3)) as storage:
        log = StorageLog(storage, clock)
        state = log.open()
        rule = Retention(age_s=(clock.now_ms() - before_ms) / 1000)
        plan, _ = expire(storage, log, rule, clock, yes=False)
        if log.refresh().number != state.number:
            wrong.append("a dry run of retention changed the log")
        if any(stored.second_max * 1000 >= before_ms for stored in plan.objects):
            wrong.append("retention would remove what is young enough")
        older = sum(stored.second_max * 1000 < plan.expired.of_all_ms for stored in state.objects.values())
        if len(plan.objects) != older:
            wrong.append(f"retention would remove {len(plan.objects)} objects, {older} are old enough")
        done = erase(storage, log, EraseRequest(topic, (key,)), clock, yes=True, now=True, grace_s=0)
        if done.remaining or set(done.pending) & set(done.removed):
            wrong.append(f"{len(done.remaining)} objects hold erased entries, {len(done.pending)} are still stored")
        # a crash may have put an entry twice
        if not expected <= done.entries == done.entries_removed:
            wrong.append(f"{done.entries_removed} entries of {done.entries} were erased, {expected} were put")
    return Ending(
        len(plan.objects), plan.entries, key, done.entries, len(done.removed), done.scanned_entries, tuple(wrong)
    )
