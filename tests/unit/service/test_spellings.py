"""A byte string has one spelling as a key, and an index is asked by each of its spellings."""

import pytest

from tests.support.rounds import upload
from tiered_index import Lookup
from tiered_index.spelling import is_plain, key_text, other_spellings
from tiered_index.types import MAX_KEY_UNITS

T_MS = 1_700_000_000_000
LONG_42 = b"\0\0\0\0\0\0\0*"


SPELLINGS = {b"order-1": "order-1", "bestellung-ä".encode(): "bestellung-ä", LONG_42: "0x000000000000002a"}
SPELLINGS |= {b"a\tb": "0x610962", b"a\x7f": "0x617f", b"\xff": "0xff", b"0x2a": "0x2a"}
SPELLINGS["\x80\u2028".encode()] = "\x80\u2028"
OTHERS = {"order-1": (), "0x31": ("1",), "0xFF": ("0xff",), "0xff": (), "0xefbfbd": ("\ufffd",), "0x": (), "0x123": ()}
OTHERS |= {"0x000000000000002a": ("\0\0\0\0\0\0\0*",), "a\tb": ("0x610962",)}
OTHERS["0x000000000000002A"] = ("0x000000000000002a", "\0\0\0\0\0\0\0*")


def test_a_byte_string_has_one_spelling_and_a_key_others():
    assert {data: key_text(data) for data in SPELLINGS} == SPELLINGS
    assert [is_plain(text) for text in SPELLINGS.values()] == [text[:2] != "0x" for text in SPELLINGS.values()]
    assert {key: other_spellings(key) for key in OTHERS} == OTHERS


# in an index of an earlier version, of this one, a text that looks like digits, and a text as digits
ENTRIES = [LONG_42.decode(), "0x000000000000002b", "0x31323334", "1234", "a\tb", "plain"]
ASKED = {
    "0x000000000000002a": [0],
    "0x000000000000002A": [0],
    LONG_42.decode(): [0],
    "0x000000000000002b": [1],
    "\0\0\0\0\0\0\0+": [1],
    "0x31323334": [2, 3],
    "1234": [3],
    "0x610962": [4],
    "a\tb": [4],
    "plain": [5],
    "0x" + "00" * (MAX_KEY_UNITS // 2 - 1): [],
}


def filled(index):
    for number, key in enumerate(ENTRIES):
        index.put("t", 0, key, number, 10, T_MS - 1_000 * number)
    return index


def offsets(answer):
    assert answer.status == "complete"
    return [item.offset for item in answer.items]


@pytest.mark.parametrize("state", ["buffered", "flushed", "uploaded"])
def test_an_entry_is_found_by_each_spelling_of_its_key(open_index, state):
    index = filled(open_index())
    if state != "buffered":
        index.flush()
    if state == "uploaded":
        upload(index)
    for key, expected in ASKED.items():
        assert offsets(index.query("t", key)) == expected, key
    assert [offsets(answer) for answer in index.query_many([("t", key) for key in ASKED])] == list(ASKED.values())
    # pages continue over all spellings
    first = index.query("t", "0x31323334", max_count=1)
    assert (first.status, [item.offset for item in first.items]) == ("truncated", [2])
    (second,) = index.query_many([Lookup("t", "0x31323334", cursor=first.cursor)])
    assert offsets(second) == [3]
