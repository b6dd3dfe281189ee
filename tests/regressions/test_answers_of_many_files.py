"""The answers of each file were sorted into those of all previous files, in a time quadratic in the number of files.

Now they are sorted when their number has doubled, which must change no answer.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.support.batches import batch
from tests.support.model import Answer, ReferenceModel
from tiered_index.format.schema import ROCKETMQ_SCHEMA
from tiered_index.service.read import batch as batch_module
from tiered_index.service.read.batch import LookupBatch, MatchAccumulator, Matches
from tiered_index.service.read.rows import PreparedLookup

NOW_S = 1_700_000_000
FEW = 512
# this many answers are sorted at once; later ones when their number has doubled


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(batch_module, "_FEW_ROWS", FEW)


def make_rows(count, seed, *, identities, seconds):
    """Return rows in random order; a few identities occur more than once."""
    rng = np.random.default_rng(seed)
    rows = np.zeros(count, ROCKETMQ_SCHEMA.row)
    rows["second"] = NOW_S + rng.integers(0, seconds, count)
    rows["queue_id"] = rng.integers(0, 3, count)
    rows["offset"] = rng.integers(0, identities, count)
    rows["size"] = rng.integers(0, 5, count)
    return rows


def sort_everything(rows):
    """Return every answer of the model as (second, offset, queue_id, size)."""
    model = ReferenceModel()
    for second, _, _, queue_id, offset, size in rows.tolist():
        model.put("t", queue_id, "k", offset, size, second * 1000)
    answers = model.query("t", "k", max_count=None)
    return np.array([(a.timestamp_ms // 1000, a.offset, a.queue_id, a.size) for a in answers], np.int64)


def same(rows, wanted):
    return np.array_equal(np.column_stack([rows[name] for name in ("second", "offset", "queue_id", "size")]), wanted)


def in_parts(rows, rng, parts):
    """Return the rows in `parts` pieces of any length, some of them empty, in any order."""
    cuts = sorted(rng.randrange(len(rows) + 1) for _ in range(parts - 1))
    pieces = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    rng.shuffle(pieces)
    return pieces


def matches(rows):
    """Return the rows of one file, as a search for one lookup finds them."""
    return Matches(np.zeros(len(rows), np.int64), rows)


def accumulator(max_count):
    """Return the accumulator of one lookup, whose answers skip files."""
    batch = LookupBatch.of_one(PreparedLookup("t", "k", 1, 1, 1, 0, 2**40, max_count))
    return MatchAccumulator(batch, ROCKETMQ_SCHEMA, skips=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("many", [0, 1, 2], ids=["few identities", "some twice", "hardly any twice"])
def test_the_first_answers_are_those_of_sorting_everything(seed, many):
    rng = random.Random(100 * many + seed)
    count = rng.choice([FEW + 1, 2 * FEW + 50, 3 * FEW])
    rows = make_rows(count, seed, identities=(25, 500, 10**6)[many], seconds=rng.choice([3, 1000, 10**6]))
    wanted = sort_everything(rows)
    total = len(wanted)
    for max_count in {1, 64, FEW, FEW + 1, total - 1, total, total + 1}:
        gathered = accumulator(max_count)
        for part in in_parts(rows, rng, rng.choice([2, 30, 90])):
            gathered.add(matches(part))
            if rng.random() < 0.02:
                gathered.answers()  # an early read changes nothing
        found, _, (more,), _ = gathered.answers()
        assert same(found, wanted[:max_count])
        assert more == (total > max_count)
        assert same(gathered.answers().rows, wanted[:max_count])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("seconds", [30, 50_000])
def test_a_file_that_is_spared_holds_no_answer(seed, seconds):
    rng = random.Random(seed)
    rows = np.sort(make_rows(3 * FEW, seed, identities=10**6, seconds=seconds), order="second")
    wanted = sort_everything(rows)
    spared = 0
    for max_count in (1, 100, FEW, FEW + 1, 2 * FEW, len(wanted) - 1, len(wanted)):
        gathered = accumulator(max_count)
        left_out = False
        for part in in_parts(rows, rng, 60):
            if len(part) and gathered.can_skip(int(part["second"].max())):
                left_out = True
                spared += 1
            else:
                gathered.add(matches(part))
        found, _, (more,), _ = gathered.answers()
        assert same(found, wanted[:max_count])
        assert more == (left_out or len(wanted) > max_count)
    assert spared > 20


def test_many_answers_are_not_sorted_for_each_file(monkeypatch):
    sorted_rows, with_repeats = [], batch_module.with_repeats

    def counted(rows, *arguments):
        sorted_rows.append(len(rows))
        return with_repeats(rows, *arguments)

    monkeypatch.setattr(batch_module, "with_repeats", counted)
    rows = make_rows(100 * 1000, 1, identities=10**9, seconds=10**6)
    rows["offset"] = np.arange(len(rows))
    gathered = accumulator(10**6)
    for part in np.split(rows, 100):
        gathered.add(matches(part))
    assert len(gathered.answers().rows) == len(rows)
    assert sum(sorted_rows) < 5 * len(rows)  # one file after the other: 50 times


ROWS = 6000


@pytest.fixture
def index(open_index):
    """A model and an index with `ROWS` messages under key "k", in files of several states and in the buffer."""
    service, model, rng = open_index(items=400, local_keep_s=0, query_threads=3), ReferenceModel(), random.Random(3)
    offsets = list(range(ROWS - 500)) + [rng.randrange(ROWS - 500) for _ in range(500)]  # some messages were put twice
    rng.shuffle(offsets)
    for begin in range(0, ROWS, 1500):
        piece = offsets[begin : begin + 1500]
        queues, times = zip(*((offset % 3, (NOW_S + offset * 7 % 1000) * 1000) for offset in piece), strict=True)
        columns = batch(len(piece), queue_id=queues, offset=piece, timestamp_ms=times)
        service.put_batch(columns)
        for row in zip(*columns.values(), strict=True):
            model.put(*row)
        if begin < ROWS - 1500:
            service.flush()
        if begin == 1500:
            service.run_lifecycle()
    assert {handle.place for handle in service.files()} == {"storage", "unsealed"}
    return service, model.query("t", "k", max_count=None)


def test_a_large_answer_is_the_models_to_its_border(index):
    service, wanted = index
    total = len(wanted)
    assert total == ROWS - 500 > FEW
    for max_count in (FEW, FEW + 1, total - 1, total, total + 1):
        result = service.query("t", "k", max_count=max_count)
        assert [Answer.of(item) for item in result] == wanted[:max_count]
        assert result.status == ("complete" if max_count >= total else "truncated")
