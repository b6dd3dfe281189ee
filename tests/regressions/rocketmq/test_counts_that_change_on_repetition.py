"""Fault: the same lookup, repeated, returns different counts.

RocketMQ #7872.
RocketMQ: a lookup of at most 32 messages, of a key with more, returned 32 the first time and 31 the next. The result
depended on which read was faster.
Here: an answer depends only on the entries that were put: not on the moment, the thread, the state of files or the
order of reads. Entries of one identity become one answer before any counting.
"""

from __future__ import annotations

import itertools
import threading

import pytest

from tests.support.model import Answer

T = 1_700_000_000_000
FILES, EACH = 5, 12
REPEATS = 3
RANGES = {32: (9, 7, 5, 5, 5), 1000: (9,) * FILES}
"""The number of ranges that a lookup with this `max_count` reads while one file, from the oldest to the newest, is
delayed: trailers and items of all other files that it needs, and the delayed range.
"""


@pytest.fixture
def written(make_life):
    """Files whose intervals overlap the next one's, with every third message in two of them."""
    life = make_life(items=EACH + 1)
    numbers = itertools.count()

    def put(number: int) -> None:
        life.put("t", 0, "k", number, timestamp_ms=T + (number // EACH * 6 + number * 7919 % 11) * 1000)

    while len(life.model.entries) < FILES * EACH:
        number = next(numbers)
        put(number)
        if number % 3 == 0 and number >= 9:
            put(number - 9)
    return life


def test_repeated_it_is_the_same(written):
    total = len(written.model.query("t", "k", max_count=None))
    assert 32 < total < FILES * EACH
    for _ in written.through():
        for max_count in (9, 20, 31, 32, total):
            for _ in range(REPEATS):
                assert len(written.check("t", "k", max_count=max_count)) == min(max_count, total)


@pytest.mark.parametrize("slowest", range(FILES))
def test_whichever_file_answers_last(written, beside, slowest):
    """One file of the storage is delayed until all others were read."""
    written.bring("storage")
    files = written.service.files()
    assert len(files) == FILES
    for max_count, ranges in RANGES.items():
        expected = written.model.query("t", "k", max_count=max_count)
        reader = written.reader()
        read = threading.Event()
        before = written.storage.calls("get_range")
        hang = written.storage.hang("get_range", name_prefix=f"data/{files[slowest].file_id}/")
        call = beside(lambda reader=reader, max_count=max_count: reader.query("t", "k", max_count=max_count))
        assert hang.entered.wait(60)
        for _ in range(2000):
            if written.storage.calls("get_range") >= before + ranges[slowest]:
                break
            read.wait(0.001)
        hang.release.set()
        assert call.ended()
        assert call.error is None
        assert [Answer.of(item) for item in call.value] == expected
        written.storage.clear()
