"""A closed segment that was cut short is a named loss with --skip-corrupt, and archiving goes on with the others."""

from __future__ import annotations

import os

import pytest

from tests.rocketmq.messages import full, joined, log, write_log

SEGMENT = 1_000


@pytest.mark.parametrize("skip", [True, False])
def test_a_closed_segment_that_was_cut_short(run_here, tmp_path, small_index, skip):
    contents = {start: full(log(3, start, first=start), SEGMENT) for start in (0, SEGMENT, 2 * SEGMENT)}
    store = tmp_path / "store"
    folder = write_log(store / "commitlog", SEGMENT, contents | {3 * SEGMENT: joined(log(2, 3 * SEGMENT))})
    # cut within the blank: nothing is lost to lookups
    os.truncate(folder / f"{SEGMENT:020d}", SEGMENT - 4)
    done = run_here("ingest", store, *small_index, "--archive-segments", *(["--skip-corrupt"] if skip else []))
    if not skip:
        assert (done.code, done.error["type"]) == (4, "CorruptFile")
        return
    assert done.code == 0, done.err
    assert (done.document["archived_segments"], done.document["messages"]) == (2, 11)
    (cut,) = [loss for loss in done.document["losses"] if "not archived" in loss["problem"]]
    assert (cut["kind"], cut["begin"], cut["end"]) == ("corrupt", SEGMENT, 2 * SEGMENT)
