"""Audits: a sound index has no finding, and each seeded defect of each kind is found, once."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest

from tests.spark.entries import BEGIN_MS, DAY_MS, messages, states, sweep, write_parquet
from tests.support.merging import RegionItem
from tests.unit.format.test_verify_shard import rebuilt
from tiered_index import IndexConfig, IndexService, hash_key
from tiered_index.cli.main import run
from tiered_index.clock import ManualClock
from tiered_index.errors import InvalidArgument, NotAnIndex, SchemaMismatch
from tiered_index.format.layout import PRESETS
from tiered_index.format.names import log_name
from tiered_index.format.trailer import parse_trailer
from tiered_index.service.log.records import LogRecord, StoredObject
from tiered_index.spark import build, merge
from tiered_index.spark.audit import differences
from tiered_index.spark.audit.audit import AuditResult, audit, report_table, write_report
from tiered_index.spark.audit.entries import ALL_TIME, Picked, stored_entries
from tiered_index.spark.lookup.plan import Target
from tiered_index.storage.opening import open_storage

COUNT = 3_000


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return messages(COUNT)


@pytest.fixture(scope="module")
def sound(spark: Any, table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built index of two days, in `index`, and what it was built of, in `source.parquet`."""
    folder = tmp_path_factory.mktemp("audited")
    source = write_parquet(table, folder / "source.parquet")
    build(
        spark,
        source,
        storage=f"file://{folder}/index",
        shards=2,
        config=IndexConfig(slots=64, items=100_000, max_late_s=10**10),
    )
    return folder


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound / "index", tmp_path / "index")
    return tmp_path / "index"


def audited(spark: Any, index: Path, source: Any = None, **more: Any) -> AuditResult:
    return audit(spark, source, storage=f"file://{index}", **more)


def newest(index: Path) -> StoredObject:
    return max(states(f"file://{index}").objects.values(), key=lambda stored: stored.second_max)


def test_a_sound_index_has_no_finding_and_holds_its_source(spark: Any, sound: Path) -> None:
    result = audited(spark, sound / "index", str(sound / "source.parquet"))
    assert (result.status, result.report.findings, result.entries, result.objects) == ("ok", [], COUNT, 4)
    assert result.differences is not None and result.differences.counts == {"missing": 0, "extra": 0, "wrong": 0}
    assert (result.differences.source_entries, result.differences.index_entries) == (COUNT, COUNT)
    size = sum(stored.size_bytes for stored in states(f"file://{sound}/index").objects.values())
    assert result.report.checked["object_bytes"] == size
    assert result.metrics.bytes_read > 2 * size - 100_000  # once to check, once to compare


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _rewritten(index: Path, change: Callable[[LogRecord], LogRecord]) -> None:
    """Change the last record of a log that has no checkpoint of it."""
    with open_storage(f"file://{index}") as storage:
        name = log_name(states(f"file://{index}").number)
        record = change(LogRecord.decode(storage.get(name), name))
        storage.put(name, record.encode())
        storage.delete_many([info.name for info in storage.list("checkpoint/")])


def _changed(index: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    with open_storage(f"file://{index}") as storage:
        storage.put(name, change(storage.get(name)))


def damage_an_item(index: Path, stored: StoredObject) -> None:
    _changed(index, stored.name, lambda data: _flip(data, 40))


def damage_the_filter(index: Path, stored: StoredObject) -> None:
    _changed(index, stored.name, lambda data: _flip(data, stored.trailer_position))


def damage_the_trailer(index: Path, stored: StoredObject) -> None:
    _changed(index, stored.name, lambda data: _flip(data, stored.size_bytes - 20))


def cut_it_off(index: Path, stored: StoredObject) -> None:
    _changed(index, stored.name, lambda data: data[:-1])


def delete_it(index: Path, stored: StoredObject) -> None:
    with open_storage(f"file://{index}") as storage:
        storage.delete(stored.name)


def miscount(index: Path, stored: StoredObject) -> None:
    _rewritten(
        index,
        lambda record: replace(
            record, add=tuple(replace(o, count=o.count + (o.name == stored.name)) for o in record.add)
        ),
    )


def name_a_shard_twice(index: Path, stored: StoredObject) -> None:
    name = stored.name.replace(".index", "0.index")
    with open_storage(f"file://{index}") as storage:
        storage.put(name, storage.get(stored.name))
    _rewritten(index, lambda record: replace(record, add=(*record.add, replace(stored, name=name))))


def swap_two_items(index: Path, stored: StoredObject) -> None:
    """Of one key: all checksums are right, only their order is not."""

    def swap(data: bytes) -> bytes:
        trailer = parse_trailer(data, stored.name, len(data))
        run, metadata = trailer.directory.all_runs()[0], trailer.metadata
        there = slice(run.offset, run.offset + run.length)
        items = metadata.items_of(data[there], run.count, stored.name)
        row = int(np.flatnonzero((np.diff(items["key_hash"]) == 0) & (np.diff(items["offset"]) != 0))[0])
        items[[row, row + 1]] = items[[row + 1, row]]
        (packed,) = metadata.packing.pack(items, [len(items)])
        assert len(packed) == run.length
        return rebuilt(data, body=data[: there.start] + packed + data[there.stop : stored.trailer_position])

    _changed(index, stored.name, swap)


DEFECTS: dict[str, tuple[Callable[[Path, StoredObject], None], str]] = {
    "an item's bit": (damage_an_item, "run"),
    "the filter's bit": (damage_the_filter, "filter"),
    "the trailer's bit": (damage_the_trailer, "tail"),
    "cut off": (cut_it_off, "object"),
    "deleted": (delete_it, "object"),
    "counted wrong": (miscount, "object"),
    "two shards of one range": (name_a_shard_twice, "table"),
    "out of order": (swap_two_items, "order"),
}


@pytest.mark.parametrize(("seed", "part"), DEFECTS.values(), ids=DEFECTS.keys())
def test_a_seeded_defect_is_found_once(
    spark: Any, copy: Path, seed: Callable[[Path, StoredObject], None], part: str
) -> None:
    stored = newest(copy)
    seed(copy, stored)
    result = audited(spark, copy)
    assert result.status == "findings"
    assert [(defect.part, stored.file_id in defect.file) for defect in result.report.findings] == [(part, True)]


def test_a_damaged_log_is_a_finding(spark: Any, copy: Path) -> None:
    _changed(copy, log_name(2), lambda data: _flip(data, 30))
    result = audited(spark, copy, "source.parquet")
    assert [(defect.file, defect.part) for defect in result.report.findings] == [(log_name(2), "log")]
    [(what, error)] = result.report.unchecked
    assert what == "objects" and "not compared with its source" in str(error) and result.differences is None


def test_what_index_and_source_disagree_about_is_told_once_each(
    spark: Any, sound: Path, table: pa.Table, tmp_path: Path
) -> None:
    """Ten entries that the index lacks, ten that the source lacks, ten with another time and ten with another size."""
    lacking = table.slice(10).to_pylist()
    for row in lacking[:10]:
        row["timestamp_ms"] += 5_000
    for row in lacking[10:20]:
        row["size"] += 1
    added = [{**row, "offset": row["offset"] + 10**9} for row in lacking[20:30]]
    same = [dict(lacking[40])]  # once more: an index keeps what is put twice
    source = write_parquet(pa.Table.from_pylist(lacking + added + same, table.schema), tmp_path / "other.parquet")
    result = audited(spark, sound / "index", source, most_listed=2**40)  # more than Spark takes for a limit
    found = result.differences
    assert found is not None and found.counts == {"missing": 10, "extra": 10, "wrong": 20} and found.unproven == 0
    assert (result.status, result.report.findings) == ("findings", [])
    by_kind = {kind: [d for d in found.listed if d.kind == kind] for kind in found.counts}
    assert {(d.topic, d.key, d.queue_id, d.offset) for d in by_kind["missing"]} == {
        (row["topic"], row["key"], row["queue_id"], row["offset"]) for row in added
    }
    extra = {(row["topic"], row["offset"]) for row in table.slice(0, 10).to_pylist()}
    assert {(d.topic, d.offset) for d in by_kind["extra"]} == extra
    for d in by_kind["wrong"]:
        assert d.expected is not None and d.found is not None and d.topic is not None
        later, larger = d.expected["second"] - d.found["second"], d.expected["size"] - d.found["size"]
        assert (later, larger) in ((5, 0), (0, 1))
    few = audited(spark, sound / "index", source, most_listed=3)
    assert few.differences is not None and few.differences.counts == found.counts and len(few.differences.listed) == 9
    rows = report_table(result).to_pylist()
    assert [row["kind"] for row in rows] == ["missing"] * 10 + ["extra"] * 10 + ["wrong"] * 20
    assert all(json.loads(row["expected"]) for row in rows if row["kind"] != "extra")


@pytest.mark.parametrize("kind", ["missing", pytest.param("extra", marks=pytest.mark.long)])
def test_what_one_side_has_alone_is_told_once(
    spark: Any, copy: Path, table: pa.Table, tmp_path: Path, kind: str
) -> None:
    """Some of it is there twice, read by different tasks, and some with two values."""
    added = [{**row, "offset": row["offset"] + 10**9} for row in table.slice(0, 40).to_pylist()]
    added += [{**row, "size": row["size"] + 1} for row in added[:5]]
    tables = [table, *(pa.Table.from_pylist(rows, table.schema) for rows in (added, added[::2]))]
    source = [write_parquet(one, tmp_path / f"{number}.parquet") for number, one in enumerate(tables)]
    if kind == "extra":
        source, more = source[:1], source[1:]
        for one in more:
            build(spark, one, storage=f"file://{copy}", mode="append", config=IndexConfig(max_late_s=10**10))
    for most in (3, 1_000):
        found = audited(spark, copy, source, most_listed=most).differences
        assert found is not None and found.counts == dict.fromkeys(found.counts, 0) | {kind: 45}
        assert len(found.listed) == min(most, 45)


def test_an_index_that_an_append_doubled_is_told(spark: Any, sound: Path, copy: Path, capfd: Any) -> None:
    source = str(sound / "source.parquet")
    build(spark, source, storage=f"file://{copy}", mode="append", config=IndexConfig(max_late_s=10**10))
    code, out, _ = _run(capfd, "--storage", f"file://{copy}", "--source", source, "--quiet")
    assert code == 0 and re.search(f" entries +{2 * COUNT:,}\n", out)
    assert re.search(
        f"counts +missing 0, extra 0, wrong 0\n.*source entries +{COUNT:,}\n +index entries +{COUNT:,}\n", out, re.S
    )
    assert f"the index has {COUNT:,} entries more than once" in out


def test_further_columns_are_compared(spark: Any, tmp_path: Path) -> None:
    """One of identity that differs is another entry; another one that differs makes the entry wrong."""
    uri = f"file://{tmp_path}/index"
    settings = IndexConfig(root=tmp_path / "root", storage=uri, slots=64, item_type=RegionItem, background=False)
    rows = messages(60).to_pylist()
    for n, row in enumerate(rows):
        row |= {"region": n % 7, "price": n / 4, "tag": b"%04d" % n}
    with IndexService.open(settings, clock=ManualClock(BEGIN_MS + 2 * DAY_MS)) as index:
        index.put_batch(pa.Table.from_pylist(rows))
        index.seal()
        index.run_lifecycle()
    for row in rows[:2]:
        row["region"] += 7
    for row in rows[2:5]:
        row["price"] += 0.25
    rows[5]["tag"] = b"else"
    source = write_parquet(pa.Table.from_pylist(rows), tmp_path / "source.parquet")
    found = audited(spark, tmp_path / "index", source).differences
    assert found is not None and found.counts == {"missing": 2, "extra": 2, "wrong": 4} and found.unproven == 0
    told = {d.offset: (d.expected, d.found) for d in found.listed if d.kind == "wrong"}
    for row in rows[2:6]:
        expected, stored = told.pop(row["offset"])
        differ = {name for name in expected if expected[name] != stored[name]}
        assert differ == ({"tag"} if row is rows[5] else {"price"})
    assert not told


def test_what_damage_hides_is_not_missing(spark: Any, copy: Path, table: pa.Table, tmp_path: Path) -> None:
    """Nor wrong: the index has one of the entries at another time, out of bounds, as it has what was put twice under
    other clocks.
    """
    stored = newest(copy)
    shard = Target.of(stored, 64)
    damage_an_item(copy, stored)
    rows = table.to_pylist()
    one = next(row for row in rows if shard.base_low <= hash_key(row["topic"], row["key"]) % 64 < shard.base_high)
    one["timestamp_ms"] = stored.second_min * 1000
    source = write_parquet(pa.Table.from_pylist(rows, table.schema), tmp_path / "source.parquet")
    result = audited(spark, copy, source, begin_ms=BEGIN_MS + DAY_MS)
    assert len(result.report.findings) == 1
    assert (
        result.differences is not None
        and result.differences.findings == 0
        and 1 < result.differences.unproven <= stored.count
    )


def test_a_damaged_shard_hides_nothing_of_another(
    spark: Any, sound: Path, copy: Path, table: pa.Table, tmp_path: Path
) -> None:
    """Entries that the index never had: those of the slots of a sound shard are missing, whatever a shard of the same
    day lost.
    """
    stored = newest(copy)
    shard = Target.of(stored, 64)
    damage_an_item(copy, stored)
    row = table.to_pylist()[-1]
    added = [{**row, "key": f"new-{n}", "offset": 10**9 + n} for n in range(200)]
    source = write_parquet(pa.Table.from_pylist(table.to_pylist() + added, table.schema), tmp_path / "more.parquet")
    slots = [hash_key(row["topic"], one["key"]) % 64 for one in added]
    elsewhere = sum(not shard.base_low <= slot < shard.base_high for slot in slots)
    found = audited(spark, copy, source).differences
    assert found is not None and 0 < elsewhere < 200
    assert found.counts == {"missing": elsewhere, "extra": 0, "wrong": 0} and found.unproven > 200 - elsewhere


def test_a_damaged_filter_hides_nothing(spark: Any, sound: Path, copy: Path) -> None:
    damage_the_filter(copy, newest(copy))
    result = audited(spark, copy, str(sound / "source.parquet"))
    assert result.differences is not None and (result.differences.findings, result.differences.unproven) == (0, 0)


def test_entries_under_another_topic_are_wrong(spark: Any, tmp_path: Path) -> None:
    """All checksums and hashes are right, and yet no look-up would find the entries."""
    two = pa.Table.from_pylist(
        [{**row, "topic": ("a", "b")[n % 2]} for n, row in enumerate(messages(100).to_pylist())], messages(1).schema
    )
    source = write_parquet(two, tmp_path / "source.parquet")
    build(
        spark, source, storage=f"file://{tmp_path}/index", window="30d", config=IndexConfig(slots=64, max_late_s=10**10)
    )
    assert audited(spark, tmp_path / "index", source).status == "ok"

    def exchanged(data: bytes) -> bytes:
        (one, a), (other, b) = parse_trailer(data, "f", len(data)).metadata.topics
        return rebuilt(data, metadata={"topics": ((one, b), (other, a))})

    [stored] = states(f"file://{tmp_path}/index").objects.values()
    _changed(tmp_path / "index", stored.name, exchanged)
    result = audited(spark, tmp_path / "index", source)
    assert (result.status, result.report.findings) == ("findings", [])
    assert result.differences is not None and result.differences.counts == {"missing": 0, "extra": 0, "wrong": 100}
    for one in result.differences.listed:
        assert one.expected is not None and one.found is not None
        assert {one.expected.pop("topic"), one.found.pop("topic")} == {"a", "b"} and one.expected == one.found


def test_what_is_merged_and_swept_during_an_audit_is_not_missing(
    spark: Any, sound: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects were sound when they were checked, and are gone when the entries are compared."""
    compare = differences.compare

    def after_a_merge(*arguments: Any) -> Any:
        merge(spark, storage=f"file://{copy}", window="30d")
        sweep(f"file://{copy}")
        return compare(*arguments)

    # `spark.audit` is the function, too
    monkeypatch.setattr(sys.modules["tiered_index.spark.audit.audit"], "compare", after_a_merge)
    result = audited(spark, copy, str(sound / "source.parquet"))
    assert (result.status, result.report.findings) == ("incomplete", [])
    assert len(result.report.unchecked) == 4 and "run it again" in str(result.report.unchecked[0][1])
    assert result.differences is not None and (result.differences.findings, result.differences.unproven) == (0, COUNT)


def test_what_damage_found_late_hides_is_not_missing(
    spark: Any, sound: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects of both days lose a run each between the check and the comparison."""
    compare = differences.compare

    def after_damage(*arguments: Any) -> Any:
        for stored in states(f"file://{copy}").objects.values():
            damage_an_item(copy, stored)
        return compare(*arguments)

    monkeypatch.setattr(sys.modules["tiered_index.spark.audit.audit"], "compare", after_damage)
    result = audited(spark, copy, str(sound / "source.parquet"))
    assert (result.status, len(result.report.unchecked)) == ("incomplete", 4)
    assert (
        result.differences is not None and result.differences.findings == 0 and 0 < result.differences.unproven < COUNT
    )


def test_a_part_of_the_time_is_compared(spark: Any, sound: Path, table: pa.Table, tmp_path: Path) -> None:
    first = table.filter(pa.compute.less(table["timestamp_ms"], BEGIN_MS + DAY_MS))
    source = write_parquet(first, tmp_path / "first.parquet")
    whole = audited(spark, sound / "index", source)
    assert whole.differences is not None and whole.differences.counts["extra"] == COUNT - len(first)
    day = audited(spark, sound / "index", source, begin_ms=BEGIN_MS, end_ms=BEGIN_MS + DAY_MS - 1)
    assert day.status == "ok" and day.differences is not None and day.differences.index_entries == len(first)
    with pytest.raises(InvalidArgument, match="is after"):
        audited(spark, sound / "index", source, begin_ms=2_000, end_ms=1_000)


def test_the_report_is_one_parquet_file(spark: Any, copy: Path, tmp_path: Path) -> None:
    damage_an_item(copy, newest(copy))
    result = audited(spark, copy)
    write_report(result, str(tmp_path / "report.parquet"))
    write_report(result, f"file://{tmp_path}/elsewhere/report.parquet")
    for path in (tmp_path / "report.parquet", tmp_path / "elsewhere" / "report.parquet"):
        (row,) = pq.read_table(path).to_pylist()
        assert (
            (row["kind"], row["part"]) == ("finding", "run")
            and row["object"] == newest(copy).name
            and row["byte_offset"] is not None
        )
    with pytest.raises(InvalidArgument, match=r"report\.parquet"):
        write_report(result, str(tmp_path / "report.csv"))


def test_an_object_of_another_schema_is_an_error(sound: Path) -> None:
    """All its bytes are right by its own trailer; they are no entries of this index."""
    stored = newest(sound / "index")
    with open_storage(f"file://{sound}/index") as storage, pytest.raises(SchemaMismatch, match=stored.name):
        list(stored_entries(stored, storage, PRESETS["rocketmq"].schema, Picked(*ALL_TIME)))


def test_no_index_is_an_error(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(NotAnIndex):
        audited(spark, tmp_path / "nothing")


def _run(capfd: Any, *arguments: object) -> tuple[int, str, str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(["spark", "audit", *map(str, arguments)])
    printed = capfd.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out, printed.err


def test_the_command_tells_what_was_found_and_how_it_ended(
    spark: Any, sound: Path, copy: Path, tmp_path: Path, capfd: Any
) -> None:
    source = sound / "source.parquet"
    code, out, _ = _run(capfd, "--storage", f"file://{sound}/index", "--source", source, "--quiet")
    assert code == 0 and "missing 0, extra 0, wrong 0" in out and f"index entries   {COUNT:,}" in out
    damage_an_item(copy, newest(copy))
    code, out, _ = _run(capfd, "--storage", f"file://{copy}", "--report", tmp_path / "found.parquet", "--quiet")
    assert (
        code == 1
        and re.search(f"{newest(copy).name} +run ", out)
        and len(pq.read_table(tmp_path / "found.parquet")) == 1
    )
    code, out, _ = _run(capfd, "--storage", f"file://{copy}", "--json", "--quiet")
    document = json.loads(out)
    assert (code, document["status"], len(document["findings"]), document["differences"]) == (1, "findings", 1, None)
    assert document["metrics"]["bytes_read"] >= document["checked"]["object_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--storage"),
        (("--storage", "file:///tmp/x", "--begin", "2026-01-01"), "--source"),
        (("--storage", "file:///tmp/x", "--source", "s.parquet", "--constant", "size=much"), "size=much"),
        (("--storage", "file:///tmp/x", "--report", "audit.csv"), "audit.csv"),
    ],
)
def test_options_that_can_not_be_are_refused_before_spark_starts(
    arguments: tuple[str, ...], named: str, capfd: Any
) -> None:
    code, _, err = _run(capfd, *arguments)
    assert code == 2 and named in err


def test_a_wrong_second_beyond_a_bound_is_missing_or_extra(
    spark: Any, sound: Path, table: pa.Table, tmp_path: Path
) -> None:
    """Over both bounds, in both directions; what lies outside on both sides is never told, whatever it is."""
    times = table["timestamp_ms"].to_numpy() // 1000
    begin_s, end_s = int(times[1000]), int(times[2000])
    by_s = dict.fromkeys([*range(990, 996), *range(1980, 1986)], 7_000) | dict.fromkeys(
        [*range(1010, 1016), *range(2005, 2011)], -7_000
    )
    outside = dict.fromkeys((100, 101, 2500, 2501), 60)
    source = [
        {**row, "timestamp_ms": row["timestamp_ms"] + 1000 * (by_s | outside).get(n, 0)}
        for n, row in enumerate(table.to_pylist())
    ]
    first, inside, last = source[0], source[1500], source[-1]
    # inside, too: the index has the one outside only
    again = [{**one, "timestamp_ms": inside["timestamp_ms"]} for one in source[200:203]]
    added = [{**one, "offset": 10**9 + n} for n, one in enumerate([first, last, inside, inside])]
    dropped = {300, 301, 2600, 1600, 1601, 1602}
    messages = [row for n, row in enumerate(source) if n not in dropped] + again + added
    path = write_parquet(pa.Table.from_pylist(messages, table.schema), tmp_path / "other.parquet")
    found = audited(spark, sound / "index", path, begin_ms=begin_s * 1000, end_ms=end_s * 1000 + 999).differences
    assert found is not None and (found.counts, found.unproven, found.unsought) == (
        {"missing": 5 + 12, "extra": 3 + 12, "wrong": 0},
        0,
        32,
    )
    assert found.remarks[0].startswith("32 entries are missing or extra between the bounds")
    base = table["offset"][0].as_py()
    by_kind = {kind: sorted(d.offset - base for d in found.listed if d.kind == kind) for kind in found.counts}
    into, out_of = ([n for n in sorted(by_s) if (1000 <= n <= 2000) == inward] for inward in (False, True))
    assert by_kind["extra"] == sorted([1600, 1601, 1602, *out_of]) and by_kind["missing"][:15] == [200, 201, 202, *into]
