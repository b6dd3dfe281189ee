"""The keys of a topic of files: an added one finds known rows, too, each once, or the answer says what it lacks."""

import contextlib
import gzip
import itertools
import json
import random
import shutil
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from tests.integration.cli.command_lines import run_here
from tests.unit.cli.test_linked_files import Crash, Killed, serve_s3
from tiered_index import IndexReader, IndexService
from tiered_index.config import IndexConfig
from tiered_index.connectors.files import linked
from tiered_index.connectors.files.linked import FileLinker
from tiered_index.connectors.files.listing import listed_files
from tiered_index.connectors.files.row_archive import decoded_rows
from tiered_index.connectors.files.rows import text as rows_of_text
from tiered_index.connectors.files.rows.mapping import RowMapping
from tiered_index.connectors.follow import PatientPut
from tiered_index.format.keys.hashing import fingerprint
from tiered_index.format.names import TOPICS_QUEUE, linked_store
from tiered_index.format.segments.columnar import NUMBER
from tiered_index.service.log.topic_keys import rules_of
from tiered_index.storage.opening import open_storage

BEGIN_S = 1_700_000_000
LATER_MS = 10**10
T = ("--topic", "t", "--time", "at")
RETIMED = ("--topic", "t", "--time", "later")


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
    times = {"at": BEGIN_S + number, "later": (BEGIN_S + number) * 1000 + LATER_MS}
    return with_key | times | {"kind": f"k{number % 2}", "n": number}


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
                answers = [reader.query(topic, key, time_ms, time_ms) for time_ms in (at_ms, at_ms + LATER_MS)]
                # at one of both times
                assert len([answer for answer in answers if answer.items]) == 1 or answers[0].lost, (number, key)
                assert all(key.startswith("of=") or "of=" not in lost.reason for lost in answers[0].lost)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in (*range(2, 20), 21, 38, 43))]
)
@pytest.mark.parametrize("form", ["topic", "topics", "archive", "times", "away"])
def test_each_row_has_each_key_once_however_keys_are_added_and_runs_are_killed(tmp_path, monkeypatch, seed, form):
    moments, kinds = random.Random(seed), form == "topics"
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 900)
    monkeypatch.setattr(linked, "_AT_ONCE", 2)
    monkeypatch.setattr(linked, "SEGMENT_BYTES", 4000)
    config = IndexConfig(root=tmp_path / "root", storage=f"file://{tmp_path}/objects", slots=32, items=300)
    logs, count, active, log = tmp_path / "logs", 0, [], linked_store("" if kinds else "t", TOPICS_QUEUE * kinds)
    logs.mkdir()
    files_of_rows = []
    # rules by which a row must have keys, by its number, since a run that was not killed
    sure = {}
    away, aside = {}, tmp_path / "aside"
    aside.mkdir()
    for life in range(12):
        for name in [name for name in away if life == 11 or moments.random() < 0.5]:
            # perhaps with other times
            (shutil.move if moments.random() < 0.5 else shutil.copyfile)(aside / name, away.pop(name))
        if life < 11:
            for _ in range(moments.randrange(3)):
                more, text = moments.randrange(1, 40), logs / f"{moments.randrange(2)}.log"
                if moments.random() < 0.6 and text.name not in away:
                    with text.open("ab") as file:
                        file.write(lines(count, count + more))
                else:
                    text = logs / f"{count}.log.gz"
                    text.write_bytes(gzip.compress(lines(count, count + more)))
                files_of_rows += [text] * more
                count += more
            here = sorted(logs.iterdir()) if form == "away" else []
            for file in here if len(here) > 1 and moments.random() < 0.4 else ():
                if file != here[-1] and moments.random() < 0.5:
                    away[file.name] = file.rename(aside / file.name) and file
        wanted = moments.sample([*RULES], moments.randrange(1, 4))
        dropped = [rule for rule in active if rule not in wanted and moments.random() < 0.2]
        index = IndexService(config)
        is_later = form == "times" and life < 11 and moments.random() < 0.4
        time = ("later", "ms") if is_later else ("at", "s")
        mapping = RowMapping(wanted, *time, "kind" if kinds else None)
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
            # rows of files that are away get keys later
            here = [number for number in range(count) if files_of_rows[number].name not in away]
            sure |= {number: {*sure.get(number, ()), *active} for number in here}
            index.close()
    with IndexReader.open(config=config) as reader:
        assert not reader.query("k0" if kinds else "t", "x1").lost
    entries = entries_of(config, count, kinds)
    assert max(entries.values()) == 1
    surely = set().union(*(expected(number, sure[number], kinds) for number in range(count)))
    perhaps = set().union(*(expected(number, RULES, kinds) for number in range(count)))
    assert surely <= entries.keys() <= perhaps and len(surely) > count
    check_copies(config, entries, active, files_of_rows)


def check_copies(config, entries, active, files):
    """Each copied row has all of its keys, and a segment of copies has all rows with a key.

    `files` has the file of each row.
    """
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
                here = [number for number in every if files[number] == files[rows[0]]]
                assert {*rows} >= {number for number in here if keys_of(number, active)}


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


def test_rows_that_are_bad_by_an_added_key_alone_are_counted(tmp_path, ingest):
    (tmp_path / "a.log").write_bytes(lines(0, 4) + f'{{"a":"x4","b":"\\ud800","at":{BEGIN_S},"n":4}}\n'.encode())
    ingest(tmp_path / "a.log", "--key", "a")
    added = ingest(tmp_path / "a.log", "--key", "a", "--key", "b")
    assert (added["keys"]["files"], added["keys"]["skipped"], added["keys"]["unread"]) == (1, 1, [])


def test_a_row_is_shown_by_its_valid_key_whatever_an_added_one_is(tmp_path, ingest, numbers_of):
    (tmp_path / "a.log").write_bytes(f'{{"a":["x4","\\udc00"],"b":"y","c":"\\ud800","at":{BEGIN_S},"n":4}}\n'.encode())
    ingest(tmp_path / "a.log", "--key", "b")
    assert ingest(tmp_path / "a.log", "--key", "a", "--key", "c")["keys"]["skipped"] == 1
    assert numbers_of("y") == ([4], [])


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_are_read_anew_keep_a_key_that_was_dropped(tmp_path, ingest, numbers_of, monkeypatch, packed):
    logs = tmp_path / "logs"
    logs.mkdir()
    # a text that is longer than its first segment
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 900)
    monkeypatch.setattr(rows_of_text, "SUM_BYTES", 500)
    log = logs / ("a.log.gz" if packed else "a.log")
    log.write_bytes(gzip.compress(lines(0, 400)) if packed else lines(0, 400))
    ingest(logs, "--key", "a", "--key", "c.d")
    (logs / "b.log").write_bytes(lines(400, 410))
    ingest(logs, "--key", "a", "--drop-key", "c.d")
    of_u3 = numbers_of("u3")
    assert of_u3 == ([n for n in range(400) if "u3" in keys_of(n, ["c.d"])], [])
    (logs / "c.log").write_bytes(lines(410, 420))
    reread = ingest(logs, "--key", "a", of=("--topic", "t", "--time", "later"))
    assert len(reread["reread"]) == 2 and numbers_of("u3") == of_u3
    # an edit, and no row of it has the key, but those behind it
    edited = lines(0, 400)[:-20_000] + lines(0, 400)[-20_000:].replace(b'"a": "x2"', b'"a": "y2"')
    log.write_bytes(gzip.compress(edited) if packed else edited)
    ingest(logs, "--key", "a", of=("--topic", "t", "--time", "later"))
    assert numbers_of("u3") == of_u3
    # added again, it finds all rows, each once
    ingest(logs, "--key", "c.d", of=("--topic", "t", "--time", "later"))
    assert numbers_of("u3") == ([n for n in range(420) if "u3" in keys_of(n, ["c.d"])], [])


def test_rows_that_can_not_be_read_again_for_a_key_are_named_in_its_lookups(tmp_path, where, ingest, numbers_of):
    a, b, c = (tmp_path / name for name in ("a.log", "b.log", "c.log"))
    for number, log in enumerate((a, b, c)):
        log.write_bytes(lines(number * 10, number * 10 + 10))
    ingest(tmp_path / "*.log", "--key", "a")
    aside = a.rename(tmp_path / "aside")
    b.write_bytes(lines(10, 20).replace(b"u4", b"v4"))
    added = ingest(tmp_path / "*.log", "--key", "of=c.d", code=1)
    named = [(unread["file"], unread["key"]) for unread in added["keys"]["unread"]]
    assert named == [(a.as_uri(), "of=c.d"), (b.as_uri(), "of=c.d")]
    later = "; a later run reads it if it lists it as it was"
    assert all(unread["problem"].endswith(later) for unread in added["keys"]["unread"])
    numbers, (lost,) = numbers_of("of=u3")
    # the file that changed was read anew, as another one
    assert numbers == [n for n in range(10, 30) if "of=u3" in keys_of(n, ["of=c.d"])]
    reason = "offsets 0 to 2,090 are of files that were gone or had changed, and are not read yet for --key of=c.d"
    assert lost["reason"] == reason
    # other keys have all of their rows
    assert run_here("query", "t", "x3", *where, "--json").document["lost"] == []
    said = run_here("query", "t", "of=u3", *where)
    assert "complete except of files:-/t/0, offsets 0 to " in said.out
    # also after a run that lists neither, or another one in their place
    assert ingest(tmp_path / "*.log", "--key", "a")["keys"]["files"] == 0
    assert len(numbers_of("of=u3")[1]) == 1
    aside.rename(a)
    assert ingest(tmp_path / "*.log", "--key", "a")["keys"] | {"further": []} == {
        "added": [], "dropped": [], "further": [], "files": 1, "entries": 9, "skipped": 0, "unread": []
    }  # fmt: skip
    numbers, (lost,) = numbers_of("of=u3")
    assert numbers == [n for n in range(30) if "of=u3" in keys_of(n, ["of=c.d"])]
    # what the other one had before
    b.write_bytes(lines(10, 20))
    ingest(tmp_path / "*.log", "--key", "a")
    numbers, lost = numbers_of("of=u4")
    assert (sorted({*numbers}), lost) == ([n for n in range(30) if "of=u4" in keys_of(n, ["of=c.d"])], [])


def test_an_object_that_is_away_while_a_key_is_added_gets_it_when_it_is_back(
    monkeypatch, s3_environment, ingest, numbers_of
):
    serve_s3(monkeypatch, s3_environment)
    source = f"s3://{s3_environment.new_bucket()}/logs"
    texts = {f"{number}.log": lines(number * 10, number * 10 + 10) for number in range(3)}
    with open_storage(source, any_names=True) as storage:
        for name, text in texts.items():
            storage.put(name, text)
        ingest(f"{source}/", "--key", "a")
        storage.delete_many(["1.log"])
        assert len(ingest(f"{source}/", "--key", "c.d", code=1)["keys"]["unread"]) == 1
        numbers, (lost,) = numbers_of("u3")
        assert lost["reason"].endswith("are not read yet for --key c.d")
        assert set(numbers) == {n for n in (*range(10), *range(20, 30)) if "u3" in keys_of(n, ["c.d"])}
        storage.put("1.log", texts["1.log"])
        assert ingest(f"{source}/", "--key", "a")["keys"]["files"] == 1
    assert numbers_of("u3") == ([n for n in range(30) if "u3" in keys_of(n, ["c.d"])], [])


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


def times_of_rows(where):
    """Return the times of the rows of key x, by their numbers: each row once, from its file or its copy."""
    done = run_here("query", "t", "x", "--messages", "--all", *where, "--json")
    assert done.records[-1]["lost"] == []
    messages = [record for record in done.records if "state" in record]
    times = {int(json.loads(of["message"]["body"])["n"]): of["item"]["timestamp_ms"] for of in messages}
    assert len(times) == len(messages)
    return times


@pytest.mark.parametrize("is_stored", [False, True])
def test_rows_of_known_files_get_other_times_and_count_once(
    tmp_path, monkeypatch, s3_environment, where, ingest, is_stored
):
    """Another time path, unit or zone: the listed files are read anew, in any form. Others stay as they are."""
    folder, source = tmp_path / "logs", f"{tmp_path}/logs/"
    folder.mkdir()
    if is_stored:
        serve_s3(monkeypatch, s3_environment)
        source = f"s3://{s3_environment.new_bucket()}/logs/"
    rows = [{"a": "x", "at": f"2026-07-01T12:00:{n:02}", "sent": (BEGIN_S + n) * 1000, "n": n} for n in range(12)]
    pq.write_table(pa.Table.from_pylist(rows[:3]), folder / "0.parquet")
    (folder / "1.csv").write_text("a,at,sent,n\n" + "".join(f"x,{r['at']},{r['sent']},{r['n']}\n" for r in rows[3:6]))
    texts = [f"{json.dumps(each)}\n".encode() for each in rows]
    (folder / "2.log").write_bytes(b"".join(texts[6:8]))
    (folder / "3.log.gz").write_bytes(gzip.compress(b"".join(texts[8:10])))
    (folder / "4.log").write_bytes(b"".join(texts[10:]))

    def run(options, code=0, name=""):
        with open_storage(source.rstrip("/"), any_names=True) if is_stored else contextlib.nullcontext() as storage:
            for file in folder.iterdir() if is_stored else ():
                storage.put(file.name, file.read_bytes())
        return ingest(source + name, *options, of=("--topic", "t", "--key", "a"), code=code)

    noon_ms, hour_ms = 1782907200000, 3_600_000
    at, sent = {n: noon_ms + n * 1000 for n in range(12)}, {n: (BEGIN_S + n) * 1000 for n in range(12)}
    assert run(("--time", "at"))["reread"] == [] and times_of_rows(where) == at
    for options, times in (
        (("--time", "at", "--time-zone", "Europe/Berlin"), {n: time_ms - 2 * hour_ms for n, time_ms in at.items()}),
        (("--time", "at", "--time-zone", "UTC"), at),
        (("--time", "sent"), sent),
        (("--time", "sent", "--time-unit", "us"), {n: time_ms // 10**6 * 1000 for n, time_ms in sent.items()}),
        (("--time", "at"), at),
    ):
        reread = run(options)
        assert len(reread["reread"]) == reread["read_files"] == 5 and reread["rows"] == 12
        assert times_of_rows(where) == times
        assert (run(options)["reread"], run(options)["known"]) == ([], 5) and times_of_rows(where) == times
    # times are as they were: nothing is read anew for a zone or a unit that no time needs
    assert run(("--time", "at", "--time-unit", "ms"))["reread"] == []
    # a file with other times than the others
    told = run(("--time", "sent", "--time-unit", "ms"), name="2.log")
    assert (len(told["reread"]), len(told["otherwise"])) == (1, 4)
    assert times_of_rows(where) == at | {n: sent[n] for n in (6, 7)}
    # a mistyped path, or a unit that is not theirs, replaces nothing
    for options in ("--time", "snet"), ("--time", "sent", "--time-unit", "s"):
        assert run(options, code=4, name="4.log")["skipped"] == 1
    assert times_of_rows(where) == at | {n: sent[n] for n in (6, 7)}


def test_topics_say_that_they_count_replaced_rows(tmp_path, where, ingest):
    log = tmp_path / "a.log"
    log.write_bytes(lines(0, 20))
    ingest(log, "--key", "a")
    told = "the counts include rows of files that newer readings replaced, until a merge leaves them out"

    def entries_and_hints():
        document = run_here("topics", *where, "--json").document
        return document["topics"][0]["entries"], document["hints"]

    once, hints = entries_and_hints()
    assert hints == []
    ingest(log, "--key", "a", of=RETIMED)
    assert entries_and_hints() == (2 * once, [told]) and told in run_here("topics", *where).out
    merged = run_here("merge", "--window", "1d", *where[2:], "--json")
    assert merged.code == 0, merged.err
    assert entries_and_hints() == (once, [])


def test_rows_with_copies_keep_their_times(tmp_path, where, ingest):
    log = tmp_path / "a.log"
    log.write_bytes(b"".join(f'{{"a":"x","at":{BEGIN_S + n},"sent":{BEGIN_S},"n":{n}}}\n'.encode() for n in range(3)))
    ingest(log, "--key", "a", "--archive")
    refused = ingest(log, "--key", "a", of=("--topic", "t", "--time", "sent"), code=2)
    assert refused.startswith(f"{log.as_uri()} can't be read in another way (--time, --time-unit, ")
    assert ingest(log, "--key", "a")["known"] == 1
    assert times_of_rows(where) == {n: (BEGIN_S + n) * 1000 for n in range(3)}


@pytest.mark.parametrize("form", ["ndjson", "csv", "parquet"])
def test_rows_of_an_edited_file_whose_copies_are_answers_get_an_added_key_once(tmp_path, ingest, numbers_of, form):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "app.log"

    def write(*numbers):
        rows = [{"a": f"a{n % 2}", "b": f"b{n % 3}", "at": BEGIN_S + n, "n": str(n)} for n in numbers]
        table = pa.Table.from_pylist(rows)
        if form == "parquet":
            pq.write_table(table, log)
        elif form == "csv":
            csv.write_csv(table, log)
        else:
            log.write_text("".join(f"{json.dumps(each)}\n" for each in rows))

    write(*range(5))
    ingest(log, "--key", "a", "--archive", "--wait")
    write(*range(20))
    ingest(log, "--key", "a", "--archive", "--wait")
    for edited in ([*range(11), 777, *range(12, 20)], [*range(7), 778, 779, *range(7, 11), 777, *range(12, 20)]):
        write(*edited)
        ingest(log, "--key", "a", "--archive", "--wait")
    # a row with a copy stays an answer, though the file has lost it
    numbers = sorted({*range(20), 777, 778, 779})
    for keys, more in ((["--key", "b"], []), (["--key", "c=b"], [30, 31, 32])):
        write(*edited, *more)
        ingest(log, "--key", "a", *keys, "--archive", "--wait")
        for kind, count, name in (("a", 2, ""), ("b", 3, ""), *([("b", 3, "c=")] if more else [])):
            for rest in range(count):
                of_key = [n for n in (*numbers, *more) if n % count == rest]
                texts, _ = numbers_of(f"{name}{kind}{rest}")
                assert sorted(map(int, texts)) == sorted(of_key), (kind, rest)


def test_an_added_key_reads_the_times_of_rows_as_their_own_run_did(tmp_path, where, ingest):
    """Two runs found times in two fields: a pass for a key of both reads each file's times where its run did."""
    for name, field, at in (("1.log", "at", BEGIN_S), ("2.log", "sent", (BEGIN_S + 9) * 1000)):
        (tmp_path / name).write_text(json.dumps({"b": "y", "a": "x", field: at, "n": int(name[0])}) + "\n")
        ingest(tmp_path / name, "--key", "b", of=("--topic", "t", "--time", field))
    added = ingest(tmp_path / "2.log", "--key", "a", of=("--topic", "t", "--time", "sent"))
    assert (added["keys"]["files"], added["skipped"]) == (2, 0)
    assert times_of_rows(where) == {1: BEGIN_S * 1000, 2: (BEGIN_S + 9) * 1000}


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
        # else a run that was killed before it put any
        index.flush()
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
