"""One damaged file, row or key never stops the others: what can be read is indexed, and the rest is named."""

import bz2
import functools
import gzip
import lzma
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tests.unit.cli.test_linked_files import BEGIN_S, SIZES, as_lines
from tiered_index import IndexReader
from tiered_index.format.names import linked_store

FIELDS = ("--topic", "t", "--key", "k", "--time", "at")


def rows(begin, end, key="k"):
    return [{key: f"{n}", "at": BEGIN_S + n} for n in range(begin, end)]


def lines(begin, end, key="k"):
    return as_lines(rows(begin, end, key))


def parquet(path, table, at_once=20, **more):
    pq.write_table(pa.Table.from_pylist(table) if isinstance(table, list) else table, path, at_once, **more)
    return path.read_bytes()


def zstd(data):
    return pa.compress(data, "zstd", asbytes=True)


@pytest.fixture
def folder(tmp_path):
    (folder := tmp_path / "logs").mkdir()
    return folder


@pytest.fixture
def where(tmp_path):
    return "--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects"


@pytest.fixture
def ingest(where):
    return lambda *arguments, fields=FIELDS: run_here("ingest", *arguments, *fields, *where, *SIZES, "--json")


@pytest.fixture
def found_keys(where):
    """Return a function that returns those of some keys that have one row, which comes back, and no other."""

    def run(keys):
        there = set()
        for key in map(str, keys):
            answer = run_here("query", "t", key, "--messages", *where, "--json").document["messages"]
            assert len(answer) <= 1 and all(each["state"] == "local" for each in answer), answer
            there |= {key} if answer else set()
        return there

    return run


def cut(data, part=0.5):
    return data[: int(len(data) * part)]


def of_random(begin, end):
    """Rows that pack badly, so that a part of the packed bytes has many of them."""
    return as_lines([row | {"pad": os.urandom(30).hex()} for row in rows(begin, end)])


def half_of(pack):
    """Return a packed file that is cut off."""
    return lambda path: cut(pack(of_random(1000, 9000)))


def with_a_damaged_group(path):
    data = bytearray(parquet(path, [{"k": f"{n}" * 3, "at": BEGIN_S + n} for n in range(1000, 1060)], compression=None))
    at = data.index(b"102710271027")
    data[at - 4 : at] = b"\xff\xff\xff\x7f"
    return bytes(data)


# the bytes of a file, some keys that are found in it, some that are not, the reason, and the position
CASES = {
    "a.gz": (half_of(gzip.compress), (1000, 2000), (8999,), "damaged gzip file: .*", "row"),
    "b.bz2": (
        half_of(functools.partial(bz2.compress, compresslevel=1)),
        (1000,),
        (8999,),
        "damaged bzip2 file: it is cut off",
        "row",
    ),
    "c.xz": (half_of(lzma.compress), (1000, 2000), (8999,), "damaged xz file: it is cut off", "row"),
    "d.zst": (half_of(zstd), (1000, 2000), (8999,), "damaged zstd file: .*", "row"),
    "e.parquet": (
        lambda path: cut(parquet(path, rows(1000, 1100))),
        (),
        (1000,),
        "not a Parquet file that can be read.*",
        None,
    ),
    "f.parquet": (
        lambda path: parquet(path, [{"k": "1000", "n": 1}]),
        (),
        (1000,),
        ".*has no column for --time at; it has k, n",
        None,
    ),
    "g.json": (
        lambda path: b'[{"k": "1000", "at": 5}]\n',
        (),
        (1000,),
        r".*is a JSON array: write one object a line.*jq -c.*",
        None,
    ),
    "h.txt": (lambda path: b"plain words\n", (), (), ".*is neither NDJSON nor CSV, Parquet or Arrow.*", None),
    "i.csv": (lambda path: b"k,n\n1000,1\n", (), (1000,), ".*has no column for --time at; it has k, n", None),
    "j.log": (lambda path: lines(1000, 1003).decode().encode("utf-16"), (), (1000,), ".*is UTF-16.*iconv.*", None),
    "k.zst": (lambda path: zstd(b""), (), (), None, None),
}


def indexed(where):
    with IndexReader.open(where[3]) as reader:
        return list(reader.segments().of_log(linked_store("t", 0)))


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_named_and_stops_no_other(folder, where, ingest, found_keys, name):
    make, there, absent, reason, position = CASES[name]
    for good, (begin, end) in {"a-first.log": (0, 30), "z-last.log": (30, 60)}.items():
        (folder / good).write_bytes(lines(begin, end))
    data = make(folder / name)
    (folder / name).write_bytes(data)
    uri = (folder / name).as_uri()
    done = ingest(folder, "--wait")
    document = done.document
    assert done.code == (1 if reason else 0), done.err
    assert [each["file"] for each in document["damaged_first"]] == ([uri] if reason else [])
    for each in document["damaged_first"]:
        assert re.fullmatch(reason, each["reason"]), each
        assert document["damaged"] == 1 and (position == "row" or each["position"] == position)
        if position == "row":
            # the byte behind the last row that is indexed
            assert each["position"] == sum(segment.length for segment in indexed(where) if segment.uri == uri) > 0
    assert found_keys((0, 29, 30, 59, *there, *absent)) == {*map(str, (0, 29, 30, 59, *there))}
    again = ingest(folder)
    assert (again.code, again.document["read_files"], again.document["damaged"]) == (0, 0, 0)
    assert again.document["known"] == len(document["damaged_first"]) + 2
    assert [each["file"] for each in again.document["known_damaged_first"]] == ([uri] if reason else [])
    strict = run_here(
        "ingest", folder, *FIELDS, "--strict", "--storage", f"file://{folder}/../strict", *SIZES, "--json"
    )
    assert (strict.code in (2, 4), uri.removeprefix("file://") in strict.err) == (bool(reason),) * 2
    # the next run looks at it again if it has changed
    (folder / name).write_bytes(lines(5000, 5010))
    mended = ingest(folder)
    assert (mended.code, mended.document["rows"], mended.document["known_damaged"]) == (0, 10, 0), mended.err
    assert found_keys((5000, 5009)) == {"5000", "5009"}
    assert not any(segment.is_unread for segment in indexed(where))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3] and not case[1]])
def test_files_of_which_nothing_can_be_read_are_an_error(folder, ingest, name):
    (folder / name).write_bytes(CASES[name][0](folder / name))
    done = ingest(folder)
    assert done.code == (4 if name.endswith("parquet") and "footer" in done.err else done.code) and done.code in (2, 4)
