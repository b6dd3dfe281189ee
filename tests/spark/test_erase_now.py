"""`spark erase`: executors take out of an index what `erase --now` does, and the certificates say the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields

import pytest

from tests.rocketmq.archived_store import open_index, put
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader, erase
from tiered_index.cli.main import run
from tiered_index.clock import ManualClock
from tiered_index.errors import InvalidArgument, NotAnIndex
from tiered_index.format.archived import HEAD_BYTES
from tiered_index.rocketmq.archive.archive import SegmentArchiver
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.service.merge.run import MergeOptions, merge_index
from tiered_index.spark import erase as erase_on
from tiered_index.storage.local.storage import LocalStorage

BEGIN_MS = 1_700_000_000_000
NOW_MS = BEGIN_MS + 3_600_000


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """An index of files, a window table and archived segments."""
    folder = tmp_path_factory.mktemp("origin")
    with StoreWriter(folder / "store", segment_bytes=HEAD_BYTES + 513) as writer:
        for n in range(240):
            keys = [f"k-{n % 9}", "all"]
            writer.put(("orders", "pay")[n % 4 == 0], n % 3, b"secret" * 1500, keys=keys, store_ms=BEGIN_MS + n * 1000)
    storage = LocalStorage(folder / "storage")
    with open_index(folder / "root", storage, clock=ManualClock(NOW_MS)) as index:
        for number, message in enumerate(CommitLogReader(folder / "store" / "commitlog").messages()):
            put(index, message)
            if number in (80, 160):
                index.seal()
                index.run_lifecycle()
                if number == 80:
                    merge_index(storage.uri, options=MergeOptions(min_age_s=0), clock=ManualClock(NOW_MS + 10**8))
        assert SegmentArchiver(index, "a-store", folder / "store" / "commitlog").run_once() >= 2
        index.seal()
        index.run_lifecycle()
    return folder / "storage"


def content(uri):
    """Return all entries, and the bytes of all archived segments by place, of which names are not told."""
    storage = LocalStorage(uri.removeprefix("file://"))
    with IndexReader.open(uri) as reader, reader.export() as batches:
        rows = sorted(json.dumps(row, default=str) for batch in batches for row in batch.to_pylist())
        segments = [(one.place, storage.get(one.name)) for one in reader.log_state.archive.values()]
    return rows, sorted(segments)


def told(certificate):
    """Return the certificate without names, which are new ones."""
    known = {f.name: getattr(certificate, f.name) for f in fields(certificate) if f.name != "metrics"}
    sizes = "scanned_bytes", "deleted_bytes"
    return {
        name: sorted((one.file_id, one.count) for one in value) if name == "objects" else value
        for name, value in known.items()
        if name not in ("removed", *sizes)
    } | {"removed": len(certificate.removed)}


ASKED = {
    "key": {"keys": "k-3"},
    "queue": {"queue_id": 1, "before_ms": BEGIN_MS + 100_000},
    "topic": {"before_ms": BEGIN_MS + 150_000},
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
def test_what_is_left_is_what_is_left_without_spark(spark, origin, tmp_path, asked):
    here, there = f"file://{tmp_path}/here", f"file://{tmp_path}/there"
    for name in ("here", "there"):
        shutil.copytree(origin, tmp_path / name)
    clock, stages = ManualClock(NOW_MS), set()
    planned = erase_on(spark, storage=there, topic="orders", clock=clock, **asked)
    assert planned.status == "planned" and content(there) == content(f"file://{origin}")
    expected = erase(here, "orders", yes=True, now=True, grace_s=0, clock=clock, **asked)
    done = erase_on(
        spark,
        storage=there,
        topic="orders",
        yes=True,
        grace_s=0,
        clock=clock,
        progress=lambda stage, *_: stages.add(stage),
        **asked,
    )
    assert expected.status == "erased" and expected.messages_erased and expected.entries_removed
    assert told(done) == told(expected) and content(there) == content(here)
    assert stages == {"find", "merge", "overwrite"}
    written = {stage.name: stage.task_requests.get("put", 0) for stage in done.metrics.stages}
    assert written["merge"] and written["overwrite"] == done.segments_rewritten
    again = erase_on(spark, storage=there, topic="orders", yes=True, grace_s=0, clock=clock, **asked)
    assert (again.status, again.entries, again.messages_erased) == ("erased", 0, 0)


def test_arguments_are_checked_before_anything_is_done(origin, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("tiered_index.cli.spark.writing.spark_of", lambda *_, **__: pytest.fail("Spark was started"))
    for given in ({"keys": ()}, {"topic": ""}, {"keys": "k", "queue_id": 1}, {"grace_s": -1}):
        with pytest.raises(InvalidArgument):
            erase_on(None, **{"storage": f"file://{origin}", "topic": "orders", "yes": True, **given})

    def answer(*arguments, code=0):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(["spark", "erase", "--topic", "orders", *arguments, "--json", "--quiet"])
        captured = capfd.readouterr()
        assert (ended.value.code or 0) == code, captured.err
        return json.loads(captured.out if not code else captured.err.splitlines()[-1])

    place = ("--storage", f"file://{origin}")
    assert "--queue needs --before" in answer(*place, "--queue", "1", "--yes", code=2)["error"]["message"]
    nowhere = answer("--storage", f"file://{tmp_path}/nothing", "--yes", code=2)
    assert nowhere["error"]["type"] == NotAnIndex.__name__
    planned = answer(*place, "--key", "k-3")
    assert planned["status"] == "planned" and planned["entries"] > 0


def test_the_command_answers_as_without_spark(spark, origin, tmp_path, capfd):
    shutil.copytree(origin, tmp_path / "index")
    with pytest.raises(SystemExit) as ended:
        run(
            f"spark erase --topic orders --key k-3 --grace 0 --yes --json --quiet --storage file://{tmp_path}/index".split()
        )
    told = json.loads(capfd.readouterr().out)
    assert not ended.value.code and (told["status"], told["scan"]["remaining"]) == ("erased", [])
    assert told["requests"] == told["metrics"]["requests"] and told["cost_usd"] > 0
    with IndexReader.open(f"file://{tmp_path}/index") as reader:
        assert not len(reader.query("orders", "k-3")) and len(reader.query("orders", "k-4"))
