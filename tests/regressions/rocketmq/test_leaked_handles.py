"""Fault: handles leak.

RocketMQ #8017; #7222 and #10462 report the same of failed compactions and closed segments.
RocketMQ: every upload of an index file to a POSIX segment leaked about 570 MB of memory, until the process was stopped
after 16 hours.
Here: the test counts descriptors and mappings. After any number of rounds of put, flush, compaction, upload, retirement
and lookups there are as many as after the first. After the close there are none.
`stress/test_cycles_leave_no_handle.py` proves the same for every cycle, and for a failure of any call.
"""

from __future__ import annotations

from tests.stress.census import census

T = 1_700_000_000_000
ROUNDS = 6


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
        counts.append(census(life.root.parent))
    assert len({(count.below, count.mappings) for count in counts[1:]}) == 1
    assert counts[-1].mappings == 0  # no file is local
    life.close()
    left = census(life.root.parent)
    assert (left.below, left.mappings) == (0, 0)
