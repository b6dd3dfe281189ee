"""A run that read messages and indexed none of them ended with 0, and did not say why."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tests.support.store_writer import StoreWriter

MESSAGE = {"topic": "t", "queue_id": 0, "size": 1, "timestamp_ms": 1_700_000_000_000}


@pytest.fixture
def ingest(tmp_path):
    def run(source, *options, root="root"):
        where = ("--root", tmp_path / root, "--storage", (tmp_path / f"storage of {root}").as_uri(), "--json")
        return run_here("ingest", source, *where, *options)

    return run


def ndjson(path, *keys, **more):
    """Write one message for each JSON text of a key."""
    head = json.dumps(MESSAGE | more)[:-1]
    path.write_text("".join(f'{head}, "offset": {n}, "key": {key}}}\n' for n, key in enumerate(keys)))
    return path


def offsets(tmp_path, key):
    done = run_here("query", "--root", tmp_path / "root", "--json", "--", "t", key)
    return [item["offset"] for item in done.document["items"]]


def parquet(path, *keys):
    pq.write_table(pa.Table.from_pylist([MESSAGE | {"offset": n, "key": key} for n, key in enumerate(keys)]), path)
    return path


def csv(path, *keys):
    rows = [[*map(str, MESSAGE.values()), str(n), key] for n, key in enumerate(keys)]
    path.write_text("\n".join(",".join(row) for row in [[*MESSAGE, "offset", "key"], *rows, []]))
    return path


@pytest.mark.parametrize(
    ("write", "name"), [(ndjson, "m.ndjson"), (parquet, "m.parquet"), (csv, "m.csv")], ids=["NDJSON", "Parquet", "CSV"]
)
def test_an_empty_key_is_none_in_each_kind_of_file(ingest, tmp_path, write, name):
    empty, plain = ('""', '"k"') if write is ndjson else ("", "k")
    done = ingest(write(tmp_path / name, empty, plain, empty))
    assert (done.code, done.document["messages"], done.document["entries"]) == (0, 3, 1), done.err
    assert (offsets(tmp_path, "k"), done.document["nothing_indexed"]) == ([1], [])
    nothing = ingest(write(tmp_path / f"none.{name}", empty, empty))
    assert (nothing.code, nothing.document["nothing_indexed"]) == (1, ["of 2 messages, 2 have no key or keys"])
    assert ingest(tmp_path / f"none.{name}").code == 0  # nothing was read
    assert ingest(tmp_path / f"none.{name}", "--restart", "--allow-none").code == 0


def test_messages_that_were_all_skipped_are_none(ingest, tmp_path):
    done = ingest(ndjson(tmp_path / "m.ndjson", '"k"', '"k"', size=-1), "--skip-bad")
    assert (done.code, done.document["nothing_indexed"]) == (1, ["of 2 messages, 2 are invalid, and were skipped"])


def test_a_store_of_which_nothing_is_chosen(ingest, tmp_path):
    with StoreWriter(tmp_path / "store") as store:
        store.put("orders", 0, keys="k")
        store.put("orders", 0)
        store.put("rmq_sys_trace", 0, keys="k")
    with StoreWriter(tmp_path / "own") as store:
        store.put("rmq_sys_trace", 0, keys="k")
    reasons = ["of 3 messages, 3 are of topics that are not selected (--topics ordres)"]
    for number, (store, options, expected) in enumerate(
        [("store", ("--topics", "ordres"), (1, reasons)), ("store", (), (0, [])), ("own", (), (0, []))]
    ):
        done = ingest(tmp_path / store, *options, root=f"root{number}")
        assert (done.code, done.document["nothing_indexed"]) == expected, done.err


@pytest.mark.parametrize("write", [ndjson, parquet])
def test_a_first_file_with_a_bad_first_message_makes_no_index(ingest, tmp_path, write):
    (tmp_path / "files").mkdir()
    bad = write(tmp_path / "files" / f"m.{write.__name__}", '"k"' if write is ndjson else "k")
    done = ingest(bad, "--column", "offset=place")
    assert done.code == 2 and bad.name in done.error["message"], done.err
    assert list(tmp_path.iterdir()) == [bad.parent]
    assert ingest(bad).code == 0


def test_numbers_that_are_keys_keep_their_text(ingest, tmp_path):
    written = ["10.50", "12345678901234567.25", "12345678901234567.75", "-0", "1E+3", "4711"]
    assert ingest(ndjson(tmp_path / "m.ndjson", *written, '["a", 1.50]')).code == 0
    assert [offsets(tmp_path, key) for key in written] == [[n] for n in range(len(written))]
    assert offsets(tmp_path, "1.50") == offsets(tmp_path, "a") == [len(written)]
    file_of_keys = tmp_path / "asked.ndjson"
    file_of_keys.write_text("".join(f'{{"topic": "t", "key": {key}}}\n' for key in written))
    done = run_here("query", "--keys", file_of_keys, "--root", tmp_path / "root", "--json")
    assert [row["offset"] for row in done.records[:-1]] == list(range(len(written)))
