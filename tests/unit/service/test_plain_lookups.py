"""One call of the compiled core checks, hashes and answers a lookup without cursor, limits and spans."""

import copy
import gc
import json
import pickle
import weakref
from dataclasses import replace

import numpy as np
import pytest

from tests.support.core import compiled_core, using
from tests.support.rounds import upload
from tiered_index.errors import TieredIndexError
from tiered_index.types import MAX_KEY_UNITS, MAX_TOPIC_UNITS

T_MS = 1_700_000_000_000
LONG = 1_000
KEYS = ["k", "ключ", "鍵", "é", "\U0001f511 key", "\x00", " ", "a\tb", "0x610962", "0x6b", "0xDEADBEEF"]
KEYS += ["x" * MAX_KEY_UNITS, "\U0001f511" * LONG]
TOPICS = ["t", "тема", " t", "\x85t", "\U0001f511", "t" * MAX_TOPIC_UNITS]


@pytest.fixture
def index(open_index):
    """For each topic and key, entries in a compacted file and later ones in an unsealed file. The buffer is empty."""
    compiled_core()
    service = open_index(slots=50, items=4_000)
    for part in range(2):
        for number, (topic, key) in enumerate([(topic, key) for topic in TOPICS for key in KEYS]):
            for more in range(3):
                offset = 1_000_000 * part + 10 * number + more
                service.put(topic, part, key, offset, 1 + more, T_MS + 1_000 * offset)
        service.flush()
        if not part:
            upload(service)
    return service


def outcome(index, arguments):
    try:
        document = index.query(*arguments).to_dict()
    except TieredIndexError as error:
        return type(error), str(error)
    document["explain"]["elapsed_ms"] = 0
    for report in document["explain"]["files"]:
        report |= {"elapsed_ms": 0, "not_in_core": None}
    return json.dumps(document)


class Text(str):
    pass


TIMES = [(T_MS, None), (None, T_MS), (T_MS, T_MS), (T_MS + 1, T_MS), (-1, 0), (-(2**70), 2**70), (2**63, 2**63)]
TIMES += [(0, 2**60), (True, None), (None, False), (1.5, None), ("1", None), (np.int64(T_MS), None)]
TIMES += [(None, np.float64(1)), (T_MS + 1_999, T_MS + 1_999), (253_402_300_800_000, None)]
COUNTS = (1, 2, 6, 7, 0, -1, True, 2**60 - 1, 2**60, 2**64, np.int32(2), 1.0, None)
ODD_TOPICS = ("", "t\ud800", " ", "\t\n", "\x85", "none", None, 1, b"t", Text("t"), "t" * (MAX_TOPIC_UNITS + 1))
ODD_KEYS = ("", "none", "\ud800", "k\udc00\ud800", None, 1, b"k", Text("k"), "x" * (MAX_KEY_UNITS + 1))
ASKED = [
    *((topic, key) for topic in TOPICS for key in KEYS),
    *((topic, "k") for topic in ODD_TOPICS),
    *(("t", key) for key in ODD_KEYS),
    *(("t", "k", *times) for times in TIMES),
    *(("t", "k", None, None, count) for count in COUNTS),
]


def test_each_lookup_is_answered_or_refused_as_by_the_reference(index):
    core = compiled_core()
    for arguments in ASKED:
        with using(core):
            of_core = outcome(index, arguments)
        with using(None):
            assert of_core == outcome(index, arguments), arguments


def test_an_answer_without_waiting_is_that_of_a_lookup_or_none(index):
    index.query("t", "k")
    answered = 0
    for arguments in ASKED:
        answer = index.query_nowait(*arguments)
        if answer is None:
            continue
        answered += 1
        expected = index.query(*arguments)
        assert (answer.items, answer.status, answer.cursor) == (expected.items, expected.status, expected.cursor)
        assert (answer.seen, answer.failed) == (expected.seen, ())
        if answer.cursor is not None:
            following = index.query_nowait(*(*arguments, None, None)[:4], 64, answer.cursor)
            assert following.items == index.query(*(*arguments, None, None)[:4], 64, answer.cursor).items
    # the core leaves unusual texts and numbers to the caller
    assert answered > len(KEYS)
    assert index.query_nowait("t", "k", cursor="none") is None
    index.put("t", 0, "other", 5, 1, T_MS)
    # a view lacks buffered entries
    assert index.query_nowait("t", "other") is None
    assert len(index.query_nowait("t", "k")) == 6
    index.flush()
    # the list of files has changed, and the next lookup makes a view of it
    assert len(index.query("t", "k")) == len(index.query_nowait("t", "k")) == 6
    index.close()
    assert index.query_nowait("t", "k") is None


def put_one_by_one(index, keys):
    for number, (topic, key) in enumerate(keys):
        index.put(topic, 0, key, 5_000_000 + number, 1, T_MS)


def put_and_look_up(index, keys):
    """The lookup closes the chunk and hashes its keys."""
    put_one_by_one(index, keys)
    assert len(index.query(*keys[0])) == 7


def put_as_columns(index, keys):
    names = ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")
    rows = [(topic, 0, key, 5_000_000 + number, 1, T_MS) for number, (topic, key) in enumerate(keys)]
    index.put_batch(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


@pytest.mark.parametrize("put", [put_one_by_one, put_and_look_up, put_as_columns])
def test_lookups_beside_a_buffer_find_all_that_was_put(index, put):
    """The buffer has one more entry of some keys, and a view has the answers of all others."""
    everywhere = [(topic, key) for topic in TOPICS for key in KEYS]
    index.query("t", "k")
    put(index, [("t", "k"), ("тема", "k"), ("t", "é"), (" t", "no file has it")])
    more = {("t", "k"), ("тема", "k"), ("t", "é")}
    for topic, key in everywhere:
        expected = 7 if (topic, key) in more else 6
        now = index.query_nowait(topic, key)
        assert now is None if (topic, key) in more else now is None or len(now) == expected
        assert len(index.query(topic, key)) == expected
    assert len(index.query(" t", "no file has it")) == 1
    assert not index.query("t", "no file has it")
    # the core leaves other topics and keys to the caller
    assert sum(index.query_nowait(*pair) is not None for pair in everywhere) >= 3


def test_the_core_answers_keys_of_any_characters(index):
    index.query("t", "k")
    assert [len(index.query_nowait("t", key)) for key in KEYS[:-2]] == [6] * len(KEYS[:-2])


def test_fields_that_are_made_later_are_those_of_any_answer(index):
    for arguments in (("t", "k"), ("t", "k", None, None, 2), ("t", "none"), ("none", "k")):
        lazy = index.query(*arguments)
        whole = replace(index.query(*arguments), explain=lazy.explain)
        assert lazy == whole == pickle.loads(pickle.dumps(lazy)) == copy.deepcopy(lazy) == copy.copy(lazy)
        assert repr(lazy) == repr(whole)
        assert index.query(*arguments).to_arrow() == whole.to_arrow()
        # by the core and by NumPy without the items
        for core in (compiled_core(), None):
            with using(core):
                documents = index.query(*arguments).to_dict()["items"]
            assert list(map(list, documents)) == [list(item.to_dict()) for item in whole]
            assert documents == [item.to_dict() for item in whole]
    page = index.query("t", "k", None, None, 4)
    following = index.query("t", "k", None, None, 4, page.cursor)
    assert [item.offset for item in (*page, *following)] == [1_000_002, 1_000_001, 1_000_000, 2, 1, 0]
    with pytest.raises(AttributeError, match="no attribute 'more'"):
        page.more  # noqa: B018


@pytest.mark.parametrize("is_plain", [True, False])
def test_an_answer_that_is_kept_keeps_no_file(index, is_plain):
    index.query("t", "k")
    if not is_plain:
        index.put("t", 0, "k", 2_000_000, 1, T_MS + 1_000_000_000)
    # the begin and end of a file are read when the caller uses `explain`
    answer = index.query("t", "k", None, T_MS + 2_000_000_000)
    index.put("t", 0, "other", 5, 1, T_MS + 1_500_000_000)
    index.flush()
    (file,) = [weakref.ref(handle) for handle in index.files() if handle.place == "unsealed"]
    upload(index, rounds=2)
    gc.collect()
    assert file() is None
    places = {"unsealed", "uploaded"} if is_plain else {"unsealed", "uploaded", "buffer"}
    assert {report.place for report in answer.explain.files} == places
    assert max(report.end_ms for report in answer.explain.files) == T_MS + 1_500_000_000
    assert len(answer) == 6 + (not is_plain)


def test_a_large_buffer_is_searched_entry_by_entry(index):
    """A lookup compares so many keys at most that are not hashed yet."""
    index.query("t", "k")
    for number in range(2_100):
        index.put("t", 0, f"other {number}", number, 1, T_MS)
    assert index.query_nowait("t", "k") is None
    assert len(index.query("t", "k")) == 6
    index.put("t", 0, "k", 5_000_000, 1, T_MS)
    assert len(index.query("t", "k")) == 7 and len(index.query("t", "other 7")) == 1
