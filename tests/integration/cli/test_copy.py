"""`copy` as a command: once, again, into a target that is something else, and as a standby's follower in a process."""

import os
import re
import signal

import pytest

from tests.integration.cli.command_lines import running
from tests.support.hanging import until
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.cli.keep import copy
from tiered_index.config import IndexConfig
from tiered_index.errors import StorageMisconfigured
from tiered_index.storage.opening import open_storage

BEGIN_MS = 1_700_000_000_000


@pytest.fixture
def put(tmp_path):
    """Return a function that puts an entry into an index at `uri` and uploads it."""

    def put(offset, uri):
        settings = {"slots": 16, "items": 400, "background": False, "local_keep_s": 0}
        root = tmp_path / f"root-{uri.rpartition('/')[2]}"
        with IndexService.open(root=root, storage=uri, **settings) as index:
            index.put("t", 0, "k", offset, 7, BEGIN_MS + offset * 1000)
            index.seal()
            index.run_lifecycle()

    return put


def offsets(uri):
    with IndexReader.open(uri) as reader:
        return [item.offset for item in reader.query("t", "k")]


def test_once_again_and_into_something_else(run_here, put, tmp_path):
    source, target = f"file://{tmp_path}/a", f"sqlite://{tmp_path}/b.db"
    put(1, source)
    unmounted = run_here("copy", "--from", source, "--to", f"file://{tmp_path}/c", "--must-exist", "--json")
    assert (unmounted.code, unmounted.error["type"]) == (2, "NotAnIndex")
    assert "is it mounted?" in unmounted.error["message"] and not (tmp_path / "c").exists()
    text = run_here("copy", "--from", source, "--to", target)
    assert (text.code, offsets(target)) == (0, [1])
    assert re.search("status +copied\n.* sent +1\n", text.out, re.DOTALL)
    assert re.search("records +0\n", run_here("copy", "--storage", source, "--to", target).out)
    put(2, source)
    document = run_here("copy", "--from", source, "--to", target, "--must-exist", "--json").document
    assert (document["status"], document["sent"], document["removed"], document["log_number"]) == ("copied", 1, [], 2)
    # the record alone: a database decides put-if-absent itself, so it is not probed
    assert document["requests"]["target"]["put_if_absent"] == 1
    assert document["bytes_written"] > document["sent_bytes"] > 0
    assert document["cost_usd"] > 0
    assert offsets(target) == [2, 1]
    assert run_here("verify", "--deep", "--storage", target).code == 0
    assert run_here("query", "t", "k", "--root", tmp_path / "root-a", "--storage", target).code == 2
    put(3, target)
    refused = run_here("copy", "--from", source, "--to", target, "--json")
    assert (refused.code, refused.error["type"]) == (2, "InvalidArgument")
    assert "written to since it was copied" in refused.error["message"]
    assert offsets(target) == [3, 2, 1]


def test_a_follower_tells_each_round_and_asks_a_target_that_refuses_again(run_here, put, tmp_path, monkeypatch):
    source, target = f"file://{tmp_path}/a", f"file://{tmp_path}/b"
    put(1, source)
    opened, rounds = [], []

    def faulty(config, uri=None):
        opened.append(FaultStorage(open_storage(uri or str(config.storage))))
        if uri == target:
            # as a file system that is mounted read-only
            opened[-1].fail("put_if_absent", error=StorageMisconfigured)
        return opened[-1]

    class Ending(copy.Ending):
        """Ends the command in its fourth round."""

        def __enter__(self):
            super().__enter__()
            self.event.wait = self.between
            return self

        def between(self, _):
            rounds.append(1)
            if len(rounds) == 2:
                opened[-1].fail("list", error=StorageMisconfigured)
            if len(rounds) == 4:
                self.event.set()

    monkeypatch.setattr(IndexConfig, "open_storage", faulty)
    monkeypatch.setattr(copy, "Ending", Ending)
    rows = run_here("copy", "--from", source, "--to", target, "--follow", "--json").records
    assert [row["status"] for row in rows] == ["failed", "following", "failed", "following", "stopped"]
    assert rows[0]["error"]["type"] == "StorageMisconfigured" and rows[0]["lag_s"] is None
    assert [row["source_number"] for row in rows[1:]] == [rows[1]["source_number"]] * 4
    assert rows[2]["lag_s"] >= 0
    assert offsets(target) == [1]


def test_a_run_by_a_timer_sweeps_the_copy_only_if_there_may_be_something_to_delete(
    run_here, put, tmp_path, monkeypatch
):
    source, target = f"file://{tmp_path}/a", f"file://{tmp_path}/b"
    swept = []
    sweep = copy.Copier.sweep
    monkeypatch.setattr(copy.Copier, "sweep", lambda copier, grace_s: swept.append(grace_s) or sweep(copier, grace_s))
    line = ("copy", "--from", source, "--to", target, "--grace", "2h", "--json")
    put(1, source)
    first, second = (run_here(*line).document for _ in range(2))
    put(2, source)
    third = run_here(*line).document
    assert [document["sent"] for document in (first, second, third)] == [1, 0, 1]
    assert swept == [7200, 7200] and third["deleted"] == {"objects": 0, "bytes": 0}
    # to find out that nothing is new
    assert sum(sum(of.values()) for of in second["requests"].values()) <= 15
    # nothing new comes behind a merge
    assert run_here("merge", "--storage", source).code == 0
    merged, early = (run_here(*line).document for _ in range(2))
    for path in (tmp_path / "b" / "log%").rglob("*"):
        os.utime(path, (path.stat().st_mtime - 7300,) * 2)
    late, last = (run_here(*line).document for _ in range(2))
    deleted = [document["deleted"]["objects"] for document in (merged, early, late, last)]
    assert (len(merged["removed"]), deleted, len(swept)) == (2, [0, 0, 2, 0], 4)


def test_a_standby_follows_until_it_is_ended(put, tmp_path):
    source, target = f"file://{tmp_path}/a", f"file://{tmp_path}/b"
    put(1, source)
    line = ("copy", "--from", source, "--to", target, "--follow", "--interval", "1s", "--json")
    # Python then buffers what it writes to a file
    with running(*line, PYTHONUNBUFFERED="") as (process, lines):
        copied = open_storage(target)
        until(lambda: process.poll() is not None or list(copied.list("log/")))
        assert process.poll() is None
        until(lines)
        # a full buffer has the lines of some 16 rounds
        assert len(lines()) < 9
        put(2, source)
        until(lambda: offsets(target) == [2, 1])
        # the line of a round comes after what it sent
        until(lambda: sum(record["sent"] for record in lines()) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        records = lines()
    assert [record["status"] for record in records] == ["following"] * (len(records) - 1) + ["stopped"]
    assert sum(record["sent"] for record in records[:-1]) == 2
    assert all(record["lag_s"] >= 0 for record in records)
