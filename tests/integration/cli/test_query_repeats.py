"""`query --all` answers each identity once, however small the pages: also one that was put with two times."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tiered_index import IndexService
from tiered_index.cli.main import app

BASE_MS = 1_700_000_000_000


@pytest.mark.parametrize("page", [1, 2, 1000])
def test_all_answers_each_identity_once(tmp_path, page):
    with IndexService.open(root=tmp_path / "root", storage=f"file://{tmp_path}/store", slots=7, items=50) as index:
        for second in (0, 50):
            for offset in range(3):
                index.put("t", 0, "k", offset, 10, BASE_MS + (second + offset) * 1000)
    where = ["query", "t", "k", "--root", str(tmp_path / "root"), "--all", "--max", str(page)]
    lines = CliRunner().invoke(app, [*where, "--json"]).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["offset"] for record in records[:-1]] == [2, 1, 0]
    assert records[-1]["count"] == 3
    assert "3 found, complete" in CliRunner().invoke(app, where).stdout
