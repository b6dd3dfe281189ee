"""The keys of a topic of files: an added one finds known rows, too, each once, or the answer says what it lacks."""

import gzip
import itertools
import json
import random
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tests.unit.cli.test_linked_files import Crash, Killed
from tiered_index import IndexReader, IndexService
from tiered_index.config import IndexConfig
from tiered_index.follow import PatientPut
from tiered_index.format.columnar import NUMBER
from tiered_index.format.hashing import fingerprint
from tiered_index.format.names import TOPICS_QUEUE, linked_store
from tiered_index.service.log.topic_keys import rules_of
from tiered_index.sources import linked
from tiered_index.sources.linked import FileLinker
from tiered_index.sources.listing import listed_files
from tiered_index.sources.row_archive import decoded_rows
from tiered_index.sources.rows import text as rows_of_text
from tiered_index.sources.rows.mapping import RowMapping

BEGIN_S = 1_700_000_000
T = ("--topic", "t", "--time", "at")


@pytest.fixture
def where(tmp_path):
    return "--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects"


@pytest.fixture
def ingest(where):
    def run(source, *keys, code=0, of=T):
        done = run_here("ingest", source, *of, *keys, *where, "--json")
        assert done.code == code, (done.out, done.err)
        return done.document if code in (0, 1) else done.error["message"]

    return run


@pytest.fixture
def numbers_of(where):
    """Return a function that returns the numbers of the rows of a key, and what the answer lacks."""

    def run(key, topic="t"):
        done = run_here("query", topic, key, "--messages", "--all", *where, "--json")
        assert done.code == 0, done.err
        messages = [record["message"] for record in done.records if "state" in record]
        return sorted(json.loads(message["body"])["n"] for message in messages), done.records[-1]["lost"]

    return run


def row(number):
    # the keys at a and b are equal in some rows, and rows lack some
    keys = {"a": f"x{number % 5}", "b": [f"x{number % 3}", number % 4], "c": {"d": f"u{number % 6}"}}
    with_key = {name: key for at, (name, key) in enumerate(keys.items()) if (number + at) % 7}
    return with_key | {"at": BEGIN_S + number, "kind": f"k{number % 2}", "n": number}


def lines(begin, end):
    return "".join(f"{json.dumps(row(number))}\n" for number in range(begin, end)).encode()


RULES = {
    "a": lambda of: [of["a"]] if "a" in of else [],
    "b": lambda of: [str(key) for key in of.get("b", [])],
    "of=c.d": lambda of: [f"of={of['c']['d']}"] if "c" in of else [],
    "c.d": lambda of: [of["c"]["d"]] if "c" in of else [],
}


def keys_of(number, rules):
    return {key for rule in rules for key in RULES[rule](row(number))}


def entries_of(config, count, kinds):
    """Return how often each entry is in an index, as topic, number of the row, and key."""
    known = {}
    for number in range(count):
        topic = row(number)["kind"] if kinds else "t"
        known |= {(topic, fingerprint(topic, key)): key for key in keys_of(number, RULES)}
    with IndexReader.open(config.storage) as reader, reader.export() as batches:
        entries = [entry for batch in batches for entry in batch.to_pylist()]
    return Counter(
        (entry["topic"], entry["timestamp_ms"] // 1000 - BEGIN_S, known[entry["topic"], entry["fingerprint"]])
        for entry in entries
    )


def expected(number, rules, kinds):
    return {(row(number)["kind"] if kinds else "t", number, key) for key in keys_of(number, rules)}


def check_said(config, moments, sure, log, kinds):
    """Look up a key in the root and the storage: all rows that were indexed are found, or the answer says it."""
    with IndexReader.open(config=config) as reader:
        rules = rules_of(reader.log_state.positions, log)
        for number in moments.sample([*sure], min(3, len(sure))):
            topic = row(number)["kind"] if kinds else "t"
            for key in keys_of(number, rules):
                at_ms = (BEGIN_S + number) * 1000
                answer = reader.query(topic, key, at_ms, at_ms)
                assert answer.items or answer.lost, (number, key)
                assert all(key.startswith("of=") or "of=" not in lost.reason for lost in answer.lost)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 20))])
@pytest.mark.parametrize("form", ["topic", "topics", "archive"])
def test_each_row_has_each_key_once_however_keys_are_added_and_runs_are_killed(tmp_path, monkeypatch, seed, form):
    moments, kinds = random.Random(seed), form == "topics"
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 900)
    monkeypatch.setattr(linked, "_AT_ONCE", 2)
    monkeypatch.setattr(linked, "SEGMENT_BYTES", 4000)
    config = IndexConfig(root=tmp_path / "root", storage=f"file://{tmp_path}/objects", slots=32, items=300)
    logs, count, active, log = tmp_path / "logs", 0, [], linked_store("" if kinds else "t", TOPICS_QUEUE * kinds)
    logs.mkdir()
    # rules by which a row must have keys, by its number, since a run that was not killed
    sure = {}
    for life in range(12):
        if life < 11:
            for _ in range(moments.randrange(3)):
                more, text = moments.randrange(1, 40), logs / f"{moments.randrange(2)}.log"
                if moments.random() < 0.6:
                    with text.open("ab") as file:
                        file.write(lines(count, count + more))
                else:
                    (logs / f"{count}.log.gz").write_bytes(gzip.compress(lines(count, count + more)))
                count += more
        wanted = moments.sample([*RULES], moments.randrange(1, 4))
        dropped = [rule for rule in active if rule not in wanted and moments.random() < 0.2]
        index = IndexService(config)
        mapping = RowMapping(wanted, "at", "s", "kind" if kinds else None)
        # a run without it leaves rows that have no copy
        options = {"dropped_keys": dropped, "archive": form == "archive" and moments.random() < 0.8}
        linker = FileLinker(index, None if kinds else "t", mapping, PatientPut(index, 10.0), **options)
        until_killed = Killed(index, moments, moments.randrange(40) if life < 11 else 10_000)
        for name in ("link", "publish_positions", "send_columns", "name_columns", "replace_columns"):
            setattr(index, name, until_killed(getattr(index, name)))
        linker.patient = linker._keys._patient = until_killed(linker.patient)
        if not count:
            index.close()
            continue
        try:
            with listed_files([str(logs / "*")], config) as files:
                linker.run(files)
        except Crash:
            index.abandon()
            check_said(config, moments, sure, log, kinds)
        else:
            index.seal()
            index.run_lifecycle()
            active = rules_of(index.durable_positions(), log)
            assert {*wanted} <= {*active} and not {*dropped} & {*active}
            sure = {number: {*sure.get(number, ()), *active} for number in range(count)}
            index.close()
    with IndexReader.open(config=config) as reader:
        assert not reader.query("k0" if kinds else "t", "x1").lost
    entries = entries_of(config, count, kinds)
    assert max(entries.values()) == 1
    surely = set().union(*(expected(number, sure[number], kinds) for number in range(count)))
    perhaps = set().union(*(expected(number, RULES, kinds) for number in range(count)))
    assert surely <= entries.keys() <= perhaps and len(surely) > count
    check_copies(config, entries, active)


def check_copies(config, entries, active):
    """Each copied row has all of its keys, and a segment of copies has all rows with a key."""
    with IndexReader.open(config.storage) as reader:
        linked_segments = list(reader.segments().of_log("files:-/t/0"))
        for segment in list(reader.segments().of("rows:-/t/0")):
            table = decoded_rows(reader.segment_archive, segment)
            keys_by_offset = dict(zip(table[NUMBER].to_pylist(), table["keys"].to_pylist(), strict=True))
            assert list(keys_by_offset) == sorted(keys_by_offset) and segment.rows == len(table)
            numbers = [json.loads(text)["n"] for text in table["text"].to_pylist()]
            assert len(numbers) == len(set(numbers))
            for number, keys in zip(numbers, keys_by_offset.values(), strict=True):
                assert len(keys) == len(set(keys))
                # of a pass that was killed before its key was dropped, copies may have keys without an entry
                assert {*keys} >= {key for _, of_row, key in entries if of_row == number} >= keys_of(number, active)
            inside = [each for each in linked_segments if segment.start <= each.start and each.end <= segment.end]
            for whole in inside:
                rows = [
                    n for n, offset in zip(numbers, keys_by_offset, strict=True) if whole.start <= offset < whole.end
                ]
                every = range(min(rows), max(rows) + 1) if rows else ()
                assert {*rows} >= {number for number in every if keys_of(number, active)}


def test_a_key_is_added_to_known_rows_and_ends_when_it_is_dropped(tmp_path, ingest, numbers_of):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.log").write_bytes(lines(0, 20))
    pq.write_table(
        pa.table({"a": ["x", "y"], "b": ["z", "z"], "c": [{"d": "u"}] * 2, "at": [BEGIN_S] * 2, "n": [100, 101]}),
        logs / "b",
    )
    ingest(logs, "--key", "a")
    assert numbers_of("x1") == ([n for n in range(20) if "x1" in keys_of(n, "a")], [])
    added = ingest(logs, "--key", "a", "--key", "b")
    assert (added["known"], added["rows"], added["keys"]["added"], added["keys"]["files"]) == (2, 0, ["b"], 2)
    both = [n for n in range(20) if "x1" in keys_of(n, "ab")]
    assert numbers_of("x1") == (both, []) and numbers_of("z") == ([100, 101], [])
    # nothing is new
    again = ingest(logs, "--key", "b", "--key", "a")
    assert (again["entries"], again["keys"]["entries"], again["keys"]["added"]) == (0, 0, [])
    # a run with fewer keys, and one without any of them
    with (logs / "a.log").open("ab") as file:
        file.write(lines(20, 30))
    assert ingest(logs, "--key", "of=c.d")["keys"]["further"] == ["a", "b"]
    assert numbers_of("x1") == ([n for n in range(30) if "x1" in keys_of(n, "ab")], [])
    assert numbers_of("of=u3") == ([n for n in range(30) if "of=u3" in keys_of(n, ["of=c.d"])], [])
    assert ingest(logs, "--key", "a", "--drop-key", "b")["keys"]["dropped"] == ["b"]
    with (logs / "a.log").open("ab") as file:
        file.write(lines(30, 40))
    assert ingest(logs, "--key", "a", "--drop-key", "b")["keys"]["dropped"] == []
    expected_of_b = [n for n in range(40) if "1" in keys_of(n, "b")]
    assert numbers_of("1") == ([n for n in expected_of_b if n < 30], [])
    ingest(logs, "--key", "b")
    assert numbers_of("1") == (expected_of_b, [])


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (("--key", "b", "--drop-key", "x"), "--drop-key x: it is no key of this topic, which has a"),
        (("--key", "a", "--drop-key", "a"), "--key a and --drop-key a are both given"),
    ],
)
def test_a_key_that_can_not_be_dropped_is_refused(tmp_path, ingest, keys, problem):
    (tmp_path / "a.log").write_bytes(lines(0, 5))
    ingest(tmp_path / "a.log", "--key", "a")
    assert problem in ingest(tmp_path / "a.log", *keys, code=2)


def test_rows_that_can_not_be_read_again_for_a_key_are_named_in_its_lookups(tmp_path, where, ingest, numbers_of):
    a, b, c = (tmp_path / name for name in ("a.log", "b.log", "c.log"))
    for number, log in enumerate((a, b, c)):
        log.write_bytes(lines(number * 10, number * 10 + 10))
    ingest(tmp_path / "*.log", "--key", "a")
    a.unlink()
    b.write_bytes(lines(10, 20).replace(b"u4", b"v4"))
    added = ingest(tmp_path / "*.log", "--key", "of=c.d", code=1)
    named = [(unread["file"], unread["key"]) for unread in added["keys"]["unread"]]
    assert named == [(a.as_uri(), "of=c.d"), (b.as_uri(), "of=c.d")]
    numbers, (lost,) = numbers_of("of=u3")
    # the file that changed was read anew, as another one
    assert numbers == [n for n in range(10, 30) if "of=u3" in keys_of(n, ["of=c.d"])]
    assert lost["entries"] == 20 and lost["reason"].endswith(
        "(at least 20 messages) can't be read any more for --key of=c.d"
    )
    # other keys have all of their rows
    assert run_here("query", "t", "x3", *where, "--json").document["lost"] == []
    said = run_here("query", "t", "of=u3", *where)
    assert "complete except of files:-/t/0, offsets 0 to " in said.out


@pytest.mark.parametrize("are_gone", [False, True])
def test_a_key_is_added_to_copied_rows_also_without_their_files(tmp_path, where, ingest, are_gone):
    logs = tmp_path / "logs" / "dt=7"
    logs.mkdir(parents=True)
    rows = [row(number) | {"c.e": f"e{number % 4}"} for number in range(30)]
    # each row has the key of before, and one has none of the new keys
    rows = [each | {"a": f"x{each['n'] % 5}", "c": {"d": f"u{each['n'] % 6}"}} for each in rows]
    rows[3]["c"] = None
    (logs / "0.ndjson").write_bytes("".join(f"{json.dumps(each)}\n" for each in rows[:10]).encode())
    cells = "".join(f"{each['a']},{each['c.e']},{each['at']},{each['n']}\n" for each in rows[10:20])
    (logs / "1.csv").write_text(f"a,c.e,at,n\n{cells}")
    pq.write_table(pa.Table.from_pylist(rows[20:]), logs / "2.parquet")
    ingest(logs, "--key", "a", "--archive")
    if are_gone:
        for file in logs.iterdir():
            file.unlink()
        (logs / "3.ndjson").write_bytes(b'{"a":"y","c":{"d":"q"},"c.e":"w","at":1700000000}\n')
    keys = "--key", "c.d", "--key", 'e="c.e"', "--key", "day=dt"
    added = ingest(logs, *keys)["keys"]
    assert added["unread"] == [] and added["added"] == ["c.d", 'e="c.e"', "day=dt"]

    def found(key):
        done = run_here("query", "t", key, "--messages", "--all", *where, "--json")
        assert done.records[-1]["lost"] == []
        messages = [record for record in done.records if "state" in record]
        # JSON of CSV has texts
        return sorted((int(json.loads(each["message"]["body"])["n"]), each["state"]) for each in messages)

    expected_d = [(n, "archived") for n in (*range(10), *range(20, 30)) if n % 6 == 2]
    assert found("u2") == expected_d and found("e=e1") == [(n, "archived") for n in range(30) if n % 4 == 1]
    assert found("u3") == [(n, "archived") for n in (9, 21, 27)]
    by_day = run_here("query", "t", "day=7", *where, "--json", "--max", 100).document
    assert len(by_day["items"]) == 30 + are_gone
    # an erasure by a new key takes the rows out of the copies
    erased = run_here("erase", "--topic", "t", "--key", "e=e1", *where, "--yes", "--now", "--json").document
    assert erased["segments"]["messages_erased"] == len([n for n in range(30) if n % 4 == 1])
    assert found("e=e1") == [] and run_here("verify", "--deep", *where).code == 0


@pytest.mark.parametrize(
    ("options", "edited"),
    [
        (("--key", "a", "--archive"), b"u4"),
        (("--key", "a", "--key", "of=c.d", "--archive"), b""),
        (("--key", "c.d", "--drop-key", "a", "--archive"), b""),
        (("--key", "of=c.d"), b""),
        (("--key", "a", "--archive"), None),
    ],
)
@pytest.mark.parametrize("topic", ["t", "field:kind"])
def test_copies_of_a_killed_run_and_the_entries_of_the_next_one_agree(tmp_path, ingest, topic, options, edited):
    """A run is killed between copies and entries. Whatever changes before the next one, each row has one copy."""
    config = IndexConfig(root=tmp_path / "root", storage=f"file://{tmp_path}/objects", slots=32, items=300)
    log, kinds = tmp_path / "a.log", topic != "t"
    log.write_bytes(lines(0, 20))
    index = IndexService(config)

    def put(columns, source, position):
        if len(columns["key"]):
            raise Crash
        index.put_source_batch(columns, source, position)

    mapping = RowMapping(("a",), "at", "s", "kind" if kinds else None)
    linker = FileLinker(index, None if kinds else "t", mapping, PatientPut(index, 10.0), archive=True)
    linker.patient = put
    with listed_files([str(log)], config) as files, pytest.raises(Crash):
        linker.run(files)
    index.abandon()
    if edited is None:
        log.unlink()
        log = tmp_path / "b.log"
    with log.open("ab") as file:
        file.write(lines(20, 30))
    if edited:
        log.write_bytes(log.read_bytes().replace(edited, b"v4"))
    ingest(log, *options, of=("--topic", topic, "--time", "at"))
    with IndexReader.open(config=config) as reader, reader.export() as batches:
        entries = [entry for batch in batches for entry in batch.to_pylist()]
        store = linked_store("" if kinds else "t", TOPICS_QUEUE * kinds).replace("files:", "rows:")
        copies = [
            row for segment in reader.segments().of(store)
            for row in decoded_rows(reader.segment_archive, segment).to_pylist()
        ]  # fmt: skip
    copied = {copy[NUMBER]: copy for copy in copies}
    of_copies = {
        (row["topic"], at, int(row["timestamp"].timestamp()) * 1000, fingerprint(row["topic"], key))
        for at, row in copied.items() for key in row["keys"]
    }  # fmt: skip
    of_rows = {
        (entry["topic"], entry["offset"], entry["timestamp_ms"], entry["fingerprint"])
        for entry in entries
        if entry["offset"] in copied
    }
    assert len(copies) == len(copied) and of_rows == of_copies
    # an edited file is another one, whose rows are all new
    assert edited or len({copy["text"] for copy in copies}) == len(copies)
    # rows that had no copy are found, too
    assert len({entry["offset"] for entry in entries}) > 22


def test_an_added_key_finds_rows_by_the_topic_that_their_own_run_found(tmp_path, ingest, numbers_of):
    """Two runs found topics in two fields: a pass reads each file's topics where its run did."""
    for name, field, number in (("1.log", "kind", 1), ("2.log", "sort", 2)):
        text = json.dumps({"a": "x", "d": "y", "at": BEGIN_S, "n": number, "kind": "k", "sort": "s"})
        (tmp_path / name).write_text(text + "\n")
        ingest(tmp_path / name, "--key", "a", of=("--topic", f"field:{field}", "--time", "at"))
    ingest(tmp_path / "2.log", "--key", "a", "--key", "d", of=("--topic", "field:sort", "--time", "at"))
    assert [numbers_of(key, topic)[0] for key in "xy" for topic in "ks"] == [[1], [2], [1], [2]]


def test_a_follower_reads_known_rows_again_between_its_looks_at_new_ones(tmp_path):
    config = IndexConfig(root=tmp_path / "root", storage=f"file://{tmp_path}/objects", slots=32, items=300)
    (tmp_path / "a.log").write_bytes(lines(0, 10))
    (tmp_path / "b.log").write_bytes(lines(10, 20))
    seconds = itertools.count()

    def linker_of(*keys, **options):
        mapping = RowMapping(keys, "at", "s")
        return FileLinker(index, "t", mapping, PatientPut(index, 10.0), clock_s=lambda: next(seconds), **options)

    with IndexService(config) as index, listed_files([str(tmp_path / "*.log")], config) as files:
        linker_of("a").run(files)
        # the clock goes on by a second with each look
        linker, done = linker_of("a", "of=c.d", reread_s=0.5), []
        for _ in range(8):
            linker.run([])
            index.flush()
            done.append((linker.counts.keys.files, len(index.query("t", "of=u1").lost)))
        index.seal()
        index.run_lifecycle()
    files_read = [count for count, _ in done]
    # one file a look at most, and lookups say what they lack meanwhile
    assert done[0][1] == 1 and done[-1] == (2, 0)
    assert all(after - before <= 1 for before, after in itertools.pairwise([0, *files_read]))
    every = set().union(*(expected(number, ["a", "of=c.d"], False) for number in range(20)))
    assert entries_of(config, 20, False).keys() == every
