"""A terminal of Latin-1 gave keys that no index has: the answer was 0 found, complete, and an erasure certified it."""

from __future__ import annotations

import os

import pytest

from tests.integration.cli.command_lines import run_here
from tiered_index import IndexService

LATIN = os.fsdecode(b"caf\xe9")


@pytest.fixture
def uri(tmp_path):
    uri = (tmp_path / "storage").as_uri()
    with IndexService.open(root=tmp_path / "root", storage=uri, background=False, slots=7, items=20) as index:
        index.put("orders", 0, "café", 1, 10, 1_700_000_000_000)
        index.seal()
        index.run_lifecycle()
    return uri


@pytest.mark.parametrize(
    "arguments",
    [
        ("query", "orders", LATIN),
        ("erase", "--topic", "orders", "--key", "k", "--key", LATIN, "--yes", "--now"),
        ("ingest", f"kafka://127.0.0.1:1/{LATIN}"),
        ("ingest", "no-such-file.ndjson", "--constant", f"topic={LATIN}"),
        ("copy", "--to", f"file:///tmp/{LATIN}"),
        ("token", LATIN),
    ],
)
def test_an_argument_that_is_not_utf_8_is_refused(uri, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    done = run_here(*arguments, "--storage", uri, "--json")
    assert (done.code, done.error["type"]) == (2, "InvalidArgument"), done.err
    assert "is not UTF-8" in done.error["message"] and r"caf\udce9" in done.error["message"]
    assert not done.out and not list(tmp_path.glob("*token*"))


def test_files_of_the_caller_may_have_any_name(uri, tmp_path):
    file = tmp_path / f"{LATIN}.ndjson"
    file.write_text(
        '{"topic": "t", "key": "k", "queue_id": 0, "offset": 1, "size": 1, "timestamp_ms": 1700000000000}\n'
    )
    done = run_here("ingest", file, "--root", tmp_path / "root", "--storage", uri, "--json")
    assert (done.code, done.document["entries"]) == (0, 1), done.err
