"""Fault: concurrent reads share one file position.

RocketMQ #10462, #10471; golden fault 9.
RocketMQ: a read of `PosixFileSegment` set the position of a shared channel and then read: of 20,000 concurrent lookups
297 answered wrong and 23 failed.
Here: every read names its place; lookups from many threads answer as one would, hot and cold, through one service or
reader.
"""

from __future__ import annotations

import random
import threading

import pytest

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
    wrong: list[object] = []
    start = threading.Barrier(THREADS)

    def look(seed: int) -> None:
        rng = random.Random(seed)
        start.wait()
        try:
            for _ in range(LOOKUPS):
                key, window, ask = rng.choice(keys), rng.choice(windows), rng.choice(askers)
                result = ask("t", key, *window)
                found = [(item.offset, item.size) for item in result]
                if result.status != "complete" or found != expected[key, window]:
                    wrong.append((key, window, result.status, found))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            wrong.append(error)

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong, wrong[0]


def test_ranges_of_one_object_read_by_many_threads(life, eager_switches):
    """The storage's own promise, on which the above stands: what a read returns depends on its place alone."""
    blocks = [bytes([number]) * 1000 for number in range(200)]
    life.storage.put("data/blocks", b"".join(blocks))
    wrong: list[object] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            number = rng.randrange(len(blocks))
            data = life.storage.get_range("data/blocks", number * 1000, 1000)
            if data != blocks[number]:
                wrong.append((number, data[:4]))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong, wrong[0]
