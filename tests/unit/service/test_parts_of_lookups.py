"""Unit tests of parts of lookups: reads of a giant slot, windows of runs, and rows of items."""

import numpy as np
import pytest

from tiered_index import Lookup
from tiered_index.format.keys.hashing import fingerprint, key_hash
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.format.trailer import BLOCK_DTYPE, Run
from tiered_index.service.read.answers import batch as read_batch
from tiered_index.service.read.answers.batch import LookupBatch, MatchAccumulator, Matches, matching
from tiered_index.service.read.answers.rows import PreparedLookup
from tiered_index.service.read.files.file_search import _GiantSlot, scan_runs


def slot(batch, spans, *, ordered):
    """Return a slot whose blocks have these seconds and two items each, for all lookups of the batch."""
    blocks = np.zeros(len(spans), BLOCK_DTYPE)
    blocks["hash_min"], blocks["hash_max"] = -(2**31), 2**31 - 1
    blocks["second_min"], blocks["second_max"] = zip(*spans, strict=True)
    runs = [Run(100 * place, 80, 0, 2) for place in range(len(spans))]
    return _GiantSlot(blocks, runs, np.arange(len(batch)), batch, ordered=ordered)


def matches_of(*seconds):
    """Return rows of each lookup by their seconds."""
    rows = np.zeros(sum(map(len, seconds)), KEYED_SCHEMA.row)
    rows["second"] = [second for of_lookup in seconds for second in of_lookup]
    return Matches(np.repeat(np.arange(len(seconds)), [len(of_lookup) for of_lookup in seconds]), rows)


def read(giant):
    """Read a round. Return the numbers of the blocks that were read."""
    runs = giant.next_runs()
    for run in runs:
        assert len(giant.asking(run))
        giant.take(run)
    return [run.offset // 100 for run in runs]


@pytest.mark.parametrize("ordered", [False, True])
def test_what_was_read_behind_a_hole_does_not_make_a_page(ordered):
    """The second lookup asks for an old range.

    The first one finds fewer entries in the newest block than it expected.
    """
    lookups = [Lookup(topic="t", key="k", max_count=1), Lookup(topic="t", key="k", max_count=1, end_ms=4000)]
    giant = slot(LookupBatch(lookups), [(8, 10), (5, 7), (0, 4)], ordered=ordered)
    assert read(giant) == [0, 2]
    giant.settle(matches_of([9, 3], [4, 3]))
    assert read(giant) == [1]
    giant.settle(matches_of([9, 6], [4, 3]))
    assert read(giant) == []


BEGIN_S = 1_700_000_000
TOPICS = ((7, "t"),)


def question(second_min, second_max, after=None):
    hashes = key_hash("t", "k", "abs"), key_hash("t", "k", "mask"), fingerprint("t", "k")
    return PreparedLookup("t", "k", *hashes, BEGIN_S + second_min, BEGIN_S + second_max, 1_000, after)


def items_among_others(count):
    """Return `count` items of key "k", one per second, among others.

    Beside each are three items: with another fingerprint, another topic, and another hash.
    """
    items = np.zeros(4 * count, KEYED_SCHEMA.item)
    items["key_hash"], items["fingerprint"], items["topic_id"] = key_hash("t", "k"), fingerprint("t", "k"), 7
    items["time_diff_s"] = items["offset"] = np.repeat(np.arange(count), 4)
    items["fingerprint"][1::4] ^= 1
    items["topic_id"][2::4] = 8
    items["key_hash"][3::4] ^= 1
    return items


@pytest.mark.parametrize("count", [1, 4, 5, 6, 100])
def test_both_ends_of_the_range_are_in_it(count):
    for low, high in ((0, count - 1), (1, count - 2), (count // 2, count // 2)):
        items, batch = items_among_others(count), LookupBatch.of_one(question(low, high))
        rows = matching(batch, items, lambda some: BEGIN_S + some["time_diff_s"], TOPICS, KEYED_SCHEMA).rows
        assert sorted((rows["second"] - BEGIN_S).tolist()) == list(range(low, high + 1))
        assert rows["offset"].tolist() == (rows["second"] - BEGIN_S).tolist()


# the seconds of blocks; whether they are in order; the last entry of the page before; by rounds, the blocks that are
# read, and the seconds of the lookup's rows after that
ROUNDS = [
    ([(5, 10), (5, 10), (5, 9)], True, None, [([0], [10, 10]), ([], [])]),
    # blocks of the last second count, and are read together if there is no order
    ([(5, 10), (5, 10), (5, 9)], False, None, [([0, 1], [10, 10]), ([], [])]),
    ([(5, 10), (5, 9), (5, 9)], True, None, [([0], [10, 9]), ([], [])]),
    ([(5, 10), (5, 9), (5, 9)], False, None, [([0], [10, 9]), ([1, 2], [])]),
    # the newest are read first, and each round reads twice as much as the one before
    ([(0, 3), (8, 10), (0, 12), (5, 7)], False, None, [([2], [12, 10]), ([1, 3], [12, 10]), ([], [])]),
    ([(9, 9)] * 9, True, None, [([0], []), ([1, 2], []), ([3, 4, 5, 6], []), ([7, 8], [])]),
    # blocks that the page before may have used promise nothing
    ([(10, 10), (10, 10), (8, 10), (0, 8)], True, (10, 5, 0), [([0, 1, 2], [])]),
]


@pytest.mark.parametrize(("spans", "ordered", "after", "rounds"), ROUNDS)
def test_each_round_reads_what_the_page_may_lack(spans, ordered, after, rounds):
    lookup = PreparedLookup("t", "k", 1, 1, 1, 0, 10 if after else 99, 1, after=after)
    giant = slot(LookupBatch.of_one(lookup), spans, ordered=ordered)
    for places, seconds in rounds:
        assert read(giant) == places
        giant.settle(matches_of(seconds))


def test_windows_have_as_many_runs_as_fit():
    runs = [Run(100 * place, length, 0, 1) for place, length in enumerate((3, 5, 2, 9, 12, 1, 1))]
    windows = [window for window, _ in scan_runs(None, runs, 10, read=lambda _, window: np.array(len(window)))]
    assert [[run.length for run in window] for window in windows] == [[3, 5, 2], [9], [12], [1, 1]]
    assert [run for window in windows for run in window] == runs


def test_answers_are_missing_until_they_are_sorted(monkeypatch):
    """While a thread sorts the last answers, no file can be skipped yet: all further ones would be searched."""
    ordered, missing = read_batch.OrderedRows, []

    def sorting(*arguments):
        missing.append(answers.missing())
        return ordered(*arguments)

    monkeypatch.setattr(read_batch, "OrderedRows", sorting)
    answers = MatchAccumulator(LookupBatch([Lookup("t", "k", max_count=2)]), KEYED_SCHEMA, skips=True)
    for second in (3, 2):
        assert answers.missing() > 0
        matches = matches_of([second])
        matches.rows["offset"] = second
        answers.add(matches)
    assert missing == [1] and answers.can_skip(1)
