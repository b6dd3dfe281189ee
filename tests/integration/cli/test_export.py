"""`export`, `ingest` of exports, and `topics --by`: equal entries and equal answers with each kind of file.

Other tools open each file as a table.
"""

import gzip
import json
import subprocess
from collections import Counter
from dataclasses import dataclass

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import SCRIPT, clean_environment
from tests.integration.cli.conftest import BEGIN_MS, MESSAGES, expected_offsets, message
from tests.support.damage import flip
from tiered_index import IndexReader, IndexService, KeyedIndexItem, column, hash_key
from tiered_index.cli.write.export import made_whole
from tiered_index.errors import PartialAnswer
from tiered_index.format.foreign import ForeignUnsealed
from tiered_index.format.layout import ROCKETMQ, Layout

SLOTS, ITEMS = 64, 1500
GEOMETRY = ("--slots", SLOTS, "--items", ITEMS)
COLUMNS = ["topic", "topic_id", "queue_id", "offset", "size", "timestamp_ms", "key_hash", "fingerprint"]


@dataclass(frozen=True, kw_only=True)
class TaggedItem(KeyedIndexItem):
    region: int = column(">u2", identity=True)


def done(outcome):
    assert outcome.code == 0, outcome.err
    return outcome.document


@pytest.fixture
def exported(original, tmp_path, run_here):
    """Export the index with its 100 unsealed messages; return the document."""

    def export(name, *more):
        return done(run_here("export", "--root", original.root, "--out", tmp_path / name, "--json", *more))

    return export


@pytest.fixture
def few_rows(monkeypatch):
    """Let files be written and read in pieces of few rows."""
    monkeypatch.setattr("tiered_index.cli.write.export._ROWS", 700)
    monkeypatch.setattr("tiered_index.cli.write.exported._ROWS", 500)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("form", ["parquet", "ndjson"])
def test_out_and_in_again(exported, run_here, original, tmp_path, form):
    report = exported(f"entries.{form}")
    assert (report["entries"], report["lost"], report["format"]) == (2 * MESSAGES, [], form)
    assert report["bytes"] == (tmp_path / f"entries.{form}").stat().st_size
    where = ("--root", tmp_path / "copy", "--storage", f"file://{tmp_path}/store")
    back = done(run_here("ingest", tmp_path / f"entries.{form}", *where, *GEOMETRY, "--wait", "--json"))
    assert {back[name] for name in ("entries", "rows")} == {2 * MESSAGES}
    assert back["checksum"] == report["checksum"]
    again = done(run_here("export", "--storage", where[-1], "--out", tmp_path / "again.parquet", "--json"))
    assert (again["entries"], again["checksum"]) == (report["entries"], report["checksum"])
    for topic, key in (("orders", "k7"), ("payments", "k3"), ("orders", "own-2999"), ("orders", "none")):
        line, roots = ("query", topic, key, "--max", 200, "--json", "--root"), (original.root, tmp_path / "copy")
        answers = [done(run_here(*line, root))["items"] for root in roots]
        assert answers[0] == answers[1]
        assert [item["offset"] for item in answers[0]] == expected_offsets(topic, key)
    once_more = done(run_here("ingest", tmp_path / f"entries.{form}", *where, "--json"))
    assert (once_more["entries"], once_more["resumed_from"]) == (0, 2 * MESSAGES)


@pytest.mark.parametrize(("rule", "form"), [("abs", "ndjson"), ("mask", "parquet")])
def test_an_export_that_is_read_again_has_the_hash_rule_of_its_keys(run_here, tmp_path, rule, form):
    keys = [key for key in map("longer-{}".format, range(100)) if hash_key("t", key) != hash_key("t", key, "mask")]
    place = {"topic": "t", "queue_id": 0, "offset": 1, "size": 1, "timestamp_ms": BEGIN_MS}
    lines = [json.dumps(place | {"key": key}) + "\n" for key in keys]
    (tmp_path / "in.ndjson").write_text("".join(lines))
    first, again = (("--root", tmp_path / name, "--storage", f"file://{tmp_path}/{name}.s") for name in ("a", "b"))
    of_rocketmq = "--preset", "rocketmq", "--hash", rule
    done(run_here("ingest", tmp_path / "in.ndjson", *first, *of_rocketmq, *GEOMETRY, "--json"))
    out = tmp_path / f"out.{form}"
    assert done(run_here("export", *first, "--out", out, "--json"))["entries"] == len(keys) > 20
    done(run_here("ingest", out, *again, *(of_rocketmq if form == "ndjson" else ()), *GEOMETRY, "--json"))
    with IndexReader.open(root=tmp_path / "b") as reader:
        assert reader.genesis.layout.hash == rule
        assert [len(reader.query("t", key).items) for key in keys] == [1] * len(keys)


@pytest.mark.usefixtures("few_rows")
def test_an_export_is_read_from_stdin(exported, run_here, tmp_path):
    report = exported("entries.ndjson")
    lines = (tmp_path / "entries.ndjson").read_bytes()
    where = ("--root", tmp_path / "copy", "--storage", f"file://{tmp_path}/store")
    for piped in (lines, gzip.compress(lines)):
        back = done(run_here("ingest", "-", *where, *GEOMETRY, "--wait", "--json", stdin=piped))
        assert (back["source"], back["source_name"], back["resumed_from"]) == ("stdin", None, 0)
        assert (back["entries"], back["checksum"]) == (report["entries"], report["checksum"])
    wrong = run_here("ingest", "-", *where, "--column", "offset=o", stdin=piped)
    assert (wrong.code, "a file that `tiered-index export` wrote" in wrong.err) == (2, True)


def test_a_topic_and_a_range_and_a_misspelt_topic(exported, run_here, original, tmp_path):
    low, high = BEGIN_MS + 1_000_500, BEGIN_MS + 2_950_999
    exported("range.parquet", "--topic", "orders", "--begin", low, "--end", high)
    table = pq.read_table(tmp_path / "range.parquet")
    offsets = [n for n in range(1000, 2951) if message(n)["topic"] == "orders"]
    assert Counter(table["offset"].to_pylist()) == Counter(offsets * 2)
    assert set(table["topic"].to_pylist()) == {"orders"}
    topics = ("--topic", "orderz", "--topic", "orders")
    assert exported("some.parquet", *topics)["unknown_topics"] == ["orderz"]
    outcome = run_here("export", "--storage", original.uri, "--out", tmp_path / "none.parquet", *topics)
    assert "no file that was read has topic 'orderz'; did you mean 'orders'?" in outcome.out


def test_a_minus_is_stdout(exported, run_here, original, tmp_path):
    command = ("export", "--root", original.root, "--topic", "orders", "--out", "-")
    report = exported("some.ndjson", "--topic", "orders")
    outcome = run_here(*command)
    assert (outcome.code, outcome.out) == (0, (tmp_path / "some.ndjson").read_text())
    assert f"{report['entries']:,} entries, checksum {report['checksum']}" in outcome.err
    assert run_here(*command, "--json").code == 2 and not (tmp_path / "-").exists()


def test_the_end_of_the_name_says_the_format(exported, tmp_path):
    reports = [exported(name)["format"] for name in ("e.jsonl", "e.dat", "e")]
    assert reports == ["ndjson", "parquet", "parquet"]
    schema = pq.read_schema(tmp_path / "e")
    assert (schema.names, str(schema.field("timestamp_ms").type)) == (COLUMNS, "timestamp[ms, tz=UTC]")


def test_rocketmqs_files(exported, run_here, tmp_path):
    report = exported("files", "--format", "rocketmq", *GEOMETRY)
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, SLOTS, ITEMS, "abs")
    names = sorted((tmp_path / "files").iterdir())
    assert len(names) == -(-2 * MESSAGES // (ITEMS - 1)) and report["bytes"] == len(names) * layout.unsealed_size
    images = [ForeignUnsealed(path.read_bytes(), layout, path.name) for path in names]
    assert [image.header.begin_ms for image in images] == [int(path.name) for path in names]
    offsets = [int(item["offset"]) for image in images for items in image.items() for item in items]
    assert sorted(offsets) == sorted([*range(MESSAGES)] * 2)
    own = {"root": tmp_path / "own", "storage": f"file://{tmp_path}/s", "item_type": TaggedItem}
    with IndexService.open(**own, slots=16, items=99) as index:
        index.put("t", 0, "k", 1, 1, BEGIN_MS, region=1)
    refused = run_here("export", "--root", tmp_path / "own", "--out", tmp_path / "no", "--format", "rocketmq", "--json")
    assert refused.code == 2 and "no column 'region'" in refused.error["message"]
    assert not (tmp_path / "no").exists()


def test_no_half_file_under_the_name(tmp_path, run_here, damaged):
    path = max(damaged.files("uploaded"), key=lambda candidate: candidate.stat().st_size)
    (stored,) = [candidate for candidate in damaged.objects() if path.stem in str(candidate)]
    for file_path in (path, stored):
        data = bytearray(file_path.read_bytes())
        data[28 + 8 * SLOTS + 4000] ^= 1
        file_path.write_bytes(data)
    out = tmp_path / "entries.parquet"
    broken = run_here("export", "--root", damaged.root, "--out", out, "--json")
    assert (broken.code, broken.error["type"]) == (4, "CorruptFile")
    assert not [entry for entry in tmp_path.iterdir() if "entries" in entry.name]


def test_a_second_command_with_the_same_file_is_refused(tmp_path, run_here, original):
    """It would take the place of the first one's temporary file, which would then get the name half written."""
    out = tmp_path / "entries.ndjson"
    with made_whole(out) as partial:
        partial.write_text("first")
        refused = run_here("export", "--root", original.root, "--out", out, "--json")
        assert refused.code == 2 and "another command is writing it" in refused.error["message"]
    assert out.read_text() == "first" and [entry.name for entry in tmp_path.iterdir()] == [out.name]


def test_what_is_refused(tmp_path, run_here, original):
    root = ("--root", original.root)
    (tmp_path / ".f.partial").mkdir()
    outcome = run_here("export", *root, "--out", tmp_path / "f", "--json")
    assert outcome.code == 2 and ".f.partial is a folder" in outcome.error["message"], outcome.err
    assert (tmp_path / ".f.partial").is_dir()
    where = ("--root", tmp_path / "r", "--storage", f"file://{tmp_path}/s", "--json")
    pq.write_table(pa.table({"topic": ["t"]}), tmp_path / "other.parquet")
    (tmp_path / "of-spark").mkdir()
    columns = ("topic", "key_hash", "key", "queue_id", "offset", "size", "timestamp")
    pq.write_table(pa.table({name: [1] for name in columns}), tmp_path / "of-spark" / "part-0.parquet")
    (tmp_path / "e.csv").write_text("topic,queue_id,offset,size,timestamp_ms,key_hash\nt,0,1,1,1,7\n")
    for file, code, said in (
        (tmp_path / "other.parquet", 2, "column 'queue_id' is missing"),
        (tmp_path / "of-spark" / "part-0.parquet", 2, "export its index with `tiered-index export`"),
        (tmp_path / "none", 2, "No such file"),
        (tmp_path / "e.csv", 2, "an export are read from Parquet, Arrow and NDJSON"),
    ):
        outcome = run_here("ingest", file, *where)
        assert outcome.code == code and said in outcome.error["message"], outcome.err
    assert not (tmp_path / "r").exists()


def test_topics_sums_entries_bytes_and_cost(run_here, original):
    line = ("topics", "--root", original.root, "--json", "--by")
    by = {name: done(run_here(*line, name)) for name in ("topic", "state", "topic,day,state")}
    files = done(run_here("files", "--root", original.root, "--json"))
    totals = by["topic,day,state"]["totals"]
    assert (totals["entries"], totals["bytes"]) == (2 * MESSAGES, files["totals"]["bytes"])
    entries = {row["topic"]: row["entries"] for row in by["topic"]["rows"]}
    assert entries == {name: 2 * n for name, n in Counter(message(n)["topic"] for n in range(MESSAGES)).items()}
    states = {row["state"]: row for row in by["state"]["rows"]}
    assert (states["unsealed"]["entries"], states["unsealed"]["usd_a_month"]) == (200, 0)
    assert states["uploaded"]["usd_a_month"] == pytest.approx(states["uploaded"]["bytes"] / 2**30 * 0.023)
    assert "2023-11-14" in run_here("topics", "--by", "day", "--root", original.root).out


def test_a_root_is_exported_without_its_storage_and_names_the_missing_files(run_here, damaged, tmp_path):
    made, out = damaged, tmp_path / "e.parquet"
    whole = done(run_here("export", "--root", made.root, "--out", tmp_path / "whole.parquet", "--json"))
    made.store.rename(tmp_path / "lost")
    report = done(run_here("export", "--root", made.root, "--out", out, "--json"))
    assert (report["entries"], report["checksum"], report["missing"]) == (whole["entries"], whole["checksum"], [])
    assert "is it mounted?" in report["not_asked"] and whole["not_asked"] is None
    by_topic = ("topics", "--by", "topic", "--root", made.root)
    assert "is it mounted?" in done(run_here(*by_topic, "--json"))["not_asked"]
    assert "the storage could not be read" in run_here(*by_topic).out
    # begun again from the root
    new = ("--root", tmp_path / "new", "--storage", f"file://{tmp_path}/new-store", *GEOMETRY)
    back = done(run_here("ingest", out, *new, "--wait", "--json"))
    assert back["checksum"] == whole["checksum"]
    assert back["not_taken"] == ["positions", "tombstones", "horizons"]
    made.files("uploaded")[0].unlink()
    short = run_here("export", "--root", made.root, "--out", tmp_path / "short.parquet", "--json")
    assert (short.code, short.document["status"], len(short.document["missing"])) == (6, "partial", 1)
    with IndexReader.open(root=made.root) as reader, pytest.raises(PartialAnswer, match="cannot export 1 objects"):
        reader.export()


def test_an_export_to_stdout_that_fails_has_no_end(damaged):
    path = damaged.objects()[-1]
    flip(path, path.stat().st_size // 4)
    command = [SCRIPT, "export", "--storage", damaged.uri, "--out", "-", "--format", "parquet"]
    failed = subprocess.run(command, capture_output=True, env=clean_environment(), check=False)
    assert failed.returncode == 4, failed.stderr
    # the mark is at the begin and at the end of a whole file
    assert failed.stdout.count(b"PAR1") < 2


def test_messages_with_a_column_that_is_called_key_hash_are_messages(run_here, tmp_path):
    line = {"topic": "t", "queue_id": 0, "offset": 1, "size": 1, "timestamp_ms": 1_700_000_000_000}
    (path := tmp_path / "orders.ndjson").write_text(json.dumps(line | {"order": "o-1", "key_hash": "mine"}) + "\n")
    where = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/store", "--slots", 10, "--items", 100)
    assert run_here("ingest", path, "--column", "key=order", *where).code == 0
    assert len(run_here("query", "t", "o-1", "--root", tmp_path / "root", "--json").document["items"]) == 1


def test_others_open_it_as_a_table(exported, tmp_path):
    exported("entries.parquet")
    exported("entries.ndjson", "--format", "ndjson")
    sums = "SELECT count(*), sum(size), min({}), count(DISTINCT key_hash) FROM "
    own = 2 * sum(message(n)["size"] for n in range(MESSAGES))
    keys = {(message(n)["topic"], key) for n in range(MESSAGES) for key in message(n)["keys"]}
    wanted = (2 * MESSAGES, own, BEGIN_MS, len({hash_key(*topic_and_key) for topic_and_key in keys}))
    with duckdb.connect() as database:
        # a table has times, JSON has numbers
        for name, time_ms in (("entries.parquet", "epoch_ms(timestamp_ms)"), ("entries.ndjson", "timestamp_ms")):
            assert database.sql(f"{sums.format(time_ms)} '{tmp_path / name}'").fetchone() == wanted
        select = f"SELECT DISTINCT \"offset\" FROM '{tmp_path}/entries.parquet' WHERE topic = ? AND key_hash = ?"
        rows = database.execute(f"{select} ORDER BY 1", ["orders", hash_key("orders", "k7")]).fetchall()
        offsets = [offset for (offset,) in rows]
        assert offsets == sorted(expected_offsets("orders", "k7"))
    frame = pd.read_parquet(tmp_path / "entries.parquet")
    assert (len(frame), int(frame["size"].sum())) == wanted[:2]
    assert list(frame.columns) == COLUMNS
