"""Faults of Apache RocketMQ's index that this engine must not have.

Numbers with # are issues of apache/rocketmq. Golden numbers are of the faults that RocketMQ's own code showed when it
made the golden data. Where the last column names no test, the state machine of `tests/property` compares all answers
with the model.

| fault of RocketMQ                                             | issue                 | golden | test of             |
|---------------------------------------------------------------|-----------------------|--------|---------------------|
| a time range finds only the files that begin inside it        | #9233, #10268, #10269 | 1      | ranges              |
| a message older than its file is not found by its own time    |                       | 2      | java_lost[late]     |
| recovery loses a file's end timestamp                         | #10656                | 3      | a_restart           |
| an unreadable file makes the answer shorter, without an error |                       | 4      | unreadable          |
| a file is read with the slot count of the configuration       |                       | 5      | geometry            |
| a key whose hash is Integer.MIN_VALUE fails or is lost        | #10462, #10471        | 6      | java_lost[minvalue] |
| a put with several keys is half written, and again on a retry |                       | 6      | a_refused_call      |
| failed writes are reported as success                         |                       | 6, 7   | wrote_nothing       |
| a put with more keys than a file holds indexes nothing        |                       | 7      | more_keys           |
| topics of equal hashes overwrite each other's answers         | #3613                 | 8      |                     |
| concurrent reads share one file position                      | #10462, #10471        | 9      | cold/parallel_reads |
| a lookup returns one result too many                          | #10471                | 10     |                     |
| chains are cut at 512 and 1,024 items                         |                       | 10     | long_chain          |
| an empty file is "uploaded" well                              |                       | 11     | empty_file          |
| a double space in KEYS indexes the empty key                  |                       | 12     | put_validation      |
| the same lookup, repeated, returns different counts           | #7872                 |        | answers_last        |
| a crash between compaction and upload spoils the next file    | #7222                 |        | test_crashes.py     |
| a list is changed while another thread iterates over it       | #9069, #9371          |        | test_simulation.py  |
| handles leak                                                  | #8017, #7222, #10462  |        | test_handles.py     |
"""

import errno
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.naive import lines
from tests.support.hanging import beside
from tests.support.model import Answer
from tests.support.states import States
from tiered_index import IndexReader
from tiered_index.errors import BackPressure, CorruptFile, DiskFull, InvalidArgument, SchemaMismatch, StorageUnavailable

T = 1_700_000_000_000
Make = Callable[..., States]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    lives: list[States] = []

    def begin(**settings: Any) -> States:
        lives.append(States(tmp_path / str(len(lives)), **settings))
        return lives[-1]

    yield begin
    for life in lives:
        life.crash()


@pytest.fixture
def life(make: Make) -> States:
    return make()


def put_many(life: States, first: int, last: int) -> None:
    for at in range(first, last + 1):
        life.put("t", 0, "k", at, timestamp_ms=T + at * 1000, source="log", source_position=at)


def put_calls(life: States, calls: list[dict[str, Any]]) -> None:
    """Repeat the puts of a golden file, also those that RocketMQ refused."""
    for call in calls:
        place = (call[name] for name in ("topic", "queueId", "keys", "offset", "size", "timestamp"))
        assert life.put(*place, topic_id=call["topicId"]) == len(set(call["keys"]))


@pytest.mark.parametrize("preset", ["native", "rocketmq"])
@pytest.mark.parametrize(
    "name", ["late", "minvalue_slots16", "minvalue_slots101", "minvalue_slots5000", "multikey_full"]
)
def test_each_entry_that_java_lost_or_refused_is_found_by_its_own_second(make: Make, name: str, preset: str) -> None:
    (meta,), calls = lines(f"tiered/{name}/meta.json"), lines(f"tiered/{name}/input.jsonl")
    # a file has one item less, and the late entries of one file are the fault
    life = make(preset=preset, slots=meta["slots"], items=64 if name == "late" else meta["items"])
    put_calls(life, calls)
    pairs = [(call, key) for call in calls[:: 1 + len(calls) // 40] for key in call["keys"]]
    # one key of each hash that Java could not place
    pairs += [(call, key) for call in calls for key in call["keys"] if key in ("boxvajrkywm", "euuudrqcyle")]
    for state in life.through():
        questions = [(call["topic"], key, *[call["timestamp"] // 1000 * 1000] * 2, 1000) for call, key in pairs]
        for (call, _), answers in zip(pairs, life.check_all(questions), strict=True):
            assert (call["queueId"], call["offset"]) in {(answer.queue_id, answer.offset) for answer in answers}
        if state == "unsealed":
            life.open()  # the disk has the same
    stored = life.service.log_state.objects.values()
    assert sum(file.count for file in stored) == len(life.model.entries)
    seconds = [entry.second for entry in life.model.entries]
    assert (min(o.second_min for o in stored), max(o.second_max for o in stored)) == (min(seconds), max(seconds))


def test_ranges_that_java_answered_short_are_answered_whole_and_read_no_other_file(make: Make) -> None:
    """Java's ranges are in milliseconds, its stored times in whole seconds: a begin is rounded up to a second."""
    life = make(slots=32, items=201)
    put_calls(life, [{**line, "keys": [line["key"]]} for line in lines("tiered_service/input.jsonl")])
    queries = lines("tiered_service/queries.jsonl")
    assert sum(bool(query["missed"]) for query in queries) == 32
    whole = {(q["key"], q["begin"], q["end"]): q for q in queries if q["phase"] == "uploaded" and q["maxCount"] == 1000}
    assert len(whole) == 27
    for state in life.through():
        assert len(life.service.files()) == (0 if state == "buffered" else 4)
        questions = [(q["topic"], key, -(-begin // 1000) * 1000, end, 1000) for (key, begin, end), q in whole.items()]
        for question, query, answers in zip(questions, whole.values(), life.check_all(questions), strict=True):
            known = {(item[0], item[2], item[3]) for item in query["allFilesResult"]}
            assert {(answer.key_hash, answer.queue_id, answer.offset) for answer in answers} == known
            assert len(answers) == query["trueCountAllFiles"]
            for report in life.service.query(*question).explain.files:
                assert report.begin_ms <= question[3] and report.end_ms >= question[2]


@pytest.mark.parametrize("state", ["unsealed", "compacted", "uploaded", "storage"])
def test_a_restart_keeps_the_interval_of_file_header_and_log(make: Make, state: str) -> None:
    life = make(items=201)
    life.put_batch([("t", 0, "k", offset, 1, T + offset * 500) for offset in range(200)])
    last_ms = T + 99_000
    for stage in (state, state, "storage"):
        life.bring(stage)
        assert len(life.check("t", "k", last_ms, None)) == 2 and life.check("t", "k", last_ms + 1000, None) == []
        (file,) = life.service.files()
        assert (file.second_min * 1000, file.second_max * 1000) == (T, last_ms)
        for stored in life.service.log_state.objects.values():
            assert (stored.second_min * 1000, stored.second_max * 1000) == (T, last_ms)
            assert struct.unpack(">qq", life.storage.get_range(stored.name, 4, 16)) == (T, last_ms)
        life.open()  # as after a kill


FAULTS: dict[str, Callable[[Any, str], object]] = {
    "no answer": lambda storage, name: storage.fail("get_range", name_prefix=name, times=None),
    "wrong": lambda storage, name: storage.corrupt("get_range", mode="wrong", name_prefix=name, times=None),
    "short": lambda storage, name: storage.corrupt("get_range", mode="short", name_prefix=name, times=None),
    "lost": lambda storage, name: storage.inner.delete_many([name]),
    "cut": lambda storage, name: storage.inner.put(name, storage.inner.get(name)[:100]),
}


def check_unreadable(life: States, number: int, file_id: str, error: type[Exception]) -> None:
    """Check that no answer is short because the file with this number can't be read."""
    others = [answer for answer in life.model.query("t", "k", max_count=None) if answer.offset // 20 != number]
    window = (T, T + number * 100_000 - 1) if number else (T + 100_000, T + 400_000)
    for name, ask in life.asking():
        with pytest.raises(error):
            ask("t", "k", max_count=1000)
        result = ask("t", "k", max_count=1000, allow_partial=True)
        assert (result.status, [report.file for report in result.failed]) == ("partial", [file_id]), name
        assert result.failed[0].error and [Answer.of(item) for item in result] == others
        # a lookup that does not need the file is whole
        result = ask("t", "k", *window)
        assert result.status == "complete"
        assert [Answer.of(item) for item in result] == life.model.query("t", "k", *window)


@pytest.mark.parametrize(("fault", "number"), [*((fault, 0) for fault in FAULTS), ("wrong", 3), ("lost", 3)])
def test_an_unreadable_object_is_no_short_answer(make: Make, fault: str, number: int) -> None:
    """Files of twenty entries of one key, a hundred seconds each. No answer comes from memory."""
    life = make(items=21, read_cache_bytes=0)
    life.put_batch([("t", 0, "k", number, 1, T + number * 5000) for number in range(80)])
    life.bring("storage")
    file_id = life.service.files()[number].file_id
    (name,) = [name for name, stored in life.service.log_state.objects.items() if stored.file_id == file_id]
    FAULTS[fault](life.storage, name)
    check_unreadable(life, number, file_id, StorageUnavailable if fault == "no answer" else CorruptFile)
    if fault in ("no answer", "wrong", "short"):
        life.storage.clear()
        life.check("t", "k", max_count=1000)


@pytest.mark.parametrize("state", ["unsealed", "compacted", "uploaded", "storage"])
def test_files_have_their_own_geometry(make: Make, state: str) -> None:
    """Another slot count is refused and changes nothing. None is needed, and files of several sizes lie together."""
    life = make(slots=32, items=31)
    keys = [f"k{number}" for number in range(12)]
    life.put_batch([("t", 0, keys[number % 12], number, 1, T + number * 1000) for number in range(60)])
    life.bring(state)
    life.service.close()

    def content() -> dict[Path, bytes]:
        files = (path for path in life.root.rglob("[!.]*") if path.is_file() and path.name != "lock")
        return {path: path.read_bytes() for path in files}

    before = content()
    with pytest.raises(SchemaMismatch, match="32 slots"):
        life.open(slots=64)
    assert content() == before
    for name in ("slots", "items", "preset"):
        del life.settings[name]
    for items in (None, 11, 2, 200):
        life.open(items=items)
        offset = 100 * (items or 0)
        life.put_batch([("t", 0, keys[more % 12], offset + more, 1, T + more * 1000) for more in range(15)])
        life.service.flush()
        life.service.close()
    life.open()
    assert {2, 200} < {file.layout.items for file in life.service.files() if file.place == "unsealed"}
    with IndexReader.open(root=life.root, storage_backend=life.storage, slots=64, items=100) as reader:
        for key, index in [(key, life.service) for key in keys] + [("k3", reader)]:
            assert [Answer.of(item) for item in index.query("t", key)] == life.model.query("t", key)


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": ("x1", "x2", "")},
        {"keys": ("x1", "x2", "x" * 40_000)},
        {"keys": ("x1", None, "x2")},
        {"offset": -1},
        {"size": 2**31},
        {"timestamp_ms": -1},
        {"source": "log"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_refused_call_leaves_no_key_behind_and_a_repeated_one_is_one_answer(life: States, wrong: Any) -> None:
    message = {"topic": "t", "queue_id": 0, "keys": ("x1", "x2"), "offset": 7, "size": 1, "timestamp_ms": T, **wrong}
    for _ in range(2):
        with pytest.raises(InvalidArgument):
            life.service.put(**message)
    for _ in range(2):
        assert life.put("t", 0, ("x1", "x2"), 8, timestamp_ms=T) == 2
    for _ in life.through():
        for key in ("x1", "x2"):
            assert [answer.offset for answer in life.check("t", key, max_count=1)] == [8]
    assert [stored.count for stored in life.service.log_state.objects.values()] == [4]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full disk", "broken disk"])
@pytest.mark.parametrize("operation", ["create", "allocate", "pwrite", "sync", "rename", "sync_folder"])
def test_a_flush_that_wrote_nothing_raises(make: Make, operation: str, code: int) -> None:
    life = make(items=8, buffer_max_entries=12)
    put_many(life, 1, 5)
    life.disk.fail(operation, times=None, error=code)
    for _ in range(2):
        with pytest.raises(DiskFull if code == errno.ENOSPC else StorageUnavailable):
            life.service.flush()
        assert life.service.durable_position("log") is None
        assert life.service.health()["problems"]
        assert len(life.check("t", "k")) == 5
    put_many(life, 6, 12)
    with pytest.raises(BackPressure):  # the buffer is full, and drops nothing to make space
        life.service.put("t", 0, "k", 13, 10, T, source="log", source_position=13)
    life.disk.clear()
    life.service.flush()
    assert not life.service.health()["problems"]
    life.open()  # as after a kill: it is really there
    life.state = "unsealed"
    for _ in life.through():
        assert life.service.durable_position("log") == 12
        assert len(life.check("t", "k")) == 12
    assert sum(stored.count for stored in life.service.log_state.objects.values()) == 12


@pytest.mark.parametrize("operation", ["pwrite", "sync"])
def test_unconfirmed_entries_are_not_promised_after_a_crash(life: States, operation: str) -> None:
    put_many(life, 1, 5)
    life.service.flush()
    put_many(life, 6, 9)
    life.disk.fail(operation, times=None)
    with pytest.raises(StorageUnavailable):
        life.service.flush()
    for _ in range(2):
        assert life.service.durable_position("log") == 5
        life.open()
    # entries 6 to 9 were never confirmed; the caller continues after the position
    assert [item.offset for item in life.service.query("t", "k")][-5:] == [5, 4, 3, 2, 1]
    for at in range(6, 10):
        life.service.put("t", 0, "k", at, 10, T + at * 1000, source="log", source_position=at)
    life.disk.fail("pwrite", times=None)
    with pytest.raises(StorageUnavailable):
        life.service.close()  # `close` raises the error of its flush
    life.open()
    assert life.service.durable_position("log") == 5


@pytest.mark.parametrize(("items", "already"), [(4, 3), (30, 0)])
def test_a_put_with_more_keys_than_a_file_is_indexed_whole(make: Make, items: int, already: int) -> None:
    life = make(items=items)
    for offset in range(already):
        life.put("t", 0, "before", offset)
    keys = [f"key-{number:03d}" for number in range(30)]
    assert life.put("t", 0, keys, 100, timestamp_ms=T + 1000) == 30
    life.put("t", 0, "after", 101, timestamp_ms=T + 2000)
    files = -(-(already + 31) // (items - 1))
    for state in life.through():
        assert len(life.service.files()) == (0 if state == "buffered" else files)
        for key in (*keys[::7], "before", "after"):
            assert len(life.check("t", key)) == (already if key == "before" else 1)
    assert sum(stored.count for stored in life.service.log_state.objects.values()) == already + 31


def test_a_long_chain_is_found_whole_at_once_and_page_by_page(make: Make) -> None:
    """More entries than Java's caps of one key, and newer items of other keys in the only slot."""
    life = make(slots=1, items=3000)
    life.put_batch([("t", 0, "k", number, 10, T + number * 1000) for number in range(1500)])
    life.put_batch([("t", 0, f"other-{number % 50}", number, 10, T + number * 1000) for number in range(1500, 2525)])
    for _ in life.through():
        life.check_all([("t", "k", None, None, most) for most in (2, 513, 1025, 1501)])
        assert [answer.offset for answer in life.check("t", "k", None, T + 2_999)] == [2, 1, 0]
        assert life.check("t", "none") == []
        for _, ask in life.asking()[::3]:
            offsets, page = [], None
            while page is None or page.cursor is not None:
                page = ask("t", "k", max_count=700, cursor=page and page.cursor)
                offsets += [item.offset for item in page]
            assert offsets == list(range(1499, -1, -1))


def test_an_empty_file_is_never_published(life: States) -> None:
    def check_nothing() -> None:
        assert not list(life.storage.list("data/")) and not life.service.log_state.objects
        assert not life.service.files() and not list(life.root.glob("[cu][op]*/*.index"))

    empty = {name: [] for name in ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")}
    for position in range(1, 4):
        assert life.service.put_batch(empty, source="log", source_position=position) == 0
        assert life.service.put("t", 0, [], position, 1, T) == 0
        life.service.seal()
        life.service.run_lifecycle()
        life.clock.advance(100_000)  # long past sealing by age
        assert not life.service.run_lifecycle().any()
        check_nothing()
        life.service.close()
        life.open()
        assert life.service.durable_position("log") == position
    # a file whose first write failed has no entries: they are written to another file
    life.put("t", 0, "k", 1)
    life.disk.fail("pwrite", times=None)
    with pytest.raises(StorageUnavailable):
        life.service.flush()
    life.disk.clear()
    for _ in life.through():
        assert len(life.check("t", "k")) == 1
    assert [stored.count for stored in life.service.log_state.objects.values()] == [1]
    assert [info.size_bytes > 0 for info in life.storage.list("data/")] == [True]


def test_an_empty_file_of_another_hand_is_damage(life: States) -> None:
    life.put("t", 0, "k", 1)
    life.bring("compacted")
    (path,) = (life.root / "compacted").glob("*.index")
    path.write_bytes(b"")
    life.open()
    for _, ask in life.asking():
        with pytest.raises(CorruptFile):
            ask("t", "k")
        assert ask("t", "k", allow_partial=True).status == "partial"
    life.service.run_lifecycle()
    assert not list(life.storage.list("data/")) and not life.service.log_state.objects


def test_an_answer_waits_for_a_slow_file_though_an_older_one_can_be_skipped(make: Make) -> None:
    """So it does not depend on the file that answers last. The page is full without the newest and the oldest file."""
    life = make(items=13)
    for number, key in enumerate("k" * 24 + "k--" * 8):
        life.put("t", 0, key, number, timestamp_ms=T + number * 1000)
    life.bring("storage")
    files = sorted(life.service.files(), key=lambda file: -file.second_max)
    hangs = [life.storage.hang("get_range", name_prefix=f"data/{files[n].file_id}/") for n in (0, 2, 3)]
    reader = life.reader()
    call = beside(lambda: reader.query("t", "k", max_count=14))
    assert all(hang.entered.wait(60) for hang in hangs)
    hangs[1].release.set()
    assert not call.ended(0.3)
    hangs[0].release.set()
    assert [Answer.of(item) for item in call()] == life.model.query("t", "k", max_count=14)
    hangs[2].release.set()
