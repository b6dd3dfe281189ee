"""Answer order, identity, pages and cursors are the same in every state of a file."""

import base64
import hashlib
import json
import string
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.core import compiled_core
from tests.support.rounds import upload
from tiered_index import Lookup
from tiered_index.base import kernels
from tiered_index.errors import InvalidCursor
from tiered_index.format.layout import NATIVE
from tiered_index.format.schema import Column, Schema
from tiered_index.service.read.answers.batch import Matches, best_answers
from tiered_index.service.read.answers.rows import concatenate, decode_cursor, encode_cursor, query_digest

T = 1_700_000_000_000
EXTENDED = Schema(
    "Extended", (*NATIVE.schema.extra, Column("zone", ">u8", True), Column("price", ">f8"), Column("tag", "S3"))
)

small = st.integers(0, 2)


def views():
    """Return the module of the compiled lookups, or skip the test."""
    compiled_core()
    return kernels.compiled_views()


def best_of(rows, limit):
    """Return the best answers of one lookup."""
    return best_answers(np.array([limit]), [Matches(np.zeros(len(rows), np.int64), rows)], EXTENDED)


ROW = st.tuples(*[small] * 6, st.sampled_from([0.0, 1.5]), st.sampled_from([b"", b"a", b"ab"]))


@given(st.lists(ROW, max_size=25), st.integers(1, 6), st.integers(0, 3))
def test_the_first_answers_are_a_sort_and_a_set(rows, limit, parts):
    """The answers equal sorted tuples, whatever the division of the rows into files."""
    names = ("second", "offset", "queue_id", "zone", "size", "topic_id", "price", "tag")
    array = np.zeros(len(rows), EXTENDED.row)
    for name, values in zip(names, zip(*rows, strict=True), strict=False):
        array[name] = values
    best = {}
    for second, offset, queue, zone, size, topic_id, price, tag in rows:
        identity = (offset, queue, zone)
        best[identity] = max(best.get(identity, ()), (second, size, price, tag.ljust(3, b"\0"), topic_id))
    ordered = sorted(((-value[0], -offset, queue, zone), value[1:]) for (offset, queue, zone), value in best.items())
    first_rows = concatenate([], EXTENDED)
    for part in range(parts + 1):  # file by file, as the budget does it
        first_rows = best_of(concatenate([first_rows, array[part :: parts + 1]], EXTENDED), limit).rows
    answers = []
    for second, offset, queue, zone, size, topic_id, price, tag in first_rows[list(names)].tolist():
        answers.append(((-second, -offset, queue, zone), (size, price, tag.ljust(3, b"\0"), topic_id)))
    assert answers == ordered[:limit]


def fill(index):
    for offset in range(12):
        index.put("t", offset % 2, "k", offset // 2, 1, T + 1000 * (offset // 5))


def test_a_file_is_skipped_only_below_the_last_answers_second(open_index):
    """Offsets decide ties at the page's last second, so a lookup must read a file that ends in that second."""
    index = open_index(local_keep_s=0, query_threads=1)
    for offset, second in ((9, 0), (5, 0), (7, 0), (3, 1), (8, 0), (1, 2)):
        index.put("t", 0, "k", offset, 1, T + 1000 * second)
        index.seal()
    expected = [1, 3, 9, 8, 7, 5]
    for _ in range(2):
        for count in range(1, 7):
            assert [i.offset for i in index.query("t", "k", max_count=count)] == expected[:count]
            (many,) = index.query_many([Lookup(topic="t", key="k", max_count=count)])
            assert [i.offset for i in many] == expected[:count]
        assert index.query("t", "k", max_count=1).explain.files_skipped >= 1
        index.run_lifecycle()


def test_every_changed_character_of_a_cursor_is_noticed(index):
    fill(index)
    cursor = index.query("t", "k", max_count=2).cursor
    letters = string.ascii_letters + string.digits + "-_+/= \n\u00e4\0"
    places = range(len(cursor))
    changes = [cursor[:at] + new + cursor[at + 1 :] for at in places for new in letters if new != cursor[at]]
    changes += [cursor + "A", cursor + "=", "=" + cursor, cursor * 2, " " + cursor, cursor + "\n"]
    for changed in (*changes, cursor[:-1], cursor[1:], cursor[::-1]):
        with pytest.raises(InvalidCursor):
            index.query("t", "k", max_count=2, cursor=changed)


def test_a_cursor_belongs_to_its_query(index):
    fill(index)
    index.put("u", 0, ["k", "l"], 1, 1, T)
    cursor = index.query("t", "k", 0, T + 5_000, max_count=2).cursor
    others = [(topic, key, 0, T + 5_000) for topic, key in ("uk", "tl")]
    for question in (*others, ("t", "k", 1_000, T + 5_000), ("t", "k", 0, T + 6_000), ("t", "k")):
        with pytest.raises(InvalidCursor, match="another query"):
            index.query(*question, cursor=cursor)
        with pytest.raises(InvalidCursor, match="another query"):
            index.query_many([Lookup(*question, cursor=cursor)])
    # the range counts by whole seconds, and the page size may change
    assert len(index.query("t", "k", 999, T + 5_999, max_count=100, cursor=cursor)) == 10


BODIES = [b"", b"5", b"null", b"{}", b"[]", b'"text"', b"[1]", b"\xff", b"[" * 5000, b'[2, "D", 1, 1, 1]']
BODIES += [b'[1, "D"]', b'[1, "D", 1, 1]', b'[1, "D", 1, 1, 1, 1]', b'[1, "D", 1, 1, 1']
BODIES += [b'[1, "D", %s, 1, 1]' % second for second in (b"1.0", b'"1"', b"null", b"1" + b"0" * 40)]


def test_a_forged_cursor_is_refused(index):
    fill(index)
    real = index.query("t", "k", max_count=2).cursor
    digest = json.loads(base64.urlsafe_b64decode(real + "===")[4:])[1]
    for body in BODIES:
        body = body.replace(b'"D"', json.dumps(digest).encode())
        forged = base64.urlsafe_b64encode(zlib.crc32(body).to_bytes(4, "big") + body).decode().rstrip("=")
        with pytest.raises(InvalidCursor):
            index.query("t", "k", max_count=2, cursor=forged)


@pytest.mark.parametrize("state", ["unsealed", "uploaded", "two files"])
def test_each_hidden_entry_is_counted_once_however_pages_are_cut(open_index, state):
    """An entry is put at three seconds and, at one of them, with two sizes. The message of the answer is put twice."""
    index = open_index(local_keep_s=0, items=2000)
    hidden = 0
    for number in range(3):
        for offset in range(40):
            again = offset % 4 == number
            for size in range(1 + again):
                for _ in range(1 + (number == 2 and size == again)):
                    index.put("t", 0, "k", offset, size, T + 1000 * (offset * 7 % 40 + 13 * number))
                hidden += 1
        if state == "two files":
            index.seal()
    if state != "unsealed":
        upload(index)
    hidden -= 40
    for count in (1, 2, 3, 7, 25, 39, 40, 1000):
        pages = list(index.query_all("t", "k", max_count=count))
        assert sum(page.explain.folded_entries for page in pages) == hidden, count
        assert sum(map(len, pages)) == 40
    before = index.health()["folded_entries"]
    explain = index.query_many([("t", "k"), ("t", "none")]).explain
    assert (explain.folded_entries, explain.to_dict()["folded_entries"]) == (hidden, hidden)
    assert index.health()["folded_entries"] - before == hidden


def test_an_answer_that_left_files_out_is_not_called_complete(open_index):
    """The newest file alone has `max_count` answers, so the lookup does not look for more."""
    index = open_index(query_threads=1)
    for second in range(3):
        index.put("t", 0, "k", second, 1, T + 1000 * second)
        upload(index)
    result = index.query("t", "k", max_count=1)
    assert ([item.offset for item in result], result.status) == ([2], "truncated")
    assert result.explain.files_skipped == 2
    assert [item.offset for item in index.query("t", "k", cursor=result.cursor)] == [1, 0]


@given(
    st.lists(st.integers(-(2**64) + 1, 2**64 - 1), min_size=1, max_size=5),
    st.binary(min_size=8, max_size=8).map(bytes.hex),
    st.integers(0, 200),
    st.sampled_from("Aa09-_+/=\n é"),
)
def test_the_core_takes_cursors_apart_as_python_does(key, digest, place, letter):
    core = views()
    cursor, fits = encode_cursor(tuple(key), digest), all(abs(number) < 2**63 for number in key)
    assert decode_cursor(cursor, digest, len(key)) == tuple(key)
    assert core.cursor_parts(cursor, len(key)) == ((digest, tuple(key)) if fits else None)
    assert core.cursor_parts(cursor, len(key) + 1) is None
    changed = cursor[:place] + letter + cursor[place + 1 :]
    if changed != cursor:
        assert core.cursor_parts(changed, len(key)) is None
        with pytest.raises(InvalidCursor):
            decode_cursor(changed, digest, len(key))
    for wrong in (None, 5, b"", "", cursor * 20, cursor.encode()):
        assert core.cursor_parts(wrong, len(key)) is None


@pytest.mark.parametrize("body", BODIES)
def test_the_core_leaves_forged_cursors_to_python(body):
    body = body.replace(b'"D"', b'"%s"' % (16 * b"a")).replace(b" ", b"")
    forged = base64.urlsafe_b64encode(zlib.crc32(body).to_bytes(4, "big") + body).decode().rstrip("=")
    assert views().cursor_parts(forged, 3) is None


@pytest.mark.parametrize("topic", ["orders", 'a "b"\\', "zürich", "日本", "\x00\x1f\x7f", "😀"])
def test_the_digest_is_that_of_a_json_list(topic):
    text = json.dumps([topic, f"k {topic}", -5, 9])
    assert query_digest(topic, f"k {topic}", -5, 9) == hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
