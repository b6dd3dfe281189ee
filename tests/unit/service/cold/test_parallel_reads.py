"""Ranges are read in parallel, verified groups stay in memory, and batches fetch each byte once."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cold_index import cold_index, spoiled
from tests.support.hanging import until
from tests.support.model import Answer, ReferenceModel
from tiered_index import Lookup
from tiered_index.errors import CorruptFile
from tiered_index.format.hashing import key_hash
from tiered_index.format.layout import HEADER_SIZE
from tiered_index.format.trailer import Run
from tiered_index.service.read.caches import ByteCache
from tiered_index.service.read.cold_path import spans_of
from tiered_index.storage.prices import PriceTable

FILES = 8
ENTRIES = 1500
_BY_KEY = {}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Files of four slot groups each."""
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=FILES, entries=ENTRIES, slots=700)


@pytest.fixture(autouse=True)
def _forget(made):
    made.storage.gate = None
    made.storage.reset()


def keys(count, seed=1):
    chosen = random.Random(seed)
    return [f"k{chosen.randrange(FILES)}-{chosen.randrange(ENTRIES + 200)}" for _ in range(count)] + ["all"]


def expected(made, key):
    """Return the model's answer, from only the entries of the key, because the model reads each entry."""
    entries = _BY_KEY.get(key)
    if entries is None:
        _BY_KEY.update({entry.key: [] for entry in made.model.entries})
        for entry in made.model.entries:
            _BY_KEY[entry.key].append(entry)
    few = ReferenceModel()
    few.entries = _BY_KEY.get(key, [])
    return few.query("t", key, max_count=None)


@pytest.mark.usefixtures("large_filters")
def test_sixteen_threads_have_the_right_answers(made):
    asked = keys(100)
    wanted = {key: expected(made, key) for key in asked}
    for cached in (0, 60_000, 64 << 20):
        with made.reader(block_cache_bytes=cached, query_threads=4) as reader, ThreadPoolExecutor(16) as pool:
            made.storage.reset()
            for key, answer in zip(asked, pool.map(lambda key: reader.query("t", key), asked), strict=True):
                assert ([Answer.of(item) for item in answer], answer.status) == (wanted[key], "complete"), key
            assert 0 < made.storage.most_at_once <= 4
            use = reader.cache_use()["blocks"]
            assert use.size_bytes <= use.max_bytes == cached
            directories = [r for r in made.storage.reads if any(r.start == o.directory_position for o in made.stored)]
            assert len(directories) == FILES


def test_lookups_of_one_file_each_share_the_bound(made):
    """The callers' own threads search these files, not a pool."""
    with made.reader(query_threads=2, block_cache_bytes=0) as reader, ThreadPoolExecutor(8) as pool:
        release = threading.Event()
        made.storage.gate = lambda read: release.wait(30)
        asked = [("t", "all", stored.second_min * 1000, stored.second_max * 1000) for stored in made.stored]
        answers = [pool.submit(reader.query, *question) for question in asked]
        # all lookups wait for a directory
        until(lambda: reader.cache_use()["directories"].misses >= FILES and len(made.storage.reads) >= 2)
        release.set()
        assert [len(answer.result(30)) for answer in answers] == [1] * FILES
        assert made.storage.most_at_once == 2 and len(made.storage.reads) == 2 * FILES


def test_a_search_that_is_given_up_asks_for_nothing_more(made):
    """The newest files have no entry of the key, so several searches run when the answer is found.

    One of them hangs.
    """
    hanging, found = made.stored[FILES - 5], FILES - 4
    arrived, release = threading.Event(), threading.Event()

    def gate(read):
        if read.name == hanging.name:
            arrived.set()
            assert release.wait(30)
        elif read.name == made.stored[found].name:
            assert arrived.wait(30)

    with made.reader(query_threads=8) as reader:
        made.storage.gate = gate
        answer = reader.query("t", f"k{found}-3", max_count=1, begin_ms=made.stored[FILES - 5].second_min * 1000)
        assert [Answer.of(item) for item in answer] == expected(made, f"k{found}-3")
        assert [r.name for r in made.storage.reads].count(hanging.name) == 1
        outcomes = {report.file: (report.outcome, report.requests) for report in answer.explain.files}
        assert outcomes[hanging.file_id] == ("skipped_budget", 1)
        requests = len(made.storage.reads)
        release.set()
    # the reader is closed, so every search has ended
    assert len(made.storage.reads) == requests == answer.explain.requests


def test_the_ranges_of_one_file_travel_side_by_side_within_the_same_bound(made):
    stored = made.stored[0]
    begin_ms, end_ms = stored.second_min * 1000, stored.second_max * 1000
    asked = [Lookup(topic="t", key=f"k0-{n}", begin_ms=begin_ms, end_ms=end_ms) for n in range(0, ENTRIES, 50)]
    with made.reader(query_threads=2, block_cache_bytes=0, coalesce_gap_bytes=0) as reader:
        reader.query("t", "all")
        several = [q for q in asked if _group(made, q.key) in (0, 2)]
        made.storage.reset()
        arrived = threading.Barrier(2)
        made.storage.gate = lambda read: arrived.wait(30)
        answers = reader.query_many(several)
        assert answers.counts.tolist() == [1] * len(several)
        assert made.storage.most_at_once == 2 == len(made.storage.reads)


def _group(made, key):
    """Return the number of the slot group of a key in its file."""
    file = int(key[1:].split("-")[0])
    with made.reader() as reader:
        (handle,) = [h for h in reader.files() if h.file_id == made.stored[file].file_id]
        trailer = handle.stored.trailer()
        slot = key_hash("t", key) % trailer.metadata.layout.slots
        return int(np.searchsorted(trailer.directory.groups["first_slot"].astype(int), slot, "right")) - 1


def test_a_group_that_failed_its_check_is_not_cached(made):
    stored = made.stored[0]
    question = ("t", "all", stored.second_min * 1000, stored.second_max * 1000)
    with made.reader() as reader:
        reader.query("t", "k0-3", max_requests=0, allow_partial=True)
        items = slice(HEADER_SIZE, stored.trailer_position)
        zeros = bytes(items.stop - items.start)
        with spoiled(made, stored.name, lambda data: data.__setitem__(items, zeros)):
            for _ in range(2):
                with pytest.raises(CorruptFile, match="CRC32"):
                    reader.query(*question)
            assert reader.cache_use()["blocks"].entries == 0
        assert len(reader.query(*question)) == 1


def reads_of(made):
    found = {}
    for read in made.storage.reads:
        found.setdefault(read.name, []).append((read.start, read.end))
    return {name: sorted(ranges) for name, ranges in found.items()}


# the keys are in two of the four slot groups of each file, about 4,700 to 5,000 bytes apart
APART = [Lookup(topic="t", key=key) for key in keys(2, seed=3)]


@pytest.mark.usefixtures("large_filters")
@pytest.mark.parametrize(("egress_usd", "gap", "joined"), [(0.0, 256 << 10, 8), (0.09, 4772, 1), (100.0, 4, 0)])
def test_a_gap_by_price_costs_no_more_than_a_request(made, egress_usd, gap, joined):
    prices = PriceTable(egress_per_gib_usd=egress_usd)
    costs = {}
    told = {}
    reads = {}
    for setting in ("price", gap, 0, 256 << 10):
        with made.reader(coalesce_gap_bytes=setting, block_cache_bytes=0, prices=prices) as reader:
            reader.query("t", "all")
            made.storage.reset()
            answers = reader.query_many(APART)
            costs[setting], reads[setting] = answers.explain.cost_usd, reads_of(made)
            told[setting] = {report.file: report.gap_bytes for report in answers.explain.files}
    assert reads["price"] == reads[gap]
    assert told["price"] == told[gap]
    assert sum(size > 0 for size in told["price"].values()) == joined
    assert costs["price"] <= min(costs[0], costs[256 << 10])


@pytest.mark.usefixtures("large_filters")
@pytest.mark.parametrize("gap", [4, 4772, 20_000, 256 << 10])
def test_the_bytes_between_slot_groups_are_counted_by_file(made, gap):
    """A batch with gaps reads the same slot groups as one without gaps, and counts the bytes between them."""
    explained = []
    for setting in (0, gap):
        with made.reader(coalesce_gap_bytes=setting, block_cache_bytes=0) as reader:
            reader.query("t", "all")
            explained.append(reader.query_many(APART).explain)
    needed, joined = ({report.file: report for report in explain.files} for explain in explained)
    assert len(joined) == FILES
    for file, report in joined.items():
        saved = needed[file].requests - report.requests
        assert (needed[file].gap_bytes, report.bytes - report.gap_bytes) == (0, needed[file].bytes)
        assert 0 <= report.gap_bytes <= gap * saved
        assert (report.gap_bytes > 0) == (saved > 0)


@pytest.mark.usefixtures("large_filters")
@pytest.mark.parametrize("gap", [0, 20_000, 256 << 10, 1 << 40])
def test_a_batch_fetches_neighbours_by_one_range_and_each_byte_once(made, gap):
    asked = [Lookup(topic="t", key=key) for key in keys(12, seed=gap % 97)]
    with made.reader(coalesce_gap_bytes=gap, block_cache_bytes=0) as reader:
        reader.query("t", "all")
        trailers = {h.stored.stored.name: h.stored.trailer() for h in reader.files()}
        made.storage.reset()
        answers = reader.query_many(asked)
        for q, answer in zip(asked, answers, strict=True):
            assert [Answer.of(item) for item in answer] == expected(made, q.key)
        asked_for = reads_of(made)
        assert len(asked_for) == FILES
        total = 0
        for name, ranges in asked_for.items():
            assert all(end <= start for (_, end), (start, _) in pairwise(ranges)), "bytes were fetched twice"
            # the batch has no filters here, and the ranges of all files overlap, so it looks for every key in each file
            directory = trailers[name].directory
            slots = np.array([key_hash("t", q.key) % 700 for q in asked])
            wanted = directory.runs_of(slots, 0, 2**40)
            assert len(ranges) == _runs_apart(wanted, gap)
            total += len(ranges)
        assert answers.explain.requests == total == len(made.storage.reads)
        assert answers.explain.bytes == made.storage.asked_bytes
        if gap >= 256 << 10:
            assert total == FILES


def _runs_apart(runs, gap):
    """Return how many ranges cover the runs, by another method than the code's."""
    joints = pairwise(runs)
    return 1 + sum(after.offset - (before.offset + before.length) > gap for before, after in joints) if runs else 0


@given(
    lengths=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60)), max_size=20),
    gap=st.integers(0, 60),
    limit=st.integers(1, 200),
    seed=st.integers(0, 9),
)
def test_spans_cover_each_run_once(lengths, gap, limit, seed):
    runs, at = [], 0
    for space, length in lengths:
        runs.append(Run(at + space, length, 0, 1))
        at += space + length
    shuffled = random.Random(seed).sample(runs, len(runs))
    spans = spans_of(shuffled, gap, limit)
    assert [run for span in spans for run in span.runs] == runs
    for span in spans:
        first, last = span.runs[0], span.runs[-1]
        assert (span.start, span.start + span.length) == (first.offset, last.offset + last.length)
        assert span.length <= limit or len(span.runs) == 1
        between = pairwise(span.runs)
        assert all(after.offset - before.offset - before.length <= gap for before, after in between)
    for before, after in pairwise(spans):
        apart = after.start - before.start - before.length
        joined = after.runs[0].offset + after.runs[0].length - before.start
        assert apart >= 0 and (apart > gap or joined > limit)
    data = bytes(range(256)) * 10
    for span in spans:
        for run, piece in span.pieces(data[span.start : span.start + span.length]):
            assert bytes(piece) == data[run.offset : run.offset + run.length]


@pytest.mark.parametrize("bound", [0, 7, 80])
def test_the_cache_keeps_its_bound_and_the_last_used_entries(bound):
    chosen = random.Random(bound)
    steps = [(chosen.randrange(16), chosen.randrange(12)) for _ in range(2000)]
    cache = ByteCache(bound)
    mirror = {}  # in order of use
    hits = misses = 0
    for key, size in steps:
        found = cache.get(key)
        assert (found is not None) == (key in mirror)
        if found is not None:
            hits += 1
            mirror[key] = mirror.pop(key)
            assert len(found) == mirror[key]
        else:
            misses += 1
        kept = size * 2 <= bound
        assert cache.put(key, bytes(size), size) is kept
        if kept:
            mirror.pop(key, None)
            mirror[key] = size
            while sum(mirror.values()) > bound:
                mirror.pop(next(iter(mirror)))
        use = cache.use()
        assert (use.hits, use.misses, use.entries, use.size_bytes) == (hits, misses, len(mirror), sum(mirror.values()))
        assert use.size_bytes <= bound
    assert (use.evictions > 100) is (bound > 0)
