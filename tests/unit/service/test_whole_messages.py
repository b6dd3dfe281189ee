"""A full file ends with a whole message, and states its position: a kill before the next file repeats nothing."""

import contextlib
import random

import pytest

from tests.support.batches import batch
from tests.support.disk_faults import FaultDisk, SimulatedCrash
from tests.support.rounds import upload
from tiered_index.errors import TieredIndexError
from tiered_index.service.write.marks import Marks

T = 1_700_000_000_000


def _send(index, sizes, first=0):
    """Put messages of so many keys or rows, in turn by `put` and by `put_batch`. A message's number is its position."""
    for number, size in list(enumerate(sizes, 1))[first:]:
        if number % 2:
            index.put("t", 0, [f"k{row}" for row in range(size)], number, 1, T, source="s", source_position=number)
        else:
            rows = batch(size, key=[f"k{row}" for row in range(size)], offset=[number] * size)
            index.put_batch(rows, "s", number)


@pytest.mark.parametrize("nth", range(1, 60, 3))
@pytest.mark.parametrize("is_uploaded", [True, False])
def test_a_kill_at_any_write_of_a_round_repeats_nothing_of_what_is_on_the_disk(open_index, nth, is_uploaded):
    """One round fills several files. The source sends what is after the durable position again."""
    sizes = random.Random(nth).choices(range(1, 20), k=30)
    disk = FaultDisk()
    index = open_index("root", disk=disk)
    disk.crash("pwrite", nth=nth)
    with contextlib.suppress(SimulatedCrash, TieredIndexError):
        _send(index, sizes)
        index.flush()
    index.abandon()
    index = open_index("root")
    if is_uploaded:
        # what is full is uploaded before the source sends the rest
        upload(index)
    _send(index, sizes, index.durable_position("s") or 0)
    upload(index)
    assert index.durable_position("s") == len(sizes)
    assert sum(stored.count for stored in index.log_state.objects.values()) == sum(sizes)
    assert len(index.log_state.objects) >= sum(sizes) // 20


def test_a_full_file_states_the_position_of_its_last_message(open_index):
    index = open_index("root", items=20)
    for number in (1, 2, 3):
        index.put_batch(batch(8, offset=[number] * 8), "s", number)
    index.flush()
    assert [(file.count, file.journal.positions) for file in index._catalog.all()] == [(16, {"s": 2}), (8, {"s": 3})]


def test_a_batch_that_no_file_can_take_fills_files(open_index):
    index = open_index("root", items=20)
    index.put_batch(batch(5), "s", 1)
    index.put_batch(batch(45), "s", 2)
    index.flush()
    counts = [file.count for file in index._catalog.all()]
    assert sum(counts) == 50 and max(counts) == counts[0] == 19 and len(counts) == 3
    assert index.durable_position("s") == 2


def test_marks_of_joined_chunks_are_those_of_their_messages():
    rng, joined, messages, rows = random.Random(5), Marks(), [], 0
    for _ in range(20):
        chunk, count = Marks(), 0
        for _ in range(rng.randrange(4)):
            count += rng.randrange(1, 5)
            messages.append((rows + count, rng.choice("ab"), rng.randrange(100)))
            chunk.add(count, *messages[-1][1:])
        joined.extend(chunk, rows)
        rows += count
    for row in range(rows + 1):
        before = [message for message in messages if message[0] <= row]
        assert joined.end_at(row) == max([end for end, *_ in before], default=0)
        assert joined.end_after(row) == min([end for end, *_ in messages if end > row], default=None)
        greatest = {}
        for _, source, position in before:
            greatest[source] = max(position, greatest.get(source, 0))
        assert joined.positions_at(row) == greatest
