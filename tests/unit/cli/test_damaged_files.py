"""One damaged file, row or key never stops the others: what can be read is indexed, and the rest is named."""

import bz2
import functools
import gzip
import itertools
import json
import lzma
import os
import re
import shutil
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here, running
from tests.support.hanging import until
from tests.unit.cli.test_linked_files import BEGIN_S, SIZES, as_lines, serve_s3
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.connectors.files import listing
from tiered_index.connectors.files.linked import FileLinker
from tiered_index.connectors.files.listing import listed_files
from tiered_index.connectors.files.rows import text as rows_of_text
from tiered_index.connectors.files.rows.mapping import RowMapping
from tiered_index.connectors.files.rows.places import LocalFile
from tiered_index.connectors.follow import PatientPut
from tiered_index.errors import InvalidArgument, ObjectNotFound
from tiered_index.format.names import linked_store
from tiered_index.storage.opening import open_storage

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


@pytest.mark.parametrize(
    ("name", "code"), [("e.parquet", 4), ("g.json", 2), ("cut.gz", 4), ("zeros.log", 2), ("bad.log", 2)]
)
def test_files_of_which_nothing_can_be_read_are_an_error(folder, ingest, name, code):
    """Damage is one, and another form, or rows that are none, a wrong call."""
    more = {"zeros.log": bytes(9000) + b"\n", "bad.log": b"{broken\n" * 9}
    more["cut.gz"] = cut(gzip.compress(of_random(0, 100)), 0.01)
    (folder / name).write_bytes(more[name] if name in more else CASES[name][0](folder / name))
    assert ingest(folder).code == code


def test_of_ten_thousand_files_the_damaged_ones_alone_are_lacking(folder, ingest, found_keys, monkeypatch):
    for number in range(10_000):
        (folder / f"{number:05}.log").write_bytes(lines(number, number + 1))
    for number, data in (
        (0, b"\x00\x01binary\n"),
        (5000, cut(gzip.compress(of_random(0, 50)), 0.02)),
        (9999, b"[1]\n"),
    ):
        (folder / f"{number:05}.log").write_bytes(data)
    done = ingest(folder)
    assert done.code == 1, done.err
    assert (done.document["rows"], done.document["damaged"], done.document["read_files"]) == (9_997, 3, 9_997)
    assert [each["file"][-9:] for each in done.document["damaged_first"]] == ["00000.log", "05000.log", "09999.log"]
    assert found_keys((0, 1, 4999, 5000, 5001, 9998, 9999)) == {"1", "4999", "5001", "9998"}
    opened, open_file = [], LocalFile.open

    def noted(self):
        opened.append(self.path)
        return open_file(self)

    for name in ("open", "ranges", "ahead"):
        monkeypatch.setattr(LocalFile, name, noted)
    again = ingest(folder)
    assert (again.code, again.document["read_files"], again.document["known"]) == (0, 0, 10_000)
    # the fields are looked for in the heads of some files
    assert len({*opened}) <= 3 and again.document["known_damaged"] == 3


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
def test_a_line_that_is_too_long_is_one_bad_row(folder, where, ingest, found_keys, monkeypatch, pack):
    """Also if it is longer than the offsets that were reserved, and in one of several blocks."""
    for name, value in (("MAX_ROW_BYTES", 3000), ("BLOCK_BYTES", 1000), ("_LEAST_BOUND", 8000), ("_RATIO", 0)):
        monkeypatch.setattr(rows_of_text, name, value)
    text = lines(0, 20) + b'{"k": "99", "pad": "' + b"x" * 40_000 + b'"}\n' + lines(20, 60)
    (folder / "a.log").write_bytes(pack(text))
    done = ingest(folder)
    assert (done.code, done.document["rows"], done.document["skipped"], done.document["damaged"]) == (1, 60, 1, 0)
    (bad,) = done.document["skipped_first"]
    assert f"line 21 (byte {len(lines(0, 20)):,})" in bad["where"] and "is longer than 3,000 bytes" in bad["problem"]
    assert found_keys(range(60)) == {*map(str, range(60))} and found_keys([99]) == set()
    segments = indexed(where)
    assert sum(segment.length for segment in segments) == len(text) and not any(each.is_open for each in segments)
    # lines behind it have their numbers
    answer = run_here("query", "t", "59", "--messages", *where, "--json").document["messages"]
    assert answer[0]["message"]["line"] == 61


def test_a_long_line_without_an_end_is_read_when_it_has_one(folder, where, ingest, found_keys, monkeypatch):
    for name, value in (("MAX_ROW_BYTES", 3000), ("BLOCK_BYTES", 1000)):
        monkeypatch.setattr(rows_of_text, name, value)
    log, begin = folder / "a.log", lines(0, 20) + b'{"k": "99", "pad": "' + b"x" * 9000
    log.write_bytes(begin)
    first = ingest(folder)
    assert (first.code, first.document["rows"], first.document["held_back"]) == (0, 20, [log.as_uri()])
    log.write_bytes(begin + b'"}\n' + lines(20, 30))
    second = ingest(folder)
    assert (second.code, second.document["rows"], second.document["skipped"]) == (1, 10, 1)
    assert found_keys(range(30)) == {*map(str, range(30))}


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gzip", "bzip2", "xz"])
def test_rows_of_a_packed_file_without_its_last_bytes_come_back(folder, ingest, found_keys, pack):
    """Also of a file that was whole: a run names it once."""
    whole = {"a": pack(lines(0, 400)), "b": pack(lines(400, 800))}
    keys = [0, 200, 399, 400, 600, 799]
    (folder / "a").write_bytes(whole["a"][:-6])
    (folder / "b").write_bytes(whole["b"])
    cut_b, a, b = ("b", whole["b"][:-6]), ("a", whole["a"]), ("b", whole["b"])
    for damaged, known, written in ((1, 0, cut_b), (1, 1, None), (0, 2, a), (0, 1, b), (0, 0, None)):
        run = ingest(folder)
        counts = run.document
        assert (run.code, counts["damaged"], counts["known_damaged"]) == (damaged, damaged, known)
        assert all("damaged" in each["reason"] for each in counts["damaged_first"])
        assert found_keys(keys) == {*map(str, keys)}
        if written is not None:
            (folder / written[0]).write_bytes(written[1])


@pytest.mark.parametrize("zeros", [1, 5000, 200_000])
@pytest.mark.parametrize("at", [0, 20])
def test_bytes_that_are_0_after_a_truncation_hide_no_row(folder, ingest, found_keys, monkeypatch, zeros, at):
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 30_000)
    monkeypatch.setattr(rows_of_text, "MAX_ROW_BYTES", 60_000)
    (folder / "a.log").write_bytes(lines(0, at) + bytes(zeros) + lines(at, 40))
    done = ingest(folder)
    assert (done.code, done.document["rows"]) == (1, 40)
    assert f"(byte {len(lines(0, at)):,})" in done.document["skipped_first"][0]["where"]
    assert found_keys(range(40)) == {*map(str, range(40))}


def test_rows_of_csv_behind_bytes_that_are_0_have_their_own_keys(folder, ingest, found_keys):
    (folder / "a.csv").write_bytes(f"k,at\n1,{BEGIN_S}\n".encode() + bytes(9) + f"2,{BEGIN_S}\n".encode())
    done = ingest(folder)
    assert (done.code, done.document["entries"], found_keys((1, 2))) == (1, 2, {"1", "2"})


def test_a_damaged_row_group_is_passed_over(folder, ingest, found_keys):
    data = bytearray(parquet(folder / "a.parquet", rows(1000, 1060), write_page_checksum=True, compression=None))
    at = data.index(b"1025")
    data[at] ^= 1
    (folder / "a.parquet").write_bytes(data)
    done = ingest(folder)
    assert (done.code, done.document["rows"]) == (1, 40), done.err
    (damage,) = done.document["damaged_first"]
    assert damage["position"] == 20 and "row group 1 can't be read" in damage["reason"]
    assert found_keys(range(1000, 1060)) == {*map(str, (*range(1000, 1020), *range(1040, 1060)))}


LATER = [{"k": f"{n}", "at": BEGIN_S + n} for n in range(5000)] + [{"k": "5000", "b": "late", "at": BEGIN_S}]
KEYS = ("--topic", "t", "--key", "k", "--key", "b", "--time", "at")


@pytest.mark.parametrize(
    ("files", "keys", "lacking"),
    [
        ({"1.log": as_lines(LATER)}, ["5000", "late"], {}),
        ({"1.log": lines(0, 5), "2.log": as_lines([{"k": "8", "b": 7, "at": BEGIN_S}])}, ["0", "8", "7"], {"b": 1}),
        ({"1.csv": f"k,at\n1,{BEGIN_S}\n".encode(), "2.csv": f"k,b,at\n2,x,{BEGIN_S}\n".encode()}, "12x", {"b": 1}),
        ({"1.parquet": rows(1, 2), "2.parquet": [{"k": "2", "b": 9, "at": BEGIN_S}]}, "129", {"b": 1}),
        # columns of another type
        ({"1.parquet": [{"k": "1", "b": {"c": 1}, "at": BEGIN_S}],
          "2.parquet": [{"k": 2, "b": "x", "at": "2024-01-02"}]}, "12x", {"b": 1}),
        ({"1.parquet": pa.table({"k": ["1"], "b": pa.nulls(1), "at": [BEGIN_S]}), "2.parquet": rows(2, 3)}, "12",
         {"b": 2}),
        ({"b=x/1.log": lines(1, 2), "b=__HIVE_DEFAULT_PARTITION__/2.parquet": rows(2, 3)}, "12x", {"b": 1}),
        # the first line of the first file is a half
        ({"1.log": b'"at": 5}\n' + as_lines([{"k": "1", "b": "x", "at": BEGIN_S}])}, "1x", {}),
    ],
)  # fmt: skip
def test_keys_that_some_rows_or_files_lack_are_counted(folder, ingest, found_keys, files, keys, lacking):
    for name, data in files.items():
        (path := folder / name).parent.mkdir(exist_ok=True)
        if isinstance(data, bytes):
            path.write_bytes(data)
        else:
            parquet(path, data)
    done = ingest(folder, fields=KEYS)
    assert done.code == (1 if b'"at": 5}' in files.get("1.log", b"")[:9] or done.document["skipped"] else 0), done.err
    assert (done.document["lacking"], found_keys(keys)) == (lacking, {*keys})
    assert done.document["damaged"] == 0


def test_a_key_that_no_file_has_is_an_error_unless_the_topic_has_it(folder, where, ingest):
    (folder / "1.log").write_bytes(lines(0, 9000))
    done = ingest(folder, fields=KEYS)
    assert done.code == 2 and "has --key b; the first one has k, at" in done.err and not where[1].exists()
    (folder / "2.log").write_bytes(as_lines([{"k": "1", "b": "x", "at": BEGIN_S}]))
    assert ingest(folder, fields=KEYS).code == 0
    (folder / "2.log").unlink()
    (folder / "3.log").write_bytes(lines(0, 3))
    done = ingest(folder, fields=KEYS)
    assert (done.code, done.document["lacking"], "--key b: 1 of 1 file" in done.err) == (0, {"b": 1}, True)


def test_sources_without_a_file_beside_others_are_counted(folder, where, ingest):
    (folder / "empty").mkdir()
    (folder / "empty.log").touch()
    (folder / "a.log").write_bytes(lines(0, 3))
    beside = (folder / "empty", folder / "empty.log", f"{folder}/*.nothing", f"{folder.as_uri()}/no*.csv")
    done = ingest(folder / "a.log", *beside)
    assert (done.code, done.document["rows"], done.document["empty_sources"]) == (0, 3, 4), done.err
    assert "no file that has data: " in done.err and "*.nothing" in done.err
    for source in beside:
        assert ingest(source).code == 2
    done = ingest(folder / "a.log", folder / "gone.log", folder / "empty")
    assert (done.code, done.document["empty_sources"]) == (0, 2), done.err
    assert done.document["missing_sources"] == [str(folder / "gone.log")]
    assert f"no such file or folder: {folder}/gone.log\n" in done.err and f"has data: {folder}/empty\n" in done.err
    for sources in ([folder / "gone.log"], [folder / "gone.log", f"{folder.as_uri()}/gone"]):
        done = ingest(*sources)
        assert (done.code, "gone.log: No such file or directory" in done.err) == (2, True)


def test_files_that_vanish_or_can_not_be_opened_stop_no_other(folder, ingest, found_keys, monkeypatch):
    for number, name in enumerate("abc"):
        (folder / f"{name}.log").write_bytes(lines(number, number + 1))
    raw = os.fsencode(folder) + b"/d\xff.log"
    with open(raw, "wb") as file:
        file.write(lines(3, 4))
    local_file, open_file = listing.local_file, LocalFile.open

    def vanishing(path):
        if path.name == "a.log":
            path.unlink()
        return local_file(path)

    def denied(self):
        if self.path.name == "b.log":
            raise InvalidArgument(f"{self.path}: Permission denied") from PermissionError()
        return open_file(self)

    with monkeypatch.context() as patched:
        patched.setattr(listing, "local_file", vanishing)
        patched.setattr(LocalFile, "open", denied)
        for name in ("ranges", "ahead"):
            patched.setattr(listing.PinnedFile, name, denied)
        done = ingest(folder)
    assert (done.code, done.document["vanished"], done.document["rows"]) == (1, 1, 1), done.err
    reasons = sorted(each["reason"] for each in done.document["damaged_first"])
    assert len(reasons) == 2 and "Permission denied" in reasons[0] and "is not UTF-8" in reasons[1]
    # it is no fault of the file
    again = ingest(folder)
    assert (again.code, again.document["rows"], found_keys((1, 2))) == (1, 1, {"1", "2"})


def test_objects_that_a_bucket_lists_and_does_not_have_stop_no_other(ingest, found_keys, monkeypatch, s3_environment):
    serve_s3(monkeypatch, s3_environment)
    uri = f"s3://{s3_environment.new_bucket()}/logs"
    with open_storage(uri, any_names=True) as bucket:
        for number, name in enumerate("abc"):
            bucket.put(f"x/{name}.log", lines(number, number + 1))
        bucket.put("x/", b"a folder")
        kind = type(bucket)
    get_range = kind.get_range

    def lying(self, name, start, length):
        if name.endswith("x/b.log"):
            raise ObjectNotFound(name)
        return get_range(self, name, start, length)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "get_range", lying)
        done = ingest(f"{uri}/**/*")
    assert (done.code, done.document["rows"]) == (1, 2), done.err
    files = {each["file"].removeprefix(uri): each["reason"] for each in done.document["damaged_first"]}
    assert "no object" in files["/x/b.log"] and files.keys() - {"/x/b.log"} <= {"/x", "/x/"}
    again = ingest(f"{uri}/**/*")
    assert (again.document["rows"], found_keys((0, 1, 2))) == (1, {"0", "1", "2"})


def test_a_follower_reads_a_packed_file_once_it_is_whole_or_stands_still(tmp_path, folder, found_keys, where):
    """A file of which the end comes later has its rows once, at the same offsets."""
    packed, now_s = gzip.compress(of_random(0, 4000)), itertools.count(0, 20)
    torn, whole = folder / "a.gz", folder / "b.gz"
    whole.write_bytes(gzip.compress(lines(5000, 5010)))
    torn.write_bytes(cut(packed, 0.3))
    config = IndexConfig(root=where[1], storage=where[3], slots=32, items=1000)
    with IndexService(config) as index:
        mapping, clock = RowMapping(("k",), "at", "s"), lambda: next(now_s)
        linker = FileLinker(index, "t", mapping, PatientPut(index, 10.0), still_s=60.0, clock_s=clock)

        def look():
            with listed_files([str(folder)], config) as files:
                linker.run(files)
            return linker.counts.rows, linker.counts.damaged

        assert look() == (10, 0)
        torn.write_bytes(cut(packed, 0.5))
        assert [look() for _ in range(2)] == [(10, 0)] * 2
        while (state := look()) == (10, 0):
            pass
        assert 10 < state[0] < 4010 and state[1] == 1
        torn.write_bytes(packed)
        while look()[0] < 4010:
            pass
        assert look() == (4010, 1)
        index.flush()
    assert found_keys((0, 100, 3999, 5000)) == {"0", "100", "3999", "5000"}


def test_a_follower_names_damaged_files_and_goes_on(folder, where):
    (folder / "a.log").write_bytes(lines(0, 3))
    not_whole = "{} can't be read as a whole".format

    def damage(name):
        (folder / name).write_bytes(b"[1]\n")
        # else it may still be written
        os.utime(folder / name, (BEGIN_S, BEGIN_S))
        return (folder / name).as_uri()

    def named():
        return [
            [damage["file"] for damage in record["damaged_first"]] for record in records() if record["damaged_first"]
        ]

    first = damage("b.json")
    arguments = (folder, *FIELDS, *where, "--follow", "--poll", "0.05", "--json")
    with running("ingest", *map(str, arguments)) as (process, records):
        until(lambda: records() and records()[-1]["rows"] == 3, every_s=0.1)
        # each damaged file is told once, when it is found, and is a problem for as long as it is there
        assert named() == [[first]] and records()[-1]["problems"] == [not_whole("1 file")]
        second = damage("d.json")
        (folder / "c.log").write_bytes(lines(3, 5) + b"[2]\n")
        until(lambda: records()[-1]["rows"] == 5 and records()[-1]["damaged"] == 2, every_s=0.1)
        assert named() == [[first], [second]] and records()[-1]["problems"] == [not_whole("2 files")]
        (bad,) = (bad for record in records() for bad in record["skipped_first"])
        assert bad["where"].startswith((folder / "c.log").as_uri()) and "not a JSON object" in bad["problem"]
        (folder / "b.json").unlink()
        until(lambda: records()[-1]["problems"] == [not_whole("1 file")], every_s=0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
        *looks, document = records()
    assert {look["status"] for look in looks} == {"following"} and document["status"] == "stopped"
    assert (document["rows"], document["damaged"], document["skipped"]) == (5, 2, 1)
    assert [damage["file"] for damage in document["damaged_first"]] == [first, second]


def test_a_follower_tells_once_that_a_file_can_not_be_opened(folder, ingest, monkeypatch):
    for number, name in enumerate("ab"):
        (folder / f"{name}.log").write_bytes(lines(number, number + 1))
    looks, open_file = itertools.count(1), LocalFile.open

    def denied(self):
        if self.path.name != "b.log":
            return open_file(self)
        if next(looks) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        raise InvalidArgument(f"{self.path}: Permission denied") from PermissionError()

    for name in ("open", "ranges", "ahead"):
        monkeypatch.setattr(listing.PinnedFile, name, denied)
    done = ingest(folder, "--follow", "--poll", "0.01")
    *lines_of_looks, document = map(json.loads, done.out.splitlines())
    assert (done.code, document["rows"], document["damaged"]) == (1, 1, 1), done.err
    assert done.err.count("Permission denied") == len(document["damaged_first"]) + 1 == 2
    assert len(lines_of_looks) == 1


def test_damage_behind_rows_of_an_earlier_run_is_no_run_without_rows(folder, ingest, found_keys):
    """Such a run ends with 1: some rows of its only file are there."""
    (folder / "a.ndjson").write_bytes(lines(0, 5))
    assert ingest(folder).code == 0
    with (folder / "a.ndjson").open("ab") as log:
        log.write(b"no row\n")
    done = ingest(folder)
    assert (done.code, done.document["skipped"], done.document["rows"]) == (1, 1, 0)
    assert found_keys(range(6)) == {"0", "1", "2", "3", "4"}


def test_a_row_behind_the_bound_of_a_packed_text_is_found_at_once_and_its_file_counted_once(
    tmp_path, monkeypatch, folder, ingest, found_keys
):
    """A packed text that is long is read in several segments. The first one may have no row with the key."""
    monkeypatch.setattr(rows_of_text, "_LEAST_BOUND", 1 << 16)
    monkeypatch.setattr(rows_of_text, "_RATIO", 1)
    keyless = as_lines({"other": number, "at": BEGIN_S} for number in range(30_000))
    (folder / "a.gz").write_bytes(gzip.compress(keyless + lines(0, 3)))
    done = ingest(folder / "a.gz")
    assert (done.code, done.document["read_files"], done.document["rows"]) == (0, 1, 30_003)
    assert done.document["read_bytes"] == (folder / "a.gz").stat().st_size
    assert found_keys(range(3)) == {"0", "1", "2"}


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_copies_that_can_not_be_read_are_named_and_passed_over(tmp_path, folder, where, ingest, harm):
    for number in range(3):
        (folder / f"{number}.log").write_bytes(lines(number, number + 1))
        assert ingest(folder, "--archive", "--wait").code == 0
    copies = sorted(path for path in (tmp_path / "objects").rglob("*.parquet") if "rows=" in str(path))
    assert len(copies) == 3
    if harm == "gone":
        copies[1].unlink()
    else:
        copies[1].write_bytes(bytes([copies[1].read_bytes()[0] ^ 1]) + copies[1].read_bytes()[1:])
    of_copies = ("ingest", f"archive:{where[3]}", "--root", tmp_path / "root2", "--storage", f"file://{tmp_path}/new")
    done = run_here(*of_copies, "--strict")
    assert done.code == 4 and copies[1].name in done.err
    # it goes on after the first copy
    done = run_here(*of_copies, "--wait")
    assert done.code == 1 and copies[1].name in done.err
    done = run_here(*of_copies[:3], tmp_path / "root3", *of_copies[4:-1], f"file://{tmp_path}/new2", "--json", "--wait")
    (skipped,) = done.document["skipped"]
    counts = (done.document["entries"], done.document["copied"])
    assert (done.code, *counts, copies[1].name in skipped["problem"]) == (1, 2, 2, True), done.err
    shutil.rmtree(folder)
    lost = run_here("query", "t", "1", "--storage", of_copies[-1], "--json").document["lost"]
    assert ["are damaged" in gap["reason"] for gap in lost] == [True]
    answers = [run_here("query", "t", f"{n}", "--storage", of_copies[-1], "--json").document["items"] for n in range(3)]
    assert [len(items) for items in answers] == [1, 0, 1]


def records(begin, end):
    return b"".join(b"%d,%d,z\n" % (n, BEGIN_S + n) for n in range(begin, end))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_quote_that_is_not_closed_is_one_bad_row(folder, ingest, found_keys, pack):
    stray = b'1,%d,"oops\n' % BEGIN_S
    (folder / "a.csv").write_bytes(pack(b"k,at,x\n" + records(0, 1) + stray + records(2, 1000)))
    run = ingest(folder)
    counts = run.document
    assert (run.code, counts["rows"], counts["skipped"], counts["damaged"]) == (1, 999, 1, 0)
    assert counts["skipped_first"][0]["problem"] == "not CSV: a quote is not closed"
    assert "line 3 (" in counts["skipped_first"][0]["where"]
    assert found_keys([0, 1, 2, 500, 999]) == {"0", "2", "500", "999"}
    with (folder / "a.csv").open("ab") as file:
        file.write(pack(records(1000, 1010)))
    assert (ingest(folder).document["rows"], found_keys([999, 1009])) == (10, {"999", "1009"})


def test_a_quote_that_may_still_be_closed_is_named_until_it_is(folder, ingest, found_keys):
    log, begun = folder / "a.csv", b"k,at,x\n" + records(0, 3) + b'3,%d,"a text,\nof two lines' % BEGIN_S
    log.write_bytes(begun + b"\nor three\n")
    first, second = ingest(folder), ingest(folder)
    (damage,) = first.document["damaged_first"]
    place = {"file": log.as_uri(), "position": begun.index(b"3,%d" % BEGIN_S)}
    assert (first.code, first.document["rows"], damage) == (1, 3, {"reason": "a quote is not closed", **place})
    assert (second.code, second.document["known_damaged"], found_keys(range(4))) == (0, 1, {"0", "1", "2"})
    log.write_bytes(begun + b'\nor three"\n' + records(4, 6))
    last = ingest(folder).document
    assert (last["rows"], last["damaged"], last["known_damaged"]) == (3, 0, 0)
    assert found_keys(range(6)) == {*map(str, range(6))}


@pytest.mark.parametrize("text", [lines(0, 3), b"k,at,x\n" + records(0, 3)], ids=["ndjson", "csv"])
def test_lines_that_end_with_a_carriage_return_alone_are_named(folder, ingest, found_keys, text):
    """Also behind rows that are whole."""
    (folder / "a.log").write_bytes(text.replace(b"\n", b"\r"))
    (folder / "b.log").write_bytes(text + text[text.index(b"\n") + 1 :].replace(b"\n", b"\r"))
    first, second = ingest(folder), ingest(folder)
    counts = first.document
    assert (first.code, counts["rows"], counts["damaged"], counts["held_back"]) == (1, 3, 2, [])
    assert all("carriage return alone" in each["reason"] for each in counts["damaged_first"])
    assert (second.document["damaged"], second.document["known_damaged"]) == (0, 2)
    (folder / "a.log").unlink()
    assert found_keys(range(3)) == {"0", "1", "2"}
