"""`query --all` answers each identity once, however small the pages: also one that was put with two times."""

from __future__ import annotations

import pytest

from tiered_index import IndexService

BASE_MS = 1_700_000_000_000


@pytest.mark.parametrize("page", [1, 2, 1000])
def test_all_answers_each_identity_once(run_here, tmp_path, page):
    with IndexService.open(root=tmp_path / "root", storage=f"file://{tmp_path}/store", slots=7, items=50) as index:
        for second in (0, 50):
            for offset in range(3):
                index.put("t", 0, "k", offset, 10, BASE_MS + (second + offset) * 1000)
    where = ["query", "t", "k", "--root", tmp_path / "root", "--all", "--max", page]
    records = run_here(*where, "--json").records
    assert [record["offset"] for record in records[:-1]] == [2, 1, 0]
    assert records[-1]["count"] == 3
    assert "3 found, complete" in run_here(*where).out
