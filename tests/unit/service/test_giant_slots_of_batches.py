"""When a question of a batch has enough of a giant slot: what isn't read must not be able to come before its
answers.
"""

import numpy as np
import pytest

from tiered_index import Lookup
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.format.trailer import BLOCK_DTYPE, Run
from tiered_index.service.answers.batch import LookupBatch, Matches
from tiered_index.service.files.search import GiantSlot


def slot(batch: LookupBatch, spans: list[tuple[int, int]], *, ordered: bool) -> GiantSlot:
    """Return a slot whose blocks have these seconds, two items each, for all questions of the batch."""
    blocks = np.zeros(len(spans), BLOCK_DTYPE)
    blocks["hash_min"], blocks["hash_max"] = -(2**31), 2**31 - 1
    blocks["second_min"], blocks["second_max"] = zip(*spans, strict=True)
    runs = [Run(100 * place, 80, 0, 2) for place in range(len(spans))]
    return GiantSlot(blocks, runs, np.arange(len(batch)), batch, ordered=ordered)


def found(*seconds: list[int]) -> Matches:
    """Return rows of each question by their seconds."""
    rows = np.zeros(sum(map(len, seconds)), KEYED_SCHEMA.row)
    rows["second"] = [second for one in seconds for second in one]
    return Matches(np.repeat(np.arange(len(seconds)), [len(one) for one in seconds]), rows)


def read(giant: GiantSlot) -> list[int]:
    """Read a round; return the places of what was read."""
    runs = giant.next_runs()
    for run in runs:
        assert len(giant.take(run))
    return [run.offset // 100 for run in runs]


@pytest.mark.parametrize("ordered", [False, True])
def test_unread_entries_of_the_last_second_count_where_there_is_no_order(ordered: bool) -> None:
    giant = slot(LookupBatch([Lookup(topic="t", key="k", max_count=1)]), [(5, 10), (5, 10), (5, 9)], ordered=ordered)
    assert read(giant) == [0]
    giant.settle(found([10, 10]))
    assert read(giant) == ([] if ordered else [1, 2])


@pytest.mark.parametrize("ordered", [False, True])
def test_what_was_read_behind_a_hole_does_not_make_a_page(ordered: bool) -> None:
    """The second question asks for an old range; the first one finds less in the newest block than the directory let it
    hope for.
    """
    asked = [Lookup(topic="t", key="k", max_count=1), Lookup(topic="t", key="k", max_count=1, end_ms=4000)]
    giant = slot(LookupBatch(asked), [(8, 10), (5, 7), (0, 4)], ordered=ordered)
    assert read(giant) == [0, 2]
    giant.settle(found([9, 3], [4, 3]))
    assert read(giant) == [1]
    giant.settle(found([9, 6], [4, 3]))
    assert read(giant) == []


def test_newest_first_whatever_the_position() -> None:
    giant = slot(
        LookupBatch([Lookup(topic="t", key="k", max_count=1)]), [(0, 3), (8, 10), (0, 12), (5, 7)], ordered=False
    )
    assert read(giant) == [2]
    giant.settle(found([12, 10]))
    assert read(giant) == [1, 3]
    giant.settle(found([12, 10]))
    assert giant.waiting() == [] == read(giant)


def test_each_round_reads_twice_as_much_as_the_one_before() -> None:
    giant = slot(
        LookupBatch([Lookup(topic="t", key="k", max_count=1)]), [(20 - n, 20 - n) for n in range(20)], ordered=True
    )
    sizes = []
    while places := read(giant):
        sizes.append(len(places))
        giant.settle(found([]))
    assert sizes == [1, 2, 4, 8, 5]
