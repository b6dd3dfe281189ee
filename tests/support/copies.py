"""An index with a history that tests copy, and the checks of a copy."""

from dataclasses import fields
from typing import Any

from tests.support.merging import BASE_MS, DAY_MS, DAY_S, HOUR_MS, Merging
from tests.support.storage_faults import Lent
from tiered_index.service.jobs.copying import Copier
from tiered_index.service.jobs.verify import check_storage
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage

SEGMENT = bytes(range(256)) * 40


def fill(life: Merging, days: int = 2, first: int = 0) -> None:
    """Publish two files per day."""
    for day in range(first, first + days):
        for hour in (1, 20):
            start = BASE_MS + day * DAY_MS + hour * HOUR_MS
            rows = [(start + step * 60_000, key) for step in range(40) for key in ("hot", f"k{step % 3}")]
            life.put(rows[:40], source="s", source_position=life.messages)
            life.put(rows[40:], "debug")
            life.publish()


def until(life: Merging, time_ms: int) -> None:
    life.clock.advance(max(0, time_ms - life.clock.now_ms()) / 1000)


def merge_first_day(life: Merging) -> None:
    until(life, BASE_MS + DAY_MS)
    life.merge(DAY_S)


def archive(life: Merging, start: int = 0, data: bytes = SEGMENT) -> None:
    life.index.archive("broker", start, len(data), lambda at, length: data[at : at + length], None)


def copier(life: Merging, target: Storage, source: Storage | None = None, **more: Any) -> Copier:
    made = Copier(source or life.storage, target, life.clock, threads=more.pop("threads", 1), **more)
    made.open()
    return made


def check_target(life: Merging, target: Storage) -> LogState:
    """Check that all objects of the target's log exist, with the right bytes, and that it answers as the model does."""
    report = Report()
    state = check_storage(target, {}, report, lambda *_: None, deep=True, threads=1)
    assert (report.findings, report.missing) == ([], [])
    assert state is not None
    with life.reader(Lent(target)) as reader:
        life.check(reader)
    return state


def bytes_of(storage: Storage) -> dict[str, bytes]:
    return {info.name: storage.get(info.name) for info in storage.list()}


def same(copied: LogState, source: LogState) -> bool:
    """Return whether two states have the same objects with the same properties."""
    own = {"number", "epoch", "genesis", "positions", "roots", "digest", "chain", "steps"}
    return all(getattr(copied, f.name) == getattr(source, f.name) for f in fields(LogState) if f.name not in own)
