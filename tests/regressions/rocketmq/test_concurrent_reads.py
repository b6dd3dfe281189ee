"""Fault: concurrent reads share one file position.

RocketMQ #10462, #10471; golden fault 9.
RocketMQ: a read of `PosixFileSegment` set the position of a shared channel and then read. Of 20,000 concurrent lookups
297 answered wrong and 23 failed.
Here: every read names its position. Lookups from many threads answer as from one thread, hot and cold, through one
service or reader. The conformance suite tests this promise of the storages.
"""

from __future__ import annotations

import random
import threading

import pytest

from tests.stress.crew import Crew

T = 1_700_000_000_000
FILES, EACH, KEYS, THREADS, LOOKUPS = 4, 60, 15, 6, 40


@pytest.mark.parametrize("state", ["compacted", "uploaded", "storage"])
def test_lookups_of_many_threads_answer_as_one_does(make_life, eager_switches, state):
    life = make_life(items=EACH + 1, slots=31)
    for number in range(FILES * EACH):
        life.put("t", 0, f"k{number % KEYS}", number, 10 + number, T + number * 1000)
    life.bring(state)
    assert len(life.service.files()) == FILES
    askers = [ask for _, ask in life.asking()]
    keys = [f"k{number}" for number in range(KEYS)]
    windows = [(None, None), (T + 50_000, T + 130_000), (T + 200_000, None)]
    expected = {
        (key, window): [(answer.offset, answer.size) for answer in life.model.query("t", key, *window)]
        for key in keys
        for window in windows
    }
    crew, start = Crew(1), threading.Barrier(THREADS)

    def look(seed: int) -> None:
        rng = random.Random(seed)
        start.wait(60)
        for _ in range(LOOKUPS):
            key, window, ask = rng.choice(keys), rng.choice(windows), rng.choice(askers)
            result = ask("t", key, *window)
            assert result.status == "complete"
            assert [(item.offset, item.size) for item in result] == expected[key, window]

    crew.wait_for([crew.begin(f"look-{seed}", look, seed) for seed in range(THREADS)])
    crew.finish()
