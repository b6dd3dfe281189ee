"""A migration is struck at every call of the storage, and overtaken: each file and table is the old one or the new one,
and no entry is lost or doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.merging import BASE_MS, DAY_MS, DAY_S, HOUR_MS, Merging, RegionItem
from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.format.compacted import SealedFile
from tiered_index.format.trailer import TAIL_SIZE
from tiered_index.service.lifecycle.orphans import delete_orphans, find_orphans
from tiered_index.service.lifecycle.publication import FinishedObject, send_compacted
from tiered_index.service.log.log import StorageLog
from tiered_index.service.merge import migrate as migrating
from tiered_index.service.merge.migrate import migrate, plan_migration
from tiered_index.service.merge.plan import table_job
from tiered_index.service.merge.task import InputReader, Piece
from tiered_index.storage.base import Call, Storage, WrapperStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.testing.storage_faults import FaultStorage

CALLS = ("put", "put_if_absent", "head", "get", "get_range")


@pytest.fixture
def make_life(tmp_path: Path) -> Iterator[Callable[..., Merging]]:
    """Return a function that makes an index of a day in a packed table and a day in two files, plain by default."""
    made: list[Merging] = []

    def make(**more: Any) -> Merging:
        life = Merging(tmp_path / str(len(made)), settings={"layout": "plain"}, **more)
        for day in range(2):
            for hour in (1, 20):
                start = BASE_MS + day * DAY_MS + hour * HOUR_MS
                # some come late: before their file's beginning
                steps = [(7 * number + 11) % 30 for number in range(30)]
                life.put([(start + step * 60_000, key) for step in steps for key in ("hot", f"k{step % 3}")])
                life.publish()
            if not day:
                life.later(2)
                life.merge(DAY_S)
        made.append(life)
        return life

    yield make
    for life in made:
        life.close()


def run(life: Merging, layout: Any, storage: Storage | None = None) -> int:
    """Migrate; return how many objects were rewritten."""
    log = StorageLog(storage or life.storage, life.clock)
    log.open()
    return migrate(storage or life.storage, log, life.clock, layout, threads=1).sources


def versions(life: Merging) -> set[int]:
    """The format versions of what the log names."""
    return {int.from_bytes(life.storage.get_suffix(name, TAIL_SIZE)[0][8:12], "big") for name in life.state.objects}


def whole(life: Merging) -> None:
    """What the log names is there, of the right size, and has every entry once."""
    state = life.state
    assert {i.name: i.size_bytes for i in life.storage.list("data/") if i.name in state.objects} == {
        name: stored.size_bytes for name, stored in state.objects.items()
    }
    assert sum(stored.count for stored in state.objects.values()) == life.messages


@pytest.mark.parametrize(
    "more", [{}, {"item_type": RegionItem}, {"preset": "rocketmq"}], ids=["native", "extended", "rocketmq"]
)
def test_there_and_back(make_life: Callable[..., Merging], more: Any) -> None:
    if "preset" in more:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Merging, "open", _without_layout(Merging.open))
            life = make_life(**more)
    else:
        life = make_life(**more)
    rocketmq = "preset" in more
    assert run(life, "packed") == (0 if rocketmq else 2)
    life.check()
    assert run(life, "plain") == (1 if rocketmq else 3)
    assert max(versions(life)) <= 2
    life.check()
    assert run(life, "packed") == (1 if rocketmq else 3)
    life.check()
    assert run(life, "packed") == 0
    life.later(3)
    delete_orphans(life.storage, find_orphans(life.storage, life.log()))
    assert {info.name for info in life.storage.list("data/")} == set(life.state.objects)
    life.check()
    life.later()
    life.merge(30 * DAY_S)
    life.check()


def _without_layout(opened: Any) -> Any:
    return lambda self, *given, **more: opened(self, *given, **more, layout=None)


def test_a_table_of_several_shards_goes_whole(make_life: Callable[..., Merging]) -> None:
    life = make_life()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrating, "table_job", partial(_in_shards, table_job))
        assert run(life, "plain") == 1
        (shards,) = life.state.tables.values()
        assert len(shards) > 1
    assert run(life, "packed") == 2 + len(shards)
    whole(life)
    life.check()


def _in_shards(made: Any, *given: Any, **more: Any) -> Any:
    """A job of several tasks, each of which writes a shard."""
    job = made(*given, **more)
    (task,) = job.tasks
    cut = task.base_high // 2 // task.windows[0].slots.join * task.windows[0].slots.join
    return replace(job, tasks=(replace(task, base_high=cut), replace(task, number=1, base_low=cut)))


class Watched(WrapperStorage):
    """Looks at what is there before each call that changes something."""

    look: Callable[[], None] | None = None

    def _around(self, call: Call, act: Callable[[], Any]) -> Any:
        if self.look is not None and not call.operation.startswith(("get", "head", "list")):
            self.look()
        return act()


def test_a_crash_at_any_write_leaves_each_old_or_new(make_life: Callable[..., Merging]) -> None:
    life = make_life()
    storage, seen = Watched(life.storage), set()

    def look() -> None:
        whole(life)
        life.check(questions=[("t", "hot")])
        seen.add(life.state.number)

    storage.look = look
    first = life.state.number
    assert run(life, "plain", storage) == 1
    assert run(life, "packed", storage) == 3
    look()
    assert seen == set(range(first, first + 5))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("operation", CALLS)
def test_a_storage_that_fails_at_any_call(make_life: Callable[..., Merging], operation: str, when: Any) -> None:
    life = make_life()
    for nth in range(1, 40):
        faulty = FaultStorage(life.storage)
        faulty.fail(operation, nth=nth, when=when)
        layout = ("plain", "packed")[nth % 2]
        try:
            run(life, layout, faulty)
        except StorageUnavailable:
            whole(life)
            life.check(questions=[("t", "hot")])
            run(life, layout)
        struck = faulty.calls(operation) >= nth
        whole(life)
        if not struck:
            break
    else:
        pytest.fail("more calls than were struck")
    assert nth > 1
    life.check()


def test_it_is_planned_anew_where_a_merge_was_first(make_life: Callable[..., Merging]) -> None:
    life = make_life()

    class Overtaken(WrapperStorage):
        done = False

        def _around(self, call: Call, act: Callable[[], Any]) -> Any:
            if call.operation == "put" and call.name.startswith("data/") and not self.done:
                self.done = True
                life.later()
                life.merge(30 * DAY_S)
            return act()

    assert run(life, "plain", Overtaken(life.storage)) == 1
    assert (len(life.state.files), len(life.state.tables), versions(life)) == (0, 1, {1})
    whole(life)
    life.check()


def test_nothing_is_published_that_has_other_entries(
    make_life: Callable[..., Merging], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = make_life()
    before = life.state
    pieces = InputReader.pieces

    def without_one(reader: InputReader, most: int) -> Iterator[Piece]:
        for piece in pieces(reader, most):
            yield replace(piece, items=piece.items[1:], seconds=piece.seconds[1:])

    monkeypatch.setattr(InputReader, "pieces", without_one)
    with pytest.raises(CorruptFile, match="another number of entries"):
        run(life, "packed")
    assert life.state == before
    whole(life)
    monkeypatch.setattr(InputReader, "pieces", pieces)
    monkeypatch.setattr(migrating, "send_compacted", _doubling)
    with pytest.raises(CorruptFile, match="another number of entries"):
        run(life, "packed")
    assert life.state == before
    whole(life)


def _doubling(storage: Storage, sealed: SealedFile, entries: Any, now_ms: int) -> FinishedObject:
    """Send a file in which each entry is written twice."""
    return send_compacted(storage, replace(sealed, count=2 * sealed.count), np.concatenate([entries] * 2), now_ms)


def test_a_lost_object_is_told(make_life: Callable[..., Merging]) -> None:
    life = make_life()
    name = next(iter(life.state.files.values())).name
    life.storage.delete(name)
    storage = life.storage
    assert isinstance(storage, MemoryStorage)
    assert name not in {stored.name for stored in plan_migration(storage, life.state, "packed").objects}
    assert run(life, "packed") == 1
