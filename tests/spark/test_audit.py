"""Audits report each seeded defect and each difference of index and source once, and state what they leave out."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.integration.cli.command_lines import run_here
from tests.spark.commands import outcome_of
from tests.spark.entries import BEGIN_MS, DAY_MS, has_slot_of, messages, states, sweep, write_parquet
from tests.support.changes import replace
from tests.support.damage import flip_object
from tests.unit.format.test_verify import rebuilt
from tiered_index import IndexConfig, hash_key
from tiered_index.errors import InvalidArgument
from tiered_index.format.layout import SlotMap
from tiered_index.format.names import log_name
from tiered_index.format.trailer import parse_trailer
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.records import LogRecord, StoredObject
from tiered_index.service.log.tombstones import Tombstone
from tiered_index.spark import build, merge
from tiered_index.spark.audit.audit import AuditResult, audit
from tiered_index.spark.audit.differences import may_hold
from tiered_index.spark.audit.entries import ALL_TIME, Picked
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import open_storage

COUNT = 3_000
LATE = IndexConfig(slots=64, items=100_000, max_late_s=10**10)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return messages(COUNT)


@pytest.fixture(scope="module")
def sound(spark: Any, table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built index of two days in `index`, and its source in `source.parquet`."""
    folder = tmp_path_factory.mktemp("audited")
    source = write_parquet(table, folder / "source.parquet")
    build(spark, source, storage=f"file://{folder}/index", shards=2, config=LATE)
    return folder


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound / "index", tmp_path / "index")
    return tmp_path / "index"


def audited(spark: Any, index: Path, source: Any = None, **more: Any) -> AuditResult:
    return audit(spark, source, storage=f"file://{index}", **more)


def newest(index: Path) -> StoredObject:
    return max(states(f"file://{index}").objects.values(), key=lambda stored: stored.second_max)


def test_a_sound_index_has_no_finding_and_holds_its_source(spark, sound):
    result = audited(spark, sound / "index", str(sound / "source.parquet"))
    assert (result.status, result.report.findings, result.entries, result.objects) == ("ok", [], COUNT, 4)
    assert result.differences.counts == {"missing": 0, "extra": 0, "wrong": 0}
    assert (result.differences.source_entries, result.differences.index_entries) == (COUNT, COUNT)
    size = sum(stored.size_bytes for stored in states(f"file://{sound}/index").objects.values())
    assert result.report.checked["object_bytes"] == size
    # the audit reads the objects twice: it checks them, then compares the entries
    assert result.metrics.bytes_read > 2 * size - 100_000


def _rewritten(storage: Storage, change: Callable[[LogRecord], LogRecord]) -> None:
    """Change the last record of a log, which has no checkpoint of that record."""
    name = log_name(states(storage.uri).number)
    storage.put(name, change(LogRecord.decode(storage.get(name), name)).encode())
    storage.delete_many([info.name for info in storage.list("checkpoint/")])


def damage_an_item(storage: Storage, stored: StoredObject) -> None:
    flip_object(storage, stored.name, 40)


def damage_the_filter(storage: Storage, stored: StoredObject) -> None:
    flip_object(storage, stored.name, stored.trailer_position)


def name_a_shard_twice(storage: Storage, stored: StoredObject) -> None:
    name = stored.name.replace(".index", "0.index")
    storage.put(name, storage.get(stored.name))
    _rewritten(storage, lambda record: replace(record, add=(*record.add, replace(stored, name=name))))


def swap_two_items(storage: Storage, stored: StoredObject) -> None:
    """Swap two items of one key: all checksums are right, only the order is wrong."""
    data = storage.get(stored.name)
    trailer = parse_trailer(data, stored.name, len(data))
    run, metadata = trailer.directory.all_runs()[0], trailer.metadata
    there = slice(run.offset, run.offset + run.length)
    items = metadata.items_of(data[there], run.count, stored.name)
    row = int(np.flatnonzero((np.diff(items["key_hash"]) == 0) & (np.diff(items["offset"]) != 0))[0])
    items[[row, row + 1]] = items[[row + 1, row]]
    (packed,) = metadata.packing.pack(items, [len(items)])
    assert len(packed) == run.length
    body = data[: there.start] + packed + data[there.stop : stored.trailer_position]
    storage.put(stored.name, rebuilt(data, body=body))


def harm(index: Path, seed: Callable[[Storage, StoredObject], None], stored: StoredObject) -> None:
    with open_storage(f"file://{index}") as storage:
        seed(storage, stored)


DEFECTS: list[tuple[Callable[[Storage, StoredObject], None], str]] = [
    (damage_an_item, "run"),
    (swap_two_items, "order"),
    (name_a_shard_twice, "table"),
    (lambda storage, stored: storage.delete_many([stored.name]), "object"),
]


def test_each_seeded_defect_is_found_once(spark, copy):
    """Each defect is in an object of its own. `tests/unit/format/test_verify_shard.py` has every part of an object."""
    objects = list(states(f"file://{copy}").objects.values())
    for (seed, _), stored in zip(DEFECTS, objects, strict=True):
        harm(copy, seed, stored)
    result = audited(spark, copy)
    assert result.status == "findings" and len(result.report.findings) == len(DEFECTS)
    for (_, part), stored in zip(DEFECTS, objects, strict=True):
        assert [defect.part for defect in result.report.findings if stored.file_id in defect.file] == [part]


@pytest.mark.long
def test_a_damaged_log_is_a_finding(spark, copy):
    with open_storage(f"file://{copy}") as storage:
        flip_object(storage, log_name(2), 30)
    result = audited(spark, copy, "source.parquet")
    assert [(defect.file, defect.part) for defect in result.report.findings] == [(log_name(2), "log")]
    [(what, error)] = result.report.unchecked
    assert what == "objects" and "not compared with its source" in str(error) and result.differences is None


def test_each_difference_of_index_and_source_is_reported_once(spark, sound, table, tmp_path):
    """The index lacks ten entries and the source ten others; ten differ in time and ten in size. Two have another size
    once more, which is missing. Of each kind at most `most_listed` are listed.
    """
    lacking = table.slice(10).to_pylist()
    for row in lacking[:10]:
        row["timestamp_ms"] += 5_000
    for row in lacking[10:20]:
        row["size"] += 1
    added = [{**row, "offset": row["offset"] + 10**9} for row in lacking[20:30]]
    same = [dict(lacking[40])]  # once more: an index keeps both entries of a message that was put twice
    twice = [{**lacking[n], "size": lacking[n]["size"] + 7} for n in (15, 50)]
    rows = pa.Table.from_pylist(lacking + added + same + twice, table.schema)
    source = write_parquet(rows, tmp_path / "other.parquet")
    result = audited(spark, sound / "index", source, most_listed=15)
    differences = result.differences
    assert differences.counts == {"missing": 12, "extra": 10, "wrong": 20} and differences.unproven == 0
    assert (result.status, result.report.findings) == ("findings", [])
    by_kind = {kind: [d for d in differences.listed if d.kind == kind] for kind in differences.counts}
    assert {(d.topic, d.key, d.queue_id, d.offset) for d in by_kind["missing"]} == {
        (row["topic"], row["key"], row["queue_id"], row["offset"]) for row in added + twice
    }
    extra = {(row["topic"], row["offset"]) for row in table.slice(0, 10).to_pylist()}
    assert {(d.topic, d.offset) for d in by_kind["extra"]} == extra
    for d in by_kind["wrong"]:
        later, larger = d.expected["second"] - d.found["second"], d.expected["size"] - d.found["size"]
        assert (later, larger) in ((5, 0), (0, 1)) and d.topic is not None
    assert [difference.kind for difference in differences.listed] == ["missing"] * 12 + ["extra"] * 10 + ["wrong"] * 15
    assert all(difference.expected for difference in differences.listed if difference.kind != "extra")


@pytest.mark.long
def test_only_objects_of_periods_that_differ_are_read_again(spark, sound, table, tmp_path):
    """One entry of the last day differs: the objects of the other day are read once less."""
    rows = table.to_pylist()
    rows[-5]["size"] += 1
    source = write_parquet(pa.Table.from_pylist(rows, table.schema), tmp_path / "source.parquet")
    result = audited(spark, sound / "index", source, most_listed=2**40)  # a limit greater than Spark accepts
    assert result.differences.counts == {"missing": 0, "extra": 0, "wrong": 1} and len(result.differences.listed) == 1
    every = audited(spark, sound / "index", str(sound / "source.parquet"))
    size = sum(stored.size_bytes for stored in states(f"file://{sound}/index").objects.values())
    assert 0 < result.metrics.bytes_read - every.metrics.bytes_read < size * 0.7


@pytest.mark.long
def test_a_source_that_changes_between_the_passes_is_an_error(spark, sound, table, tmp_path):
    """The first pass found a difference that the second one can't name."""
    seen = tmp_path / "seen"

    def fewer(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch if seen.exists() else batch.slice(1)
        seen.touch()

    frame = spark.createDataFrame(table).coalesce(1)
    with pytest.raises(InvalidArgument, match="the source changed while it was compared"):
        audited(spark, sound / "index", frame.mapInArrow(fewer, frame.schema))


@pytest.mark.long
def test_entries_that_an_append_doubled_are_reported(spark, sound, copy):
    source = str(sound / "source.parquet")
    build(spark, source, storage=f"file://{copy}", mode="append", config=LATE)
    done = run_here("spark", "audit", "--storage", f"file://{copy}", "--source", source, "--quiet")
    assert done.code == 0 and re.search(f" entries +{2 * COUNT:,}\n", done.out)
    counts = f"counts +missing 0, extra 0, wrong 0\n.*source entries +{COUNT:,}\n +index entries +{2 * COUNT:,}\n"
    assert re.search(counts, done.out, re.S)
    assert f"the index has {COUNT:,} entries more than once" in done.out


def test_entries_hidden_by_damage_are_not_missing(spark, copy, table, tmp_path):
    """Such an entry is not wrong either. The index has one of the entries with another time, outside the bounds, as if
    two clocks had put it.
    """
    stored = newest(copy)
    harm(copy, damage_an_item, stored)
    rows = table.to_pylist()
    moved = next(row for row in rows if has_slot_of(stored, hash_key(row["topic"], row["key"])))
    moved["timestamp_ms"] = stored.second_min * 1000
    source = write_parquet(pa.Table.from_pylist(rows, table.schema), tmp_path / "source.parquet")
    result = audited(spark, copy, source, begin_ms=BEGIN_MS + DAY_MS)
    assert len(result.report.findings) == 1
    assert result.differences.findings == 0 and 1 < result.differences.unproven <= stored.count


@pytest.mark.long
def test_a_damaged_shard_hides_nothing_of_another(spark, copy, table, tmp_path):
    """The index never had the added entries. Those of a sound shard's slots are missing, although a shard of the same
    day is damaged. A damaged filter hides nothing.
    """
    *_, other, stored = sorted(
        states(f"file://{copy}").objects.values(), key=lambda shard_object: shard_object.second_max
    )
    assert stored.second_min < other.second_max
    harm(copy, damage_an_item, stored)
    harm(copy, damage_the_filter, other)
    row = {**table.to_pylist()[-1], "timestamp_ms": other.second_max * 1000}
    added = [{**row, "key": f"new-{n}", "offset": 10**9 + n} for n in range(200)]
    source = write_parquet(pa.Table.from_pylist(table.to_pylist() + added, table.schema), tmp_path / "more.parquet")
    elsewhere = sum(not has_slot_of(stored, hash_key(row["topic"], put_row["key"])) for put_row in added)
    result = audited(spark, copy, source)
    assert sorted(defect.part for defect in result.report.findings) == ["filter", "run"]
    differences = result.differences
    assert 0 < elsewhere < 200 and differences.unproven > 200 - elsewhere
    assert differences.counts == {"missing": elsewhere, "extra": 0, "wrong": 0}


@pytest.mark.long
def test_entries_under_another_topic_are_wrong(spark, tmp_path):
    """All checksums and hashes are right, but no lookup would find the entries."""
    rows = [{**row, "topic": ("a", "b")[n % 2]} for n, row in enumerate(messages(100).to_pylist())]
    source = write_parquet(pa.Table.from_pylist(rows, messages(1).schema), tmp_path / "source.parquet")
    build(spark, source, storage=f"file://{tmp_path}/index", window="30d", config=LATE)
    [stored] = states(f"file://{tmp_path}/index").objects.values()
    with open_storage(f"file://{tmp_path}/index") as storage:
        data = storage.get(stored.name)
        (first, a), (other, b) = parse_trailer(data, "f", len(data)).metadata.topics
        storage.put(stored.name, rebuilt(data, metadata={"topics": ((first, b), (other, a))}))
    for are_repeated in (False, True):
        if are_repeated:  # the right entries beside them change nothing
            build(spark, source, storage=f"file://{tmp_path}/index", window="30d", mode="append")
        result = audited(spark, tmp_path / "index", source)
        assert (result.status, result.report.findings) == ("findings", [])
        assert result.differences.counts == {"missing": 0, "extra": 0, "wrong": 100}
        for difference in result.differences.listed:
            assert {difference.expected.pop("topic"), difference.found.pop("topic")} == {"a", "b"}
            assert difference.expected == difference.found


def merged_and_swept(spark: Any, index: Path) -> None:
    merge(spark, storage=f"file://{index}", window="30d")
    sweep(f"file://{index}")


@pytest.mark.parametrize("step", [pytest.param("objects", marks=pytest.mark.long), "compare"])
def test_entries_that_are_merged_and_swept_meanwhile_are_not_missing(spark, sound, copy, monkeypatch, step):
    """The objects are gone when they are checked, or sound then and gone during the comparison."""
    # the names `spark.audit` and `spark.merge` are also functions
    module: Any = sys.modules[f"tiered_index.spark.{'writing.merge' if step == 'objects' else 'audit.audit'}"]
    described = module.described

    def afterwards(session: Any, text: str) -> Any:
        if text.startswith(f"{step}: "):
            monkeypatch.undo()
            merged_and_swept(spark, copy)
        return described(session, text)

    monkeypatch.setattr(module, "described", afterwards)
    result = audited(spark, copy, str(sound / "source.parquet"))
    report = result.report
    assert (result.status, report.findings, report.missing) == ("incomplete", [], [])
    assert len(report.unchecked) == len({what for what, _ in report.unchecked}) == 4
    assert "run it again" in str(report.unchecked[0][1])
    assert not [note for note in report.notes if "without a log record" in note]
    assert result.differences.findings == 0 and result.differences.unproven == COUNT


def test_the_command_reports_findings_and_its_status(spark, copy):
    stored = newest(copy)
    harm(copy, damage_an_item, stored)
    done = run_here("spark", "audit", "--storage", f"file://{copy}", "--quiet")
    assert done.code == 1 and re.search(f"{stored.name} +run ", done.out)
    refused = outcome_of(f"audit --storage file://{copy} --begin 2026-01-01", code=2)
    assert "need --source" in refused.error["message"]
    document = outcome_of(f"audit --storage file://{copy}", code=1).document
    assert (document["status"], document["differences"]) == ("findings", None)
    (finding,) = document["findings"]
    assert (finding["part"], finding["file"]) == ("run", stored.name) and finding["offset"] is not None
    assert document["metrics"]["bytes_read"] >= document["checked"]["object_bytes"] > 0


@pytest.mark.long
def test_a_wrong_second_beyond_a_bound_is_missing_or_extra(spark, sound, table, tmp_path):
    """Times differ over both bounds, in both directions. The audit never reports entries outside the bounds on both
    sides.
    """
    times = table["timestamp_ms"].to_numpy() // 1000
    begin_s, end_s = int(times[1000]), int(times[2000])
    later, earlier = [*range(990, 996), *range(1980, 1986)], [*range(1010, 1016), *range(2005, 2011)]
    by_s = dict.fromkeys(later, 7_000) | dict.fromkeys(earlier, -7_000)
    outside = dict.fromkeys((100, 101, 2500, 2501), 60)
    source = [
        {**row, "timestamp_ms": row["timestamp_ms"] + 1000 * (by_s | outside).get(n, 0)}
        for n, row in enumerate(table.to_pylist())
    ]
    first, inside, last = source[0], source[1500], source[-1]
    # these are also inside the bounds: the index has only those outside
    again = [{**source_row, "timestamp_ms": inside["timestamp_ms"]} for source_row in source[200:203]]
    added = [{**source_row, "offset": 10**9 + n} for n, source_row in enumerate([first, last, inside, inside])]
    dropped = {300, 301, 2600, 1600, 1601, 1602}
    messages = [row for n, row in enumerate(source) if n not in dropped] + again + added
    path = write_parquet(pa.Table.from_pylist(messages, table.schema), tmp_path / "other.parquet")
    differences = audited(spark, sound / "index", path, begin_ms=begin_s * 1000, end_ms=end_s * 1000 + 999).differences
    assert differences.counts == {"missing": 5 + 12, "extra": 3 + 12, "wrong": 0}
    assert differences.index_entries == np.count_nonzero((begin_s <= times) & (times <= end_s))
    assert (differences.unproven, differences.unsought) == (0, 32)
    assert differences.remarks[0].startswith("32 entries are missing or extra between the bounds")
    base = table["offset"][0].as_py()
    by_kind = {
        kind: sorted(d.offset - base for d in differences.listed if d.kind == kind) for kind in differences.counts
    }
    into, out_of = ([n for n in sorted(by_s) if (1000 <= n <= 2000) == inward] for inward in (False, True))
    assert by_kind["extra"] == sorted([1600, 1601, 1602, *out_of]) and by_kind["missing"][:15] == [200, 201, 202, *into]


def test_of_both_hash_rules_either_slot_may_be_in_a_damaged_object() -> None:
    damaged: Any = [SimpleNamespace(second_min=0, second_max=9, shard=slots_of(SlotMap(64), 3, 4))]
    hashes, seconds = np.array([3, 2**31 - 3, 5]), np.array([9, 0, 5])
    assert may_hold(damaged, "both", hashes, seconds).tolist() == [True, True, False]
    assert may_hold(damaged, "abs", hashes, seconds).tolist() == [True, False, False]
    assert not may_hold(damaged, "both", hashes, seconds + 10).any()
    # -2^31 has the hash 0 by either rule; an object that is no shard has all slots
    damaged[0].shard = slots_of(SlotMap(64), 0, 1)
    assert may_hold(damaged, "both", np.array([0]), np.array([0])).all()
    damaged[0].shard = None
    assert may_hold(damaged, "both", hashes, seconds).all()


def slots_of(slots: SlotMap, low: int, high: int) -> Any:
    """Return a shard with a range of slots."""
    return SimpleNamespace(slots=slots, slot_low=low, slot_high=high)


def test_of_both_hash_rules_erased_keys_are_left_out_by_their_stored_hashes() -> None:
    """Other hashes are compared: the smaller one of two that a key may have."""
    is_folded = False
    for key in (f"message-{number}" for number in range(20)):
        stone = Tombstone.of("t", 10_000, key=key)
        picked = Picked(*ALL_TIME, "both", Expired(tombstones=(stone,)))
        for stored_hash in stone.hashes:
            stored, numbers = np.array([stored_hash], np.int32), np.ones(1, np.int64)
            columns: Any = {"stored_hash": stored, "key_hash": picked.as_compared(stored), "second": numbers}
            columns |= {"topic_id": numbers, "queue_id": numbers, "fingerprint": np.array([stone.fingerprint])}
            is_folded = is_folded or columns["key_hash"][0] not in stone.hashes
            assert not len(picked.rows(columns, {1: "t"})) and len(picked.rows(columns, {1: "u"}))
    assert is_folded
