"""Each suite of `make bench` at a tiny size ends, checks its own answers, and has a value for each figure.

The checks find every kind of wrong answer. No test judges a figure that depends on the machine."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.benchmarks import __main__ as program
from tests.benchmarks.billion import oracle
from tests.benchmarks.billion.data import KEYS_FILE, SOURCE
from tests.benchmarks.billion.run import Run
from tests.benchmarks.cold_peers.data import HOT_KEYS
from tests.benchmarks.cold_peers.data import Data as StoredData
from tests.benchmarks.cold_peers.run import _Run
from tests.benchmarks.paths import Rooms
from tests.benchmarks.peers.data import Data
from tests.benchmarks.peers.run import FIGURES
from tests.benchmarks.peers.worker import PEERS, check, check_many


@pytest.fixture
def run(tmp_path, capsys):
    """Run a suite in a folder, which it leaves empty; return the rows of its tables, by title, and the document."""

    def measured(suite, *options):
        out, work = tmp_path / "out.json", tmp_path / "work"
        program.main([suite, *map(str, options), "--root-dir", str(work), "--out", str(out)])
        document = json.loads(out.read_text())
        assert list(work.iterdir()) == []
        assert document["machine"]["cores"] >= 1 and document["machine"]["filesystem"] != "unknown"
        printed = capsys.readouterr().out
        for title, (columns, *rows) in document["tables"].items():
            assert title in printed and rows and all(len(row) == len(columns) for row in rows)
        return [rows for _, *rows in document["tables"].values()], document

    return measured


@pytest.mark.long
def test_the_machine(run):
    (rows,), document = run("quick", "--slots", 50, "--items", 2_000, "--rounds", 2)
    assert all(len(values) == 2 and min(values) >= 0 for values in document["figures"]["native"].values())
    figures = {name: median for name, median, *_ in rows}
    assert figures["opening a root with 10 files: s"] > 0 and 5 < figures["compacted file: bytes an entry"] < 40
    assert all(
        figures[f"lookup, {state}: p50 us"] <= figures[f"lookup, {state}: p99 us"]
        for state in ("unsealed", "compacted")
    )
    assert all(figures[f"put beside {state}: p50 us"] > 0 for state in ("nothing", "the writer's merge"))


@pytest.mark.long
def test_ranges(run):
    (lookups, readers, many), _ = run("ranges", "--files", 10, "--items", 500, "--rounds", 1)
    gets = {tuple(row[:3]): row[3] for row in lookups}
    for files in (1, 10):
        assert all(gets[files, kind, way] == files for kind in ("one", "all", "none") for way in ("ours", "plain GETs"))
        assert gets[files, "all", "ours, filters cached"] == files
        assert (gets[files, "(opening)", "a new reader"], gets[files, "all", "a new reader"]) == (3, 2 * files)
        assert gets[files, "one", "RocketMQ, in parallel"] > files < gets[files, "one", "RocketMQ, file by file"]
    assert [row[:3] for row in readers] == [[500, "none", 3], [500, "one", 3], [500, "all", 3]]
    # a filter admits one of 100 other keys
    assert 24 <= readers[0][4] <= 27 and 25 <= readers[1][4] <= 28 and readers[2][4] == 48
    requests = {tuple(row[:3]): row[3] for row in many}
    for keys in (1, 10, 100):
        assert requests[keys, "none", 256] <= requests[keys, "none", 0] <= 10 * keys
    assert all(requests[keys, "in memory", 0] <= keys for keys in (1, 10)), "a filter admits few other files"


@pytest.mark.long
def test_many_objects(run):
    (rows, of_segments), _ = run("scale", "--objects", 1_000, "--segments", 1_000)
    figures = dict(rows)
    segments = dict(of_segments)
    assert (segments["segments"], segments["open a reader, requests"]) == (999, 3)
    assert segments["find a segment, ranged reads at most"] <= 1
    assert figures["open a reader, requests"] == 3
    assert figures["many indexes: open a reader, requests"] == 3 * figures["many indexes"]


@pytest.mark.long
def test_the_service(run):
    (rows,), document = run("service", "--entries", 4_000, "--seconds", 0.2)
    measured = {row[0].partition(":")[0] for row in rows}
    assert measured == {"hot", "cached", "cold", "a plain Starlette route"} and all(row[1] > 0 for row in rows)
    assert next(row for row in document["rows"] if "beside writes" in row["name"])["written/s"] > 0


@pytest.mark.long
def test_files(run):
    _, document = run("files", "--rows", 300, "--rounds", 1)
    assert all(way["rows a CPU s"] > 0 for way in document["ways"].values())
    assert document["ways"]["ndjson published"]["bytes a row"] > 0
    assert document["read again"]["rows_ms"] > 30


@pytest.mark.long
def test_an_index_after_years(run):
    tables, _ = run("lived", "--entries", 500, "--rounds", 1, "--files", 100)
    assert [len(rows) for rows in tables] == [6, 6, 6, 8, 2, 2, 4]
    assert all(row[1] > 0 for rows in tables for row in rows)
    assert all(rows[0][3] == 1 for rows in tables[:-1])


def test_the_way_of_a_lookup(run):
    tables, _ = run("paths")
    for name, files, calls, upward, handed_over in (row for rows in tables for row in rows):
        assert files <= calls and upward < calls, name
        assert handed_over <= (4 if "four files" in name or "keys" in name else 0), name
    in_folder, in_sqlite = [{name: row for name, *row in rows} for rows in tables]
    # files, calls upward, and to threads
    bounds = {
        "first cold lookup of one file": (22, 6, 0),
        "second lookup, another key of the file": (10, 1, 0),
        "the same again: a warm lookup": (10, 1, 0),
        "first cold lookup of four files": (22, 20, 0),
        "second lookup of four files": (10, 1, 0),
    }
    for name, most in bounds.items():
        files, _, upward, handed_over = in_folder[name]
        assert all(map(int.__le__, (files, upward, handed_over), most)), (name, in_folder[name])
    files, _, upward, _ = in_sqlite["first cold lookup of four files"]
    assert files <= 50 and upward <= 30


def test_a_call_is_upward_by_the_contracts():
    rooms = Rooms()
    assert rooms.is_upward("tiered_index.service.read.scan", "tiered_index.service.read.query")
    assert rooms.is_upward("tiered_index.base.threads", "tiered_index.service.read.files.cold_path")
    assert not rooms.is_upward("tiered_index.service.read.query", "tiered_index.service.read.scan")
    assert not rooms.is_upward("tiered_index.service.read.files.cold_path", "tiered_index.service.read.files.compacted")
    assert not rooms.is_upward("tiered_index.service.reader", "tiered_index.service.index"), (
        "they are beside each other"
    )


@pytest.mark.long
def test_the_soak(run):
    ((minute,),), document = run("soak", "--minutes", 0.05, "--items", 20_000)
    assert document["wrong_answers"] == 0 and document["answers"] >= 200 and minute[1] > 0


@pytest.mark.long
def test_peers(run):
    sizes = ("--entries", 2_000, "--per-key", 2, "--rounds", 1, "--commit-entries", 500, "--lookups", 100)
    (rows,), document = run("peers", *sizes, "--peers", "tiered_index,sqlite")
    assert set(document["sizes"][0]["columns"]["tiered_index"]) >= set(FIGURES)
    assert [row[0] for row in rows] == list(FIGURES.values())


@pytest.mark.slow
def test_object_storage(run):
    (rows,), _ = run("cold", "--entries", 10_000, "--rounds", 1, "--delay", 0, "--only", "month,parquet")
    requests = rows[3]
    assert requests[0] == "... requests" and requests[1] != requests[2] == "**1**", "files, and their table"


@pytest.mark.slow
def test_a_year_by_spark(run):
    (rows,), document = run("spark", "--entries", 100_000)
    (steps,) = document["sizes"].values()
    assert steps["million keys"]["keys_checked"] == steps["million keys, one process's index"]["keys_checked"]
    assert steps["thousand keys"]["keys_checked"] == 1_000 and steps["erase a key"]["erased_entries"] > 100
    assert {"build", "audit, equal", "merge, one process", "million keys joined (Spark)"} <= {row[0] for row in rows}


def test_a_year_continues_only_with_its_messages(tmp_path):
    (tmp_path / "steps.json").write_text('{"messages": {}}')
    for has_messages in (False, True):
        assert Run(tmp_path, 10, "local[1]", print).steps == ({"messages": {}} if has_messages else {})
        (tmp_path / SOURCE).mkdir(exist_ok=True)


def test_the_suites_are_listed_and_others_refused(capsys):
    with pytest.raises(SystemExit) as end:
        program.main(["help"])
    assert not end.value.code
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(program.SUITES)
    for wrong in (["nothing"], ["billion", "--entries", "10_000_000_000_000", "--root-dir", "/tmp/nowhere"]):
        with pytest.raises(SystemExit) as end:
            program.main(wrong)
        assert end.value.code


_HOT, _RARE, _ABSENT = "hot", "rare", "absent"


def _message(key: str, number: int) -> dict[str, object]:
    return {"topic": "t", "queue_id": 0, "key": key, "offset": number, "size": 9, "timestamp_ms": number * 1000 + 7}


def _answers() -> list[dict[str, object]]:
    """Return the right answers: the newest 64 of the hot key, the one of the rare key, none of the absent key."""
    rows = [_message(_HOT, 99 - place) | {"position": place, "status": "truncated"} for place in range(64)]
    rows.append(_message(_RARE, 500) | {"position": 0, "status": "complete"})
    none = dict.fromkeys(("queue_id", "offset", "size", "timestamp_ms", "position"))
    return [*rows, {"topic": "t", "key": _ABSENT, "status": "complete", **none}]


@pytest.fixture
def year(tmp_path):
    """A source with a hot and a rare key, and its keys."""
    messages = (
        [_message(_HOT, number) for number in range(100)]
        + [_message(_HOT, 36) | {"offset": 360}]
        + [_message(_RARE, 500), _message("other", 501)]
    )
    for name, rows in ((SOURCE, messages), (KEYS_FILE, [{"topic": "t", "key": k} for k in (_HOT, _RARE, _ABSENT)])):
        (tmp_path / name).mkdir()
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name / "part-0.parquet")
    oracle.find(tmp_path)
    return tmp_path


def _check(year, answers):
    place = year / "answers"
    place.mkdir()
    pq.write_table(pa.Table.from_pylist(answers), place / "part-0.parquet")
    return oracle.check(year, place)


def test_right_answers_of_the_year_are_counted(year):
    assert oracle.hottest(year) == ("t", _HOT, 101)
    assert _check(year, _answers()) == {"keys_checked": 3, "entries_checked": 65}


WRONG = {
    "1 keys without an answer": lambda rows: rows[:-1],
    "1 answers that are not complete": lambda rows: [rows[0] | {"status": "partial"}, *rows[1:]],
    "1 entries of no message": lambda rows: [rows[0] | {"size": 10}, *rows[1:]],
    "1 entries twice in an answer": lambda rows: [*rows[:-1], rows[-2] | {"position": 1}, rows[-1]],
    "1 answers with too few": lambda rows: [row for row in rows if row["position"] != 5],
    "1 answers .* or older": lambda rows: [rows[0] | _message(_HOT, 3), *rows[1:]],
    "1 complete answers of keys with more": lambda rows: [rows[0] | {"status": "complete"}, *rows[1:]],
    "1 truncated answers of keys with fewer": lambda rows: [*rows[:64], rows[64] | {"status": "truncated"}, rows[65]],
}


@pytest.mark.parametrize(("problem", "wrong"), WRONG.items(), ids=WRONG)
def test_a_wrong_answer_of_the_year_ends_the_run(year, problem, wrong):
    with pytest.raises(RuntimeError, match=problem):
        _check(year, wrong(_answers()))


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_returns_the_put_entries(name, tmp_path):
    if (missing := PEERS[name].missing()) is not None:
        pytest.skip(missing)
    data, peer = Data(2_000, 4), PEERS[name](tmp_path, 2_000)
    assert peer.version()
    peer.open()
    try:
        for batch in data.batches(500):
            peer.put_batch(peer.prepare(batch))
        for _ in ("just written", "settled"):
            numbers = data.drawn(100, 1)
            keys = data.texts(numbers)
            for number, key, absent in zip(numbers.tolist(), keys, data.absent(numbers), strict=True):
                check(peer, data, number, peer.offsets(peer.lookup(key)))
                check(peer, data, -1, peer.offsets(peer.lookup(absent)))
            check_many(peer, data, numbers, keys, peer.lookup_many(keys))
            peer.settle()
    finally:
        peer.close()
    assert peer.stored_bytes() > 0


def test_a_wrong_answer_of_a_peer_is_an_error(tmp_path):
    data, peer = Data(2_000, 2), PEERS["sqlite"](tmp_path, 2_000)
    check(peer, data, 3, [3_000 + 1_000_000, 3_000])
    for wrong in ([3_000], [3_000, 1_003_000, 5_000]):
        with pytest.raises(RuntimeError, match=r"SQLite: key 3 .* offsets \["):
            check(peer, data, 3, wrong)


def test_the_entries_in_object_storage_are_known():
    data = StoredData(20_000, 7)
    entries_of_keys: dict[str, list[list[int]]] = {}
    for batch in data.files():
        for row in batch.to_pylist():
            entries_of_keys.setdefault(row["key"], []).insert(
                0, [row["timestamp_ms"] // 1000, row["offset"], row["queue_id"]]
            )
    numbers = data.drawn(data.keys, 0)
    for number, key in zip(numbers.tolist(), data.texts(numbers), strict=True):
        assert entries_of_keys.pop(key, []) == data.expected(number)
    for number in range(HOT_KEYS):
        assert entries_of_keys.pop(data.hot(number)) == data.expected_hot(number, 1 << 30)
    assert entries_of_keys == {}
    assert not set(data.drawn(10, 1).tolist()) & set(data.drawn(10, 2).tolist())
    _Run._check("month", [[[1, 2, 3]]], [[[1, 2, 3]]])
    with pytest.raises(RuntimeError, match="30d table answered"):
        _Run._check("month", [[]], [[[1, 2, 3]]])
