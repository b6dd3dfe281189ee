"""`merge` and `orphans` as commands, and `files` and `verify` on window tables and their shards."""

import json
import os
import shutil
import time
from typing import Any

import pyarrow as pa
import pytest

from tests.support.log_records import record_document
from tiered_index import IndexService
from tiered_index.base.clock import SystemClock
from tiered_index.connectors.archive.archiver import ColumnArchiver
from tiered_index.connectors.archive.columns import SHARED, ArchiveFormat
from tiered_index.format.names import CHECKPOINT_PREFIX, log_name
from tiered_index.service.log.log import StorageLog, own_objects
from tiered_index.service.log.records import LogRecord, digest_of, encode_document
from tiered_index.storage.opening import open_storage

DAY_MS = 86_400_000
BASE_MS = 1_700_000_000_000 // (30 * DAY_MS) * (30 * DAY_MS)
HOURS = (1, 13, 30)


@pytest.fixture(scope="session")
def unmerged(tmp_path_factory):
    """A storage with files of three hours of two days. Tests must not change it."""
    folder = tmp_path_factory.mktemp("unmerged")
    settings = {"slots": 16, "items": 4000, "background": False, "local_keep_s": 0, "max_late_s": 10**10}
    with IndexService.open(root=folder / "root", storage=f"file://{folder / 'store'}", **settings) as index:
        for hour in HOURS:
            begin = BASE_MS + hour * 3_600_000
            for n in range(100):
                index.put("orders", n % 3, ["hot", f"k{n % 9}"], 1000 * hour + n, 7, begin + n * 1000)
            index.seal()
            index.run_lifecycle()
            index.run_lifecycle()
    return folder / "store"


@pytest.fixture
def store(unmerged, tmp_path):
    shutil.copytree(unmerged, tmp_path / "store")
    return f"file://{tmp_path / 'store'}"


@pytest.fixture
def merged(run_here, store):
    assert run_here("merge", "--storage", store, "--quiet").code == 0
    return store


def objects(store):
    return {o.name: o for o in state(store).objects.values()}


def state(store):
    storage = open_storage(store)
    log = StorageLog(storage, SystemClock())
    return log.open()


def hot(run_here, store):
    document = run_here("query", "orders", "hot", "--max", 1000, "--storage", store, "--json").document
    return [item["offset"] for item in document["items"]]


def test_a_plan_then_the_merge_then_nothing(run_here, store):
    before = hot(run_here, store)
    assert len(before) == 300
    planned = run_here("merge", "--storage", store, "--dry-run", "--json")
    assert (planned.code, planned.document["status"]) == (0, "planned")
    (tier,) = planned.document["tiers"]
    jobs = [(len(job["sources"]), job["entries"], len(job["windows"])) for job in tier["jobs"]]
    assert jobs == [(2, 400, 1), (1, 200, 1)]
    assert all(job["cost_usd"] > 0 and job["requests"]["get_range"] >= 2 * len(job["sources"]) for job in tier["jobs"])
    assert {job["shards"] for job in tier["jobs"]} == {1}
    assert len(state(store).files) == 3
    words = run_here("merge", "--storage", store, "--dry-run")
    assert max(map(len, words.out.splitlines())) <= 120
    totals, _, listed = words.out.partition("\njobs\n")
    assert [line.split()[1] for line in listed.splitlines() if line.startswith("  entries ")] == ["400", "200"]
    assert "$" in listed
    fields = [line.split() for line in totals.splitlines()]
    counts = [field for field in fields if field[:1] in (["sources"], ["tables"], ["entries"])]
    assert counts == [["sources", "3"], ["tables", "2"], ["entries", "600"]]
    assert ["cost", "usd", f"${sum(job['cost_usd'] for job in tier['jobs']):.6f}"] in fields

    done = run_here("merge", "--storage", store, "--json")
    assert (done.code, done.document["status"]) == (0, "merged")
    (tier,) = done.document["tiers"]
    assert (tier["jobs"], tier["sources"], tier["tables"], tier["entries"]) == (2, 3, 2, 600)
    # the estimate of the cost of small jobs is right to a third
    jobs = planned.document["tiers"][0]["jobs"]
    for operation in ("get_range", "put"):
        estimate = sum(job["requests"].get(operation, 0) for job in jobs)
        assert done.document["requests"][operation] == pytest.approx(estimate, rel=0.34)
    assert hot(run_here, store) == before
    again = run_here("merge", "--storage", store)
    assert again.code == 0 and "nothing to do" in again.out
    assert run_here("merge", "--storage", store, "--json").document["status"] == "nothing to do"


def test_tiers_one_after_the_other(run_here, store):
    before = hot(run_here, store)
    done = run_here("merge", "--storage", store, "--window", "30d,1h,1d", "--json")
    tiers = [(tier["window_s"], tier["sources"], tier["tables"]) for tier in done.document["tiers"]]
    assert tiers == [(3600, 3, 3), (86400, 3, 2), (30 * 86400, 2, 1)]
    assert hot(run_here, store) == before
    listed = run_here("files", "--storage", store, "--json").document
    (table,) = listed["files"]
    assert (table["entries"], table["table"]["window_s"], table["table"]["begin_ms"]) == (600, 30 * 86400, BASE_MS)
    assert table["table"]["shards"] == list(objects(store))
    assert table["bytes"] == sum(o.size_bytes for o in objects(store).values())
    assert "window of 30d, 1 shard" in run_here("files", "--storage", store).out


def test_orphans_are_listed_then_deleted_and_foreign_objects_left(run_here, merged, tmp_path):
    folder = tmp_path / "store"
    names = [*(f"{kind}/note.txt" for kind in ("checkpoint", "data", "epoch", "lease", "log")), "ranges/note.txt"]
    unseen = ["log%/a note", "log%/50%", "log/note.txt", "README"]
    for path in [*(folder / name.replace("/", "%/") for name in names), *(folder / name for name in unseen)]:
        path.parent.mkdir(exist_ok=True)
        path.write_text("put there by hand")
    answer = run_here("query", "t", "hot", "--storage", merged, "--json")
    assert answer.code == 0 and "log/note.txt" in answer.err
    assert len(hot(run_here, merged)) == 300
    verified = run_here("verify", "--storage", merged, "--json")
    assert verified.code == 0 and any("log/note.txt" in note for note in verified.document["notes"])
    young = run_here("orphans", "--storage", merged, "--json")
    assert (young.code, young.document["objects"], young.document["status"]) == (0, [], "found")
    age(folder, merged)
    listed = run_here("orphans", "--storage", merged)
    assert "foreign" in listed.out and "nothing was deleted" in listed.err
    swept = run_here("orphans", "--storage", merged, "--yes", "--json").document
    assert len(swept["objects"]) == 3 and sorted(info["object"] for info in swept["foreign"]) == names
    assert swept["bytes"] == sum(info["bytes"] for info in swept["objects"])
    assert run_here("orphans", "--storage", merged, "--json").document["objects"] == []
    assert run_here("verify", "--deep", "--storage", merged).code == 0
    assert (folder / "data%" / "note.txt").exists() and len(hot(run_here, merged)) == 300


def age(folder, store):
    """Make everything a week old: the objects' times, and the times in the log's records."""
    week_ms = 7 * DAY_MS
    storage = open_storage(store)
    for number in range(1, state(store).number + 1):
        rewrite(storage, number, lambda record: {**record, "created_ms": record["created_ms"] - week_ms})
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - week_ms / 1000,) * 2)


def rewrite(storage, number, change):
    """Replace a log record by a changed one with a right checksum, and drop the checkpoints that contradict it."""
    document = change(record_document(storage.get(log_name(number))))
    storage.put(log_name(number), encode_document(document))
    # a changed record needs all later records written again
    following = number
    while next(iter(storage.list(log_name(following := following + 1))), None) is not None:
        document = record_document(storage.get(log_name(following)))
        document["previous"] = digest_of(storage.get(log_name(following - 1)))
        storage.put(log_name(following), encode_document(document))
    storage.delete_many([info.name for info in own_objects(storage, CHECKPOINT_PREFIX)])


def test_a_shard_and_its_entries_are_shown(run_here, merged):
    name, stored = next(iter(objects(merged).items()))
    shown = run_here("files", name, "--storage", merged, "--json").document
    meta = shown["metadata"]
    assert (shown["kind"], shown["header"]["magic"], meta["count"]) == ("shard", "0x54495853", stored.count)
    assert (meta["table"], meta["slot_map"]) == (stored.shard.table, stored.shard.slots.to_json())
    assert "shard" in run_here("files", name, "--storage", merged).out
    lines = run_here("files", name, "--entries", "--storage", merged, "--json")
    assert lines.code == 0 and len(lines.records) == stored.count + 1


def findings(run_here, store, *more: str) -> list[dict[str, Any]]:
    outcome = run_here("verify", "--storage", store, "--json", *more)
    assert outcome.code == 1, outcome
    return outcome.document["findings"]


def merge_records(store):
    storage = open_storage(store)
    numbers = range(1, state(store).number + 1)
    return storage, [n for n in numbers if LogRecord.decode(storage.get(log_name(n)), "log").kind == "merge"]


@pytest.mark.parametrize("field", ["table", "slot_high", "slots", "count", "shard"])
def test_a_log_that_says_otherwise_than_the_shard(run_here, merged, field):
    storage, (number, _) = merge_records(merged)

    def change(record):
        (added,) = record["add"]
        if field == "shard":
            del added["shard"]
        elif field == "count":
            added["count"] -= 1
        elif field == "slots":
            added["shard"]["slots"]["split"] += 1
        else:
            added["shard"][field] = "other" if field == "table" else added["shard"][field] + 1
        return record

    rewrite(storage, number, change)
    found_here = findings(run_here, merged)
    assert {f["file"] for f in found_here} >= {next(iter(objects(merged)))}
    if field == "count":
        assert any(f["part"] == "merge" and "400 entries" in f["problem"] for f in found_here)


def test_missing_and_overlapping_slots_of_a_table(run_here, merged):
    """A shard that its record does not name, one of the same slots, and a table that is only partly removed."""
    storage, (number, other) = merge_records(merged)
    records = storage.get(log_name(number)), storage.get(log_name(other))
    rewrite(storage, number, lambda record: {**record, "add": []})
    assert [f["part"] for f in findings(run_here, merged)] == ["merge"]

    first = json.loads(records[0].split(b"\n#crc32")[0])["add"][0]

    def add_to_first(record):
        shard = {**record["add"][0]["shard"], "table": first["shard"]["table"], "begin_s": first["shard"]["begin_s"]}
        return {**record, "add": [{**record["add"][0], "shard": shard}]}

    rewrite(storage, number, lambda record: record_document(records[0]))
    rewrite(storage, other, add_to_first)
    problems = [f["problem"] for f in findings(run_here, merged) if f["part"] == "table"]
    assert any("an earlier record added" in problem for problem in problems)
    assert any("overlap" in problem for problem in problems)


def test_small_archived_files_are_planned_and_joined_and_a_damaged_one_is_named(run_here, tmp_path):
    store = f"file://{tmp_path / 'store'}"
    form = ArchiveFormat("archived words", "test.words", 1, pa.schema(SHARED))
    with IndexService.open(root=tmp_path / "root", storage=store, slots=16, items=4000, background=False) as index:
        archiver = ColumnArchiver(index, form)
        for at in range(9):
            row = {"topic": "t", "offset": at, "timestamp": at, "keys": [f"k{at}"]}
            archiver.send("test:-/t/0", at, at + 1, pa.Table.from_pylist([row], form.schema))
        archiver.name()
        last = [*index.archived()][-1]
    planned = run_here("merge", "--storage", store, "--dry-run", "--json").document
    assert (planned["segments_to_join"], planned["segments_to_make"]) == (9, 1)
    open_storage(store).put(last.name, bytes(last.object_bytes))
    done = run_here("merge", "--storage", store, "--json")
    (tier,) = done.document["tiers"]
    assert (done.code, done.document["status"], tier["segments_joined"], tier["segments_made"]) == (0, "merged", 8, 1)
    assert [name for name, _ in tier["left"]] == [last.name]
    assert "nothing to do" in run_here("merge", "--storage", store).out
