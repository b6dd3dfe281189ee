"""`ingest`: continued, changed, grown and bad sources, a held lock, and SIGKILL at random moments."""

import json
import os
import random
import re
import signal
import subprocess
import time
from dataclasses import replace

import pyarrow.csv
import pyarrow.parquet
import pytest

from tests.integration.cli.command_lines import SCRIPT, clean_environment
from tests.integration.cli.conftest import BEGIN_MS, Made, expected_offsets, message, write_source
from tests.support.damage import flip
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService, config
from tiered_index.cli.write.ingest import FileIntake
from tiered_index.connectors.files.message_files import open_source
from tiered_index.connectors.files.rows.places import LocalFile
from tiered_index.connectors.follow import PatientPut

SMALL = ("--slots", 32, "--items", 400)


@pytest.fixture
def places(tmp_path):
    return Made(tmp_path)


@pytest.fixture
def ingest(run_here, places):
    """Return a function that ingests the messages into the index."""
    where = ("--root", places.root, "--storage", places.uri, *SMALL)
    return lambda *options, **how: run_here("ingest", places.source, *where, *options, **how)


def offsets_of(places, topic, key):
    with IndexReader.open(root=places.root) as reader:
        answer = reader.query(topic, key, max_count=100_000)
        assert answer.status == "complete"
        return [item.offset for item in answer]


def test_a_restart_that_stopped_at_a_bad_message_is_continued(ingest, places, monkeypatch):
    monkeypatch.setattr("tiered_index.connectors.files.message_files.FINGERPRINT_BYTES", 100)
    write_source(places.source, 0, 500)
    assert ingest("--json").document["messages"] == 500
    # a change that the fingerprint does not cover
    same, _, other = places.source.read_text().partition('"own-200"')
    lines = f'{same}"new-200"{other.replace("own-", "new-")}'.splitlines(keepends=True)
    bad = "x" * (len(lines[300]) - 1) + "\n"
    places.source.write_text("".join([*lines[:300], bad, *lines[301:]]))
    assert ingest("--restart").code == 2
    places.source.write_text("".join(lines))
    assert ingest("--json").document["messages"] == 200
    assert (offsets_of(places, "orders", "new-200"), offsets_of(places, "orders", "new-400")) == ([200], [400])
    assert ingest("--json").document["messages"] == 0
    assert ingest("--json", "--restart").document["messages"] == 500


def test_a_grown_file_is_continued_and_a_changed_one_refused(ingest, places):
    write_source(places.source, 0, 500)
    first = ingest("--json").document
    assert (first["messages"], first["entries"], first["resumed_from"]) == (500, 1000, 0)
    again = ingest("--json").document
    assert (again["messages"], again["resumed_from"], again["position"]) == (0, first["position"], first["position"])
    write_source(places.source, 500, 700)
    grown = ingest("--json").document
    assert (grown["messages"], grown["resumed_from"]) == (200, first["position"])
    assert grown["source_name"] == first["source_name"]
    assert offsets_of(places, "orders", "k7") == expected_offsets("orders", "k7", 700)
    places.source.write_text(places.source.read_text().replace('"size": 100', '"size": 999', 1))
    changed = ingest("--json")
    assert (changed.code, changed.error["type"]) == (2, "InvalidArgument")
    assert "--restart" in changed.error["message"]
    assert ingest("--json", "--restart").document["messages"] == 700
    assert offsets_of(places, "orders", "k7") == expected_offsets("orders", "k7", 700)


def test_both_sides_report_entries_that_are_not_in_the_storage_yet(run_here, ingest, places):
    write_source(places.source, 0, 3)
    query = ("query", "orders", "k2", "--storage", places.uri)
    assert ingest().out.endswith("not in the storage yet: 1 file, 6 entries; --wait uploads\n")
    assert run_here(*query).out.startswith("0 found, complete so far: nothing is published yet; the writer ended at 20")
    assert "1 found, complete\n" in run_here(*query, "--root", places.root).out
    assert "not in the storage" not in ingest("--wait").out
    assert "1 found, complete as of 2023-11-14T22:13:22Z; the writer ended at 20" in run_here(*query).out
    answer = run_here(*query, "--json").document
    assert answer["as_of_ms"] == BEGIN_MS + 2000
    [index] = answer["freshness"]
    assert (index["as_of_ms"], index["writer"]["state"]) == (BEGIN_MS + 2000, "closed")
    assert list(index["positions"].values()) == [places.source.stat().st_size]
    assert run_here(*query, "--json", "--all").records[-1]["freshness"] == [index]


def test_a_bad_line_stops_there_and_a_repaired_file_continues(ingest, places):
    good = [json.dumps(message(n)) for n in range(100)]
    places.source.write_text("\n".join([*good[:60], '{"topic": "orders"}', *good[60:]]) + "\n")
    outcome = ingest("--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert "line 61" in outcome.error["message"] and str(places.source) in outcome.error["message"]
    assert (offsets_of(places, "orders", "own-59"), offsets_of(places, "orders", "own-61")) == ([59], [])
    skipped = ingest("--json", "--skip-bad").document
    assert (skipped["messages"], skipped["skipped"]) == (40, 1)
    assert skipped["resumed_from"] == sum(len(line) + 1 for line in good[:60])
    assert offsets_of(places, "orders", "k7") == expected_offsets("orders", "k7", 100)


def test_a_last_line_that_may_be_cut_is_reported_and_read_once_it_is_whole(run_here, ingest, places):
    write_source(places.source, 0, 3)
    whole = places.source.read_text()
    places.source.write_text(whole[:-20])
    outcome = ingest("--skip-bad")
    assert outcome.code == 0 and re.search(r"messages +2\n", outcome.out)
    assert "messages.ndjson: the last line (97 bytes) is held back: it has no newline, or an open quote" in outcome.err
    again = ingest("--skip-bad", "--json").document
    assert (again["held_back"], again["messages"], again["skipped"]) == (1, 0, 0)
    table = places.source.with_suffix(".csv")
    head, rows = "topic,queue_id,offset,size,timestamp_ms,key\n", 'orders,9,1,1,1700000000000,"k1\norders,9,2,2,2,2\n'
    table.write_text(head + rows)
    held = run_here("ingest", table, "--root", places.root, "--storage", places.uri).err
    assert f"{table}: the last row ({len(rows)} bytes, 2 lines) is held back: a quote in it is not closed" in held
    places.source.write_text(whole)
    document = ingest("--skip-bad", "--json").document
    assert (document["held_back"], document["messages"], document["position"]) == (0, 1, len(whole))
    assert offsets_of(places, "orders", "own-2") == [2]


def test_skipped_and_quarantined_messages_are_reported(ingest, places):
    lines = [json.dumps(message(n) | ({"timestamp_ms": 1_700_000_000} if n == 2 else {})) for n in range(5)]
    places.source.write_text("\n".join(["nope", *lines, "{}"]) + "\n")
    document = ingest("--skip-bad", "--restart", "--json").document
    assert document["skipped_reasons"] == {"not JSON": 1, "'topic' is missing": 1}
    assert [bad["where"] for bad in document["skipped_first"]] == ["line 1", "line 7"]
    first = {"topic": "orders", "queue_id": 2, "offset": 2, "timestamp_ms": 1_700_000_000, "where": "line 4"}
    assert (document["quarantined"], document["quarantined_first"]) == (2, [first])
    outcome = ingest("--skip-bad", "--restart")
    assert re.search(r"skipped +2 messages\n", outcome.out)
    assert re.search(r"quarantined +2 entries with an implausible time\n", outcome.out)
    assert "not JSON 1, 'topic' is missing 1" in outcome.out
    assert "skipped: line 7: 'topic' is missing\n" in outcome.err
    assert "to quarantine: line 4: 1970-01-20T16:13:20Z; seconds? timestamp_ms is milliseconds\n" in outcome.err


@pytest.mark.parametrize(("times", "code", "state"), [(3, 0, "uploaded"), (None, 3, "compacted")])
def test_wait_waits_for_a_storage_that_returns_and_fails_for_one_that_does_not(
    ingest, places, monkeypatch, times, code, state
):
    write_source(places.source, 0, 300)

    def faulty(uri, open_storage=config.open_storage, **more):
        storage = FaultStorage(open_storage(uri, **more))
        storage.fail("put", times=times, name_prefix="data/")
        return storage

    with monkeypatch.context() as patched:
        patched.setattr(config, "open_storage", faulty)
        assert ingest("--wait", "--patience", 10 if times else 0.3, "--json").code == code
    assert [folder.name for folder in places.root.iterdir() if any(folder.glob("*.index"))] == [state]


def test_other_names_of_columns_from_a_uri_and_from_stdin(run_here, places):
    places.folder.mkdir(exist_ok=True)
    path = places.folder / "orders of today.csv"
    path.write_text("order_id,queue_id,offset,size,timestamp_ms\nA-1,0,1,10,1700000000000\n")
    where = ("--root", places.root, "--storage", places.uri, *SMALL, "--json")
    names = ("--column", "key=order_id", "--constant", "topic=orders")
    document = run_here("ingest", path.as_uri(), *names, *where).document
    assert (document["entries"], document["source"]) == (1, str(path))
    assert run_here("ingest", path, *names, *where).document["resumed_from"] == path.stat().st_size
    another = path.read_bytes().replace(b"A-1,0,1", b"A-2,0,2")
    document = run_here("ingest", "-", *names, *where, stdin=another).document
    assert (document["entries"], document["source"], document["source_name"]) == (1, "stdin", None)
    assert offsets_of(places, "orders", "A-1") + offsets_of(places, "orders", "A-2") == [1, 2]
    assert "only the newest message" in run_here("ingest", path, *names, "--constant", "offset=0", *where).err
    assert "--column is for a file" in run_here("ingest", places.folder, *names, *where).error["message"]


def test_a_closed_stdin_is_not_an_empty_one(places):
    command = [str(SCRIPT), "ingest", "-", "--root", str(places.root), "--storage", places.uri]
    line = ["sh", "-c", '"$@" <&-', "sh", *command]
    done = subprocess.run(line, capture_output=True, text=True, env=clean_environment())
    assert done.returncode == 2 and "stdin is closed" in done.stderr


def test_another_writer_is_named(run_here, places):
    write_source(places.source, 0, 10)
    with IndexService.open(root=places.root, storage=places.uri, slots=32, items=400):
        outcome = run_here("ingest", places.source, "--root", places.root, "--json")
    assert (outcome.code, outcome.error["type"], outcome.error["pid"]) == (5, "LockHeld", os.getpid())


def test_a_full_disk_bound_is_code_7_and_loses_nothing(ingest, places):
    write_source(places.source, 0, 3000)
    environment = {"TIERED_INDEX_DISK_MAX_BYTES": "40000", "TIERED_INDEX_BUFFER_MAX_ENTRIES": "100"}
    # no upload makes room meanwhile
    environment["TIERED_INDEX_LIFECYCLE_INTERVAL_S"] = "600"
    outcome = ingest("--json", "--patience", "0.2", environment=environment)
    assert outcome.code == 7, outcome
    assert ingest("--json").code == 0
    assert offsets_of(places, "orders", "k7") == expected_offsets("orders", "k7", 3000)


def holds_lock(root, pid):
    try:
        return json.loads((root / "lock").read_bytes())["pid"] == pid
    except (FileNotFoundError, json.JSONDecodeError):
        # not written yet
        return False


def test_sigkill_at_any_moment_and_the_same_command_again(places):
    """Every entry is found exactly once after any number of kills, while the file grows.

    The seed is printed on failure.
    """
    seed = random.SystemRandom().randrange(1 << 30)
    moments = random.Random(seed)
    most, grown = 40, 3000
    where = ("--root", places.root, "--storage", places.uri)
    line = [SCRIPT, "ingest", places.source, *where, *["--slots", "32", "--items", "1000", "--wait"]]
    environment = clean_environment(TIERED_INDEX_FLUSH_INTERVAL_S="0.02", TIERED_INDEX_LIFECYCLE_INTERVAL_S="0.02")
    kills = 0
    # a process may end before its kill, so there are more rounds until two were killed
    for number in range(most):
        if number >= 2 and kills >= 2:
            break
        write_source(places.source, number * grown, (number + 1) * grown)
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        # counted from the lock, or all moments would be in the interpreter's start
        deadline = time.monotonic() + 60
        while not holds_lock(places.root, process.pid) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.12))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        count = (number + 1) * grown
    done = subprocess.run([*line, "--json"], capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, (seed, done.stderr)
    assert kills >= 2, seed
    with IndexReader.open(places.uri) as reader:
        for topic, key in ((topic, f"k{key}") for topic in ("orders", "payments") for key in range(40)):
            items = reader.query(topic, key, max_count=count).items
            assert [item.offset for item in items] == expected_offsets(topic, key, count), (seed, topic, key)
        for number in moments.sample(range(count), 200):
            (item,) = reader.query(message(number)["topic"], f"own-{number}")
            assert item.timestamp_ms == BEGIN_MS + number * 1000, (seed, number)


OWN = """
from dataclasses import dataclass

from tiered_index import KeyedIndexItem, column


@dataclass(frozen=True, kw_only=True)
class Sighting(KeyedIndexItem):
    region: int = column(">u2")
    weight: float = column(">f8")
    tag: bytes = column("S4")
    town: str = column("text", width=12)
    guide: str = column("text", width=4, default="née")

nothing = 5
"""
SIGHTINGS = [
    {"topic": "birds", "key": "wren", "at": BEGIN_MS + n * 1000, "site": n + 7, "weight": n / 2, "tag": "vip"}
    | {"town": town, "note": "x"}
    for n, town in enumerate(["日本語の", "Ελλάδα", "cafe", 'a,"b"', ""])
]


@pytest.mark.parametrize("kind", ["csv", "ndjson", "parquet"])
def test_columns_of_ones_own_and_row_numbers_go_in_and_out(run_here, places, tmp_path, monkeypatch, kind):
    (tmp_path / "sightings_of_tests.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    where = ("--root", places.root, "--storage", places.uri, *SMALL)
    names = ("--column", "timestamp_ms=at", "--column", "region=site", "--column", "offset=rownumber")
    names += ("--constant", "size=0", "--item-type", "sightings_of_tests:Sighting", "--constant")
    table, source = pyarrow.Table.from_pylist(SIGHTINGS), tmp_path / f"birds.{kind}"
    if kind == "ndjson":
        source.write_text("".join(json.dumps(row) + "\n" for row in SIGHTINGS))
    else:
        (pyarrow.csv.write_csv if kind == "csv" else pyarrow.parquet.write_table)(table, source)

    def seen(rows):
        return {(row["offset"], row["region"], row["weight"], row["town"], row["guide"]) for row in rows}

    outcome = run_here("ingest", source, *names, "queue_id=0", *where, "--json", "--wait")
    assert outcome.code == 0, outcome.err
    assert (outcome.document["entries"], outcome.document["dropped_columns"]) == (5, ["note"])
    expected = {(n, n + 7, n / 2, sighting["town"], "née") for n, sighting in enumerate(SIGHTINGS)}
    command = ("query", "birds", "wren", "--root", places.root)
    items = run_here(*command, "--json").document["items"]
    assert seen(items) == expected and {item["tag"] for item in items} == {b"vip\0".hex()}
    assert re.search(r" 7 +0\.0 +vip +日本語の +née *\n", run_here(*command).out)
    out = tmp_path / "out.parquet"
    assert run_here("export", "--root", places.root, "--out", out).code == 0
    assert seen(pyarrow.parquet.read_table(out).to_pylist()) == expected
    again = ("--root", tmp_path / "again", "--storage", f"file://{tmp_path}/again-objects", *SMALL)
    assert run_here("ingest", out, *again, "--json").document["entries"] == 5
    assert seen(run_here(*command[:3], *again[:2], "--json").document["items"]) == expected
    # a value that does not fit
    source.write_text(json.dumps(SIGHTINGS[0] | {"town": "12345678901é"}))
    wrong = run_here("ingest", source.rename(tmp_path / "wrong.ndjson"), *names, "queue_id=1", *where)
    assert wrong.code == 2 and "town must be text of at most 12 bytes in UTF-8" in wrong.err


@pytest.mark.parametrize(
    ("item_type", "said"),
    [
        ("no_such_module_here:X", "--item-type no_such_module_here:X can't be loaded: No module named"),
        ("sightings_of_tests:Nope", "can't be loaded: module 'sightings_of_tests' has no attribute 'Nope'"),
        ("sightings_of_tests:nothing", "give module:Class, a class of entries"),
    ],
)
def test_a_class_of_entries_that_is_none(run_here, places, tmp_path, monkeypatch, item_type, said):
    (tmp_path / "sightings_of_tests.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    outcome = run_here("ingest", write_source(places.source, 0, 1), "--item-type", item_type, "--root", places.root)
    assert (outcome.code, said in outcome.err) == (2, True), outcome.err
    assert not places.root.exists()


def test_a_file_with_a_name_of_its_own_may_move(run_here, places, tmp_path):
    write_source(places.source, 0, 50)
    where = ("--root", places.root, "--storage", places.uri, *SMALL, "--store-name", "orders", "--json")
    first = run_here("ingest", places.source, *where).document
    assert first["source_name"].startswith("file:orders#")
    moved = tmp_path / "moved.ndjson"
    places.source.rename(moved)
    assert run_here("ingest", moved, *where).document["messages"] == 0
    write_source(moved, 50, 60)
    assert run_here("ingest", moved, *where).document["messages"] == 10
    assert run_here("ingest", "-", *where).code == 2


def test_entries_older_than_the_retention_are_counted(run_here, places):
    fresh = {**message(9), "timestamp_ms": time.time_ns() // 10**6}
    places.source.write_text("".join(json.dumps(row) + "\n" for row in (message(0), message(1), fresh)))
    where = ("ingest", places.source, "--root", places.root, "--storage", places.uri, *SMALL, "--wait")
    rule = ("--set", "retention.topics.orders=365d")
    assert run_here(*where, *rule, "--json").document["expired"] == 2
    assert offsets_of(places, "payments", "k0") == [0] and offsets_of(places, "payments", "k9") == [9]
    assert offsets_of(places, "orders", "k1") == []
    # the log has the rule now
    again = run_here(*where, "--restart")
    assert re.search("^  expired +2 entries older than the retention: lookups leave them out$", again.out, re.MULTILINE)
    places.source.write_text(json.dumps(fresh) + "\n")
    later = run_here(*where, "--restart")
    assert later.code == 0 and "retention" not in later.out


def test_row_numbers_of_a_second_file_need_a_queue_of_their_own(run_here, tmp_path):
    """They would hide entries of the first file. A file that moved, or has other queues, has no such entries."""
    first, second, moved = (tmp_path / name for name in ("first.csv", "second.csv", "moved.csv"))
    head = "topic,queue_id,key,size,timestamp_ms\n"
    first.write_text(head + "orders,0,a,1,1700000000000\norders,0,b,1,1700000001000\n")
    second.write_text(head + "orders,0,a,1,1700000005000\n")
    moved.write_text(first.read_text())
    where = ("--column", "offset=rownumber", "--root", tmp_path / "root", "--storage", f"file://{tmp_path / 'store'}")
    where += SMALL
    assert run_here("ingest", first, *where).code == 0
    refused = run_here("ingest", second, *where)
    assert refused.code == 2 and "--constant queue_id=N" in refused.err and str(first) in refused.err
    assert run_here("ingest", moved, *where).code == 0
    assert run_here("ingest", second, "--constant", "queue_id=1", *where).code == 0
    items = run_here("query", "orders", "a", "--root", tmp_path / "root", "--json").document["items"]
    assert [(item["queue_id"], item["offset"]) for item in items] == [(1, 0), (0, 0)]


def test_a_pipe_by_its_name_is_refused_at_once(run_here, places):
    places.folder.mkdir(exist_ok=True)
    pipe = places.folder / "messages.ndjson"
    os.mkfifo(pipe)
    done = run_here("ingest", pipe, "--root", places.root, "--storage", places.uri, *SMALL)
    assert done.code == 2 and f"{pipe} is a pipe or a device" in done.err and f"- and < {pipe}" in done.err


@pytest.mark.parametrize("skip", [(), ("--skip-bad",)])
def test_topic_ids_may_be_mixed_and_one_of_another_topic_is_a_bad_message(ingest, places, skip):
    messages = [message(n) | {"topic": "orders"} | ({"topic_id": 5} if n % 2 else {}) for n in range(8)]
    messages[5]["topic"] = "other"
    places.source.write_text("".join(json.dumps(row) + "\n" for row in messages))
    done = ingest("--json", *skip)
    if not skip:
        assert done.code == 2 and "line 6: refused by the index: topic id 5 of 'other'" in done.error["message"]
        return
    assert (done.document["messages"], done.document["skipped_reasons"]) == (7, {"refused by the index": 1})
    with IndexReader.open(root=places.root) as reader:
        answers = [(item.offset, item.topic_id == 5) for n in range(8) for item in reader.query("orders", f"own-{n}")]
    assert answers == [(n, n % 2 == 1) for n in range(8) if n != 5]


def test_wait_ends_with_the_error_of_a_damaged_file(ingest, places):
    write_source(places.source, 0, 10)
    assert ingest().code == 0
    (path,) = places.files("unsealed")
    flip(path, 28 + 8 * 32 + 36 * 3)
    done = ingest("--wait", "--json")
    assert (done.code, done.error["type"]) == (4, "CorruptFile")


def test_a_file_under_another_topic_or_key_is_taken_from_its_start(run_here, places):
    places.folder.mkdir(exist_ok=True)
    path = places.folder / "orders.csv"
    path.write_text("order_id,buyer,queue_id,offset,size,timestamp_ms\nA-1,B-1,0,1,10,1700000000000\n")
    where = ("--root", places.root, "--storage", places.uri, *SMALL, "--json")
    wanted = [("key=order_id", "topic=orders"), ("key=order_id", "topic=copies"), ("key=buyer", "topic=orders")]
    for column, constant in wanted:
        document = run_here("ingest", path, "--column", column, "--constant", constant, *where).document
        assert (document["resumed_from"], document["entries"]) == (0, 1)
    for topic, key in (("orders", "A-1"), ("copies", "A-1"), ("orders", "B-1")):
        assert offsets_of(places, topic, key) == [1]
    again = ("--constant", "topic=copies", "--column", "size=size", "--column", "key=order_id")
    assert run_here("ingest", path, *again, *where).document["resumed_from"] == path.stat().st_size
    path.write_text(path.read_text().replace("A-1", "A-2"))
    assert "--restart" in run_here("ingest", path, "--column", "key=order_id", "--constant", "topic=new", *where).err


def test_a_message_in_quarantine_that_no_line_matches_is_named_by_its_batch(places):
    source = open_source(LocalFile(write_source(places.source, 3, 4)))
    with IndexService.open(root=places.root, storage=places.uri, background=False, max_late_s=1) as index:
        index.put("orders", 0, "now", 1, 1, BEGIN_MS + 10**9)
        intake = FileIntake(index, source, "source", False, PatientPut(index, 1))
        (batch,) = source.batches(0)
        intake.take(replace(batch, records=lambda: iter(())))
    assert [bad["where"] for bad in intake.quarantined] == [f"bytes up to {batch.end:,}"]
