"""Idle threads read parts of a range with many gaps: a batch reads fewer bytes by more requests at the same time."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cold_index import cold_index
from tiered_index import Lookup
from tiered_index.format.trailer import Run
from tiered_index.service.read.cold_path import cut_spans, spans_of

ENTRIES = 120_000
GAP = 256 << 10
ASKED = [Lookup(topic="t", key=f"k0-{number}") for number in random.Random(3).sample(range(ENTRIES - 1), 100)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A file with MiB of gaps between the slot groups of `ASKED`."""
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=1, entries=ENTRIES, slots=30_000)


def cost(made, asked=ASKED, limits=None, **settings):
    """Return requests, bytes, and those between slot groups of one batch. Directories are known."""
    with made.reader(block_cache_bytes=0, **settings) as reader:
        reader.query("t", "k0-1")
        made.storage.reset()
        answers = reader.query_many(asked, **(limits or {}))
        assert answers.counts.tolist() == [1] * len(asked)
    explain = answers.explain
    assert (explain.requests, explain.bytes) == (len(made.storage.reads), made.storage.asked_bytes)
    return explain.requests, explain.bytes, sum(report.gap_bytes for report in explain.files)


def test_a_batch_of_few_of_a_files_keys_skips_its_largest_gaps(made):
    needed = cost(made, coalesce_gap_bytes=0)[1]
    requests, size, gaps = cost(made, coalesce_gap_bytes="price")
    assert (requests, size - gaps) == (1, needed)
    cuts = gaps // GAP
    assert 2 <= cuts < 31
    found = cost(made)
    assert (found[0], found[1] - found[2]) == (1 + cuts, needed)
    # each of these gaps is larger than the mean
    assert found[1] < size - cuts * gaps / len(ASKED)


def test_only_idle_threads_and_few_requests_of_a_bound_are_used(made):
    whole = cost(made, coalesce_gap_bytes="price")
    assert cost(made, query_threads=1) == whole
    assert cost(made, query_threads=3)[0] == 3
    assert cost(made, limits={"max_requests": 31}) == whole
    assert cost(made, limits={"max_requests": 64})[0] == 3


@given(
    spaces=st.lists(st.integers(0, 50), min_size=1, max_size=30), cuts=st.integers(0, 31), limit=st.integers(20, 900)
)
def test_cut_spans_have_the_same_runs_without_the_largest_gaps(spaces, cuts, limit):
    runs, at = [], 0
    for space in spaces:
        runs.append(Run(at + space, 10, 0, 1))
        at += space + 10
    spans = spans_of(runs, 40, limit)
    parts = cut_spans(spans, cuts)
    assert [run for part in parts for run in part.runs] == runs
    for part in parts:
        first, last = part.runs[0], part.runs[-1]
        assert (part.start, part.start + part.length) == (first.offset, last.offset + last.length)
    gaps = [after.offset - one.offset - one.length for span in spans for one, after in pairwise(span.runs)]
    left = sorted(gaps, reverse=True)[cuts:]
    assert sum(part.gap_bytes for part in parts) == sum(left)
    assert len(parts) == len(spans) + min(cuts, len(gaps))
