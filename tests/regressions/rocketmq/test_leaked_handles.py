"""Fault: handles leak.

RocketMQ #8017; #7222 and #10462 name the same of failed compactions and closed segments.
RocketMQ: every upload of an index file to a POSIX segment left some 570 MB of memory behind, until the process was
stopped after 16 hours.
Here: descriptors and mappings are counted: after any number of rounds of put, flush, compaction, upload, retirement and
lookups, failed ones among them, there are as many as after the first, and none after the close.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tiered_index.errors import SchemaMismatch, TieredIndexError

T = 1_700_000_000_000
ROUNDS = 6


def descriptors():
    names = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            names.append(str(path.readlink()))
        except FileNotFoundError:  # the one that listed them
            continue
    return names


def open_things(life):
    """Descriptors and mappings of anything below the test's folder, deleted files among them."""
    gc.collect()
    folder = str(life.root.parent)
    mappings = [line for line in Path("/proc/self/maps").read_text().splitlines() if folder in line]
    return sorted(name.removeprefix(folder) for name in descriptors() if folder in name), len(mappings)


def one_round(life, number):
    for more in range(12):
        offset = number * 100 + more
        life.put("t", 0, f"k{more % 3}", offset, timestamp_ms=T + offset * 1000)
    life.service.flush()
    life.service.seal()
    life.service.run_lifecycle()
    for key in ("k0", "k1", "k2"):
        life.check("t", key, max_count=1000)
    life.clock.advance(100_000)
    life.service.run_lifecycle()
    life.service.run_lifecycle()
    life.bring("storage", begin="storage")
    for key in ("k0", "k1", "k2"):
        life.check("t", key, max_count=1000)
    life.dismiss()


def test_rounds_leave_as_many_as_the_first(make_life):
    life = make_life(items=5)
    counts = []
    for number in range(ROUNDS):
        one_round(life, number)
        names, mappings = open_things(life)
        assert not [name for name in names if name.endswith("(deleted)")]
        counts.append((len(names), mappings))
    assert counts[1:] == counts[1:2] * (ROUNDS - 1)
    assert counts[-1][1] == 0  # no file is local
    life.close()
    assert open_things(life) == ([], 0)


@pytest.mark.parametrize("state", ["unsealed", "compacted", "uploaded", "storage"])
def test_a_close_in_any_state_leaves_none(make_life, state):
    life = make_life(items=5)
    for number in range(12):
        life.put("t", 0, "k", number, timestamp_ms=T + number * 1000)
    life.bring(state)
    life.check("t", "k")
    before = len(descriptors())
    for _ in range(3):
        life.close()
        assert open_things(life) == ([], 0)
        life.open()
        life.bring(state, begin=state)
        life.check("t", "k")
    assert len(descriptors()) <= before
    life.close()
    assert open_things(life) == ([], 0)


def test_failed_steps_leave_none(make_life):
    """Flushes, compactions, uploads and openings that fail, again and again."""
    life = make_life(items=5)
    for number in range(8):
        life.put("t", 0, "k", number, timestamp_ms=T + number * 1000)
    life.service.flush()
    counts = []
    for number in range(8, 8 + 4 * ROUNDS, 4):
        for operation in ("create", "allocate", "pwrite", "sync", "rename"):
            life.disk.fail(operation, times=None)
            for step in (life.service.flush, life.service.seal, life.service.run_lifecycle):
                with pytest.raises(TieredIndexError):
                    step()
                    raise TieredIndexError("there was nothing to do")
            life.disk.clear()
        life.put("t", 0, "k", number, timestamp_ms=T + number * 1000)
        life.storage.fail("put", name_prefix="data/", times=None)
        with pytest.raises(TieredIndexError):
            life.service.seal()
            life.service.run_lifecycle()
        life.storage.clear()
        life.service.run_lifecycle()
        life.clock.advance(100_000)
        life.service.run_lifecycle()
        life.service.run_lifecycle()
        counts.append(len(open_things(life)[0]))
        assert len(life.service.query("t", "k", max_count=1000)) == len(life.model.entries)
    assert counts[1:] == counts[1:2] * (ROUNDS - 1)
    life.close()
    assert open_things(life) == ([], 0)
    for _ in range(ROUNDS):
        with pytest.raises(SchemaMismatch):
            life.open(slots=64)
        life.storage.fail("*", times=None)
        with pytest.raises(TieredIndexError):
            life.reader()
        life.storage.clear()
    assert open_things(life) == ([], 0)
