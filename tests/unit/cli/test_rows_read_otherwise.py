"""Known files whose rows a run is to read in another way, or that have moved meanwhile, also to folders of others."""

import json

import pytest

from tests.integration.cli.command_lines import run_here
from tests.support.file_logs import BEGIN_S
from tests.unit.cli.test_added_keys import times_of_rows
from tiered_index.connectors.files.rows import text as rows_of_text


def write(path, numbers, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"a": "x", "at": f"2026-07-01T12:00:{n:02}", "n": n} | more for n in numbers)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def states(where, topic, key):
    done = run_here("query", topic, key, "--messages", "--all", *where, "--json")
    return sorted(
        (record["item"]["file"].rpartition("/")[2], record["state"]) for record in done.records if "state" in record
    )


TIMES = ("--topic", "t", "--key", "a", "--time", "at")


@pytest.mark.parametrize("then", ["plainly", "with another file", "with a key"])
def test_a_file_that_was_renamed_is_read_in_another_way_under_its_new_name(tmp_path, where, ingest, then):
    folder = tmp_path / "logs"
    write(folder / "b.ndjson", range(10))
    ingest(f"{folder}/", "--time-zone", "Europe/Berlin", of=TIMES)
    (folder / "b.ndjson").rename(folder / "bb.ndjson")
    told = ingest(f"{folder}/", "--time-zone", "UTC", of=TIMES)
    assert (len(told["reread"]), told["otherwise"], told["rows"]) == (1, [], 10)
    utc = {n: 1782907200000 + n * 1000 for n in range(10)}
    assert times_of_rows(where) == utc
    if then == "plainly":
        (folder / "bb.ndjson").rename(folder / "b.ndjson")
        assert ingest(f"{folder}/", of=TIMES)["known"] == 1
        assert states(where, "t", "x") == [("b.ndjson", "local")] * 10
    elif then == "with another file":
        (folder / "b.ndjson").write_bytes((folder / "bb.ndjson").read_bytes())
        ingest(f"{folder}/", of=TIMES)
        assert states(where, "t", "x") == [("b.ndjson", "local")] * 10 + [("bb.ndjson", "local")] * 10
    else:
        ingest(f"{folder}/", "--key", "n", of=TIMES)
        assert states(where, "t", "7") == [("bb.ndjson", "local")] and times_of_rows(where) == utc


@pytest.mark.parametrize("used", ["key", "topic", "time", "nothing"])
def test_a_file_in_another_partition_has_the_fields_of_that_one(tmp_path, where, ingest, used):
    folder, moved = tmp_path / "logs", tmp_path / "logs/day=2026-01-02/a.ndjson"
    write(folder / "day=2026-01-01/a.ndjson", range(10))
    moved.parent.mkdir()
    of = {
        "key": (*TIMES, "--key", "day"),
        "topic": ("--topic", "field:day", "--key", "a", "--time", "at"),
        "time": ("--topic", "t", "--key", "a", "--time", "day"),
        "nothing": TIMES,
    }[used]
    ingest(f"{folder}/", of=of)
    (folder / "day=2026-01-01/a.ndjson").rename(moved)
    told = ingest(f"{folder}/", of=of)
    if used == "nothing":
        assert (told["rows"], told["known"]) == (0, 1)
        assert states(where, "t", "x") == [("a.ndjson", "local")] * 10
        return
    assert told["rows"] == 10
    local, gone = [("a.ndjson", "local")] * 10, [("a.ndjson", "missing")] * 10
    if used == "key":
        assert (states(where, "t", "2026-01-02"), states(where, "t", "2026-01-01")) == (local, gone)
    elif used == "topic":
        assert (states(where, "2026-01-02", "x"), states(where, "2026-01-01", "x")) == (local, gone)
    else:
        second_day = ("--begin", "2026-01-02", "--end", "2026-01-03")
        done = run_here("query", "t", "x", *second_day, "--messages", "--all", *where, "--json")
        assert [record["state"] for record in done.records if "state" in record] == ["local"] * 10
    assert ingest(f"{folder}/", of=of)["known"] == 1


def test_another_field_of_topics_is_that_of_all_rows(tmp_path, where, ingest):
    write(tmp_path / "a.ndjson", range(10), first="one", second="two")
    of = ("--key", "a", "--time", "at", "--topic")
    ingest(tmp_path / "a.ndjson", of=(*of, "field:first"))
    told = ingest(tmp_path / "a.ndjson", of=(*of, "field:second"))
    assert (told["rows"], len(told["reread"])) == (10, 1)
    assert states(where, "two", "x") == [("a.ndjson", "local")] * 10 and states(where, "one", "x") == []
    assert ingest(tmp_path / "a.ndjson", of=(*of, "field:second"))["known"] == 1


def test_another_quote_is_that_of_all_rows(tmp_path, where, ingest):
    (file := tmp_path / "a.csv").write_text(f"k,at\n'x,y',{BEGIN_S}\n'z',{BEGIN_S + 1}\n")
    of = ("--topic", "t", "--key", "k", "--time", "at")
    ingest(file, of=of, code=1)
    assert ingest(file, "--quote", "'", of=of)["rows"] == 2
    assert [states(where, "t", key) for key in ("x,y", "z", "'z'")] == [[("a.csv", "local")], [("a.csv", "local")], []]
    for options in (("--quote", "'"), ("--quote", "'", "--delimiter", ","), ()):
        assert ingest(file, *options, of=of)["known"] == 1


def test_a_run_that_reads_only_rows_with_copies_is_no_failure(tmp_path, where, ingest, monkeypatch):
    """It said that none of the rows has a key, and ended with 1."""
    monkeypatch.setattr(rows_of_text, "SUM_BYTES", 256)
    rows = range(60)
    write(file := tmp_path / "a.ndjson", rows)
    ingest(file, "--archive", of=TIMES)
    write(file, [n for n in rows if n != 30])
    told = ingest(file, "--archive", of=TIMES)
    assert told["nothing_indexed"] == [] and len(times_of_rows(where)) == 60


def test_a_file_of_several_segments_is_one_file_that_is_read_for_a_new_key(tmp_path, where, ingest):
    write(file := tmp_path / "a.ndjson", range(5))
    ingest(file, of=TIMES)
    write(file, range(10))
    ingest(file, of=TIMES)
    told = ingest(file, "--key", "n", of=TIMES)
    assert (told["keys"]["files"], told["keys"]["entries"]) == (1, 10)
