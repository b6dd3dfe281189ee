"""`put` and `put_batch` refuse wrong arguments with `InvalidArgument`.

The error names the argument. Nothing changes.
"""

import datetime
import decimal
import fractions

import numpy as np
import pyarrow as pa
import pytest

from tests.support.batches import batch
from tests.support.cases import each
from tests.support.rounds import upload
from tiered_index import IndexService, hash_key
from tiered_index.errors import BackPressure, InvalidArgument
from tiered_index.service.jobs.erase import EraseRequest

GOOD = {"topic": "t", "queue_id": 0, "keys": "k", "offset": 1, "size": 2, "timestamp_ms": 1_700_000_000_000}
NO_INTEGERS = [None, True, np.True_, 1.0, float("nan"), "1", b"1", 1j, [1], np.float64(1)]
NO_INTEGERS += [decimal.Decimal(1), fractions.Fraction(1)]
FACE = "\N{GRINNING FACE}"
NO_KEYS = [
    None,
    5,
    b"k",
    bytearray(b"k"),
    memoryview(b"k"),
    "",
    [""],
    ["a", ""],
    ["a", None],
    ["a", 5],
    [b"a"],
    "x" * 32_768,
    [FACE * 16_384],
    [["a"]],
]
LIMITS = {"queue_id": 2**31 - 2, "offset": 2**63 - 1, "size": 2**31 - 1, "timestamp_ms": 253_402_300_799_999}


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    """An index that refuses all puts of the test."""
    root = tmp_path_factory.mktemp("refusing")
    with IndexService.open(root=root, storage="memory://refusing", slots=7, items=20, background=False) as index:
        yield index


def refused(about, call, *arguments, **more):
    with pytest.raises(InvalidArgument, match=about):
        call(*arguments, **more)


def unchanged(index):
    assert index.health()["buffered_entries"] == 0
    index.flush()
    assert not index.files()
    assert index.durable_positions() == {}


class Member(str):
    """A text that is formatted as another one, like the members of `class Topic(str, Enum)`."""

    def __str__(self):
        return "Topic.ORDERS"


def test_texts_may_be_members_of_an_enumeration(index):
    """All later keys of the topic were hashed with the member's format. No lookup by the topic's name found them."""
    member = Member("orders")
    index.put(member, 0, member, 1, 1, 1_700_000_000_000, source=member, source_position=7)
    index.put("orders", 0, "orders", 2, 1, 1_700_000_000_000)
    for _ in range(2):
        for name in ("orders", member):
            assert [item.offset for item in index.query(name, name)] == [2, 1]
            assert [[item.offset for item in answer] for answer in index.query_many([(name, name)])] == [[2, 1]]
        index.flush()
    assert index.durable_position("orders") == 7
    assert hash_key(member, member) == hash_key("orders", "orders")


WRONG = {name: [*NO_INTEGERS, -1, most + 1, 2**64, -(10**30), np.int64(-1)] for name, most in LIMITS.items()}
WRONG["topic"] = NO_TOPICS = [None, 5, b"t", "", " ", "\t\n ", "x" * 1025, FACE * 513, ["t"]]
WRONG |= {"keys": NO_KEYS, "topic_id": (-1, 2**31, True, 1.0, "5"), "region": [5]}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused(refusing, name):
    for value in WRONG[name]:
        refused(name.removesuffix("s"), refusing.put, **(GOOD | {name: value}), source="s", source_position=1)
    unchanged(refusing)


@pytest.mark.parametrize("name", list(LIMITS))
def test_numbers_at_their_bounds_and_of_any_width_are_taken(index, name):
    for value in (0, LIMITS[name], np.int8(3), np.uint64(3)):
        index.put(**(GOOD | {name: value}))
    index.flush()
    assert index.query("t", "k").items
    last = LIMITS[name]
    arrays = np.array([0, last], ">u8"), pa.array([0, 5], pa.uint8()), np.array([0, 5], object), np.arange(4)[::2]
    for good in (*arrays, [0, last], (0, 1)):
        index.put_batch(batch(2) | {name: good})


def test_the_longest_topic_and_key_are_found(index):
    for topic, key in (("x" * 1024, "y" * 32_767), (FACE * 512, FACE * 16_383 + "z")):
        index.put(topic, 0, [key], 1, 1, 1_700_000_000_000)
        assert len(index.query(topic, key)) == 1
    upload(index)
    assert len(index.query("x" * 1024, "y" * 32_767)) == 1


@pytest.mark.parametrize("odd", ["t\ud800", "t\ud83d\ude00", "\udfff"], ids=ascii)
def test_topics_keys_and_sources_are_valid_unicode(index, odd):
    columns = {"queue_id": [0], "offset": [1], "size": [1], "timestamp_ms": [1]}
    for call in (
        lambda: index.put(odd, 0, "k", 1, 1, 1),
        lambda: index.put("t", 0, odd, 1, 1, 1),
        lambda: index.put("t", 0, ["k", odd], 1, 1, 1),
        lambda: index.put("t", 0, "k", 1, 1, 1, source=odd, source_position=1),
        lambda: index.put_batch({"topic": [odd], "key": ["k"], **columns}),
        lambda: index.put_batch({"topic": ["t"], "key": [odd], **columns}),
        lambda: index.query(odd, "k"),
        lambda: index.query("t", odd),
        lambda: index.query_many([(odd, "k")]),
        lambda: index.query_many([("t", "k"), ("t", odd)]),
        lambda: index.messages(odd, "k", source=None),
        lambda: index.export([odd]),
        lambda: EraseRequest(odd),
        lambda: EraseRequest("t", keys=(odd,)),
    ):
        with pytest.raises(InvalidArgument, match="Unicode"):
            call()
    assert index.put("t", 0, "k", 1, 1, 1, source="s", source_position=1) == 1


def test_keys_count_once_each_and_may_be_any_iterable(index):
    assert index.put(**(GOOD | {"keys": ["a", "b", "a"]})) == 2
    assert index.put(**(GOOD | {"keys": (k for k in "cd")})) == 2
    assert index.put(**(GOOD | {"keys": {"e": 1}})) == 1
    assert index.put(**(GOOD | {"keys": []}), source="s", source_position=3) == 0
    index.flush()
    assert index.durable_position("s") == 3
    assert all(len(index.query("t", key)) == 1 for key in "abcde")


@pytest.mark.parametrize(
    "pair", [("s", None), (None, 1), ("", 1), (5, 1), ("s", -1), ("s", 2**63), ("s", True), ("s", 1.0), ("s", "1")]
)
def test_source_and_position_come_together(refusing, pair):
    source, position = pair
    refused("source", refusing.put, **GOOD, source=source, source_position=position)
    refused("source", refusing.put_batch, batch(1), source, position)
    unchanged(refusing)


def test_a_topic_id_means_one_topic(index):
    index.put(**GOOD, topic_id=5)
    refused("already means", index.put, **(GOOD | {"topic": "u"}), topic_id=5)
    refused("already means", index.put_batch, batch(2) | {"topic": ["t", "u"], "topic_id": [5, 5]})
    refused("already means", index.put_batch, batch(2) | {"topic": ["v", "u"], "topic_id": [6, 6]})
    refused("region", index.put_batch, batch(1) | {"region": [5]})
    assert index.health()["buffered_entries"] == 1
    assert index.put(**(GOOD | {"topic": "u"}), topic_id=6) == 1  # the refused call gave the id 6 no meaning


def test_a_call_that_is_pushed_back_gives_a_topic_id_no_meaning(open_index):
    index = open_index(buffer_max_entries=2)
    index.put(**(GOOD | {"keys": ["a", "b"]}))
    with pytest.raises(BackPressure):
        index.put(**(GOOD | {"topic": "u"}), topic_id=7)
    with pytest.raises(BackPressure):
        index.put_batch(batch(1) | {"topic": ["v"], "topic_id": [8]})
    index.flush()
    index.put(**(GOOD | {"topic": "w"}), topic_id=7)
    index.put(**(GOOD | {"topic": "w"}), topic_id=8)
    assert len(index.query("w", "k")) == 1


@pytest.mark.parametrize("name", ["topic", "queue_id", "key", "offset", "size", "timestamp_ms"])
def test_every_column_is_there_and_as_long_as_the_others(refusing, name):
    refused(name, refusing.put_batch, {n: v for n, v in batch(3).items() if n != name})
    refused("ragged", refusing.put_batch, batch(3) | {name: batch(2)[name]})
    refused(name, refusing.put_batch, batch(3) | {name: pa.array([*batch(2)[name], None])})
    refused(name, refusing.put_batch, batch(3) | {name: [*batch(2)[name], None]})
    for value in (5, None):
        refused(None, refusing.put_batch, batch(3) | {name: value})
    for value in (None, 5, "topic", [1], b""):
        refused("batch", refusing.put_batch, value)
    unchanged(refusing)


NO_NUMBERS = [
    *([1.0, 2.0], [True, False], ["1", "2"], [b"1", b"2"], [1, "2"], [1, 2.5], [1, float("nan")]),
    *map(np.array, ([1.0, np.nan], [True, False], ["1", "2"], [[1, 2]], [1 + 0j, 2])),
    *(np.array([1, "2"], object), np.array([1, 2], "m8[s]"), np.ma.masked_array([1, 2], [True, False])),
    *map(pa.array, ([1.0, 2.0], [True, False], ["1", "2"])),
    pa.array([1, 2]).dictionary_encode(),
]


NO_TEXTS = [
    *([1, 2], ["a", 2], ["ä", 2], ["a", ""], ["ä", ""], [b"a", b"b"], ["a", float("nan")]),
    *(np.array([b"a", b"b"]), np.array([["a", "b"]]), np.array(["a", None], object)),
    np.ma.masked_array(["a", "b"], [True, False]),
    *map(pa.array, ([b"a", b"b"], [1, 2], ["a", None])),
    pa.array(["a", None]).dictionary_encode(),
    pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["a", None])),
    pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int32()), pa.array([5])),
]


def test_text_columns_come_in_many_forms(index):
    both, sliced = ["ä", "b"], ["x", "ä", "b"]
    forms = [
        *(both, tuple(both), np.array(both), np.array(both, object), np.array(["ä", "?", "b"])[::2]),
        *(pa.array(both, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())),
        *(pa.array(both).dictionary_encode(), pa.array(sliced).slice(1, 2), pa.chunked_array([sliced]).slice(1)),
        *(pa.chunked_array([["ä"], ["b"]], kind) for kind in (pa.string(), pa.large_string())),
        pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.uint64()), pa.array(both)),
    ]
    for number, form in enumerate(forms):
        columns = batch(2) | {"key": form, "offset": [number, number]}
        assert index.put_batch(columns) == 2
        assert index.put_batch(batch(2) | {"topic": form, "offset": [number, number]}) == 2
    assert len(index.query("t", "ä")) == len(index.query("t", "b")) == len(forms)
    assert len(index.query("ä", "k")) == len(index.query("b", "k")) == len(forms)


def test_rows_have_an_entry_for_each_of_their_keys(index, refusing):
    several = pa.array(["a", "b", None, "d"]), pa.array(["x", None, None, "z"], pa.large_string())
    rows = batch(4) | {"offset": [1, 2, 3, 4], "topic": ["t", "t", "t", "u"], "key": several}
    assert index.put_batch(rows, "s", 1) == 5
    whole = batch(2) | {"offset": np.array([5, 6]), "key": (pa.array(["m", "n"]), pa.array(["o", "p"]))}
    assert index.put_batch(whole) == 4
    whole["offset"][:] = 0
    index.flush()
    answers = {f"{topic} {key}": index.query(topic, key) for topic in "tu" for key in "abdxzmnop"}
    answered = {name: [item.offset for item in answer] for name, answer in answers.items() if len(answer)}
    singles = {"t a": 1, "t b": 2, "t x": 1, "u d": 4, "u z": 4, "t m": 5, "t n": 6, "t o": 5, "t p": 6}
    assert answered == {name: [offset] for name, offset in singles.items()}
    refused("ragged", refusing.put_batch, rows | {"key": (several[0], several[1][:3])})
    refused("ragged", refusing.put_batch, rows | {"key": (several[0][:3], several[1][:3])})
    refused("key", refusing.put_batch, rows | {"key": (several[0], pa.array([1, 2, 3, 4]))})
    refused("key", refusing.put_batch, rows | {"key": (several[0], pa.array(["x", "", "y", "z"]))})


T = GOOD["timestamp_ms"]
MOMENTS = [T, T + 1999]
DATES = [datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC) for ms in MOMENTS]
NANOSECONDS = [T * 10**6 + 10**9 - 1, T * 10**6 + 2 * 10**9 - 1]
TIMES = [
    *(pa.array([ns // 1000**n for ns in NANOSECONDS], pa.timestamp(unit)) for n, unit in enumerate(("ns", "us", "ms"))),
    *(pa.array([T // 1000, T // 1000 + 1], pa.timestamp("s")), pa.array(MOMENTS, pa.timestamp("ms", "UTC"))),
    pa.table({"at": pa.array(MOMENTS, pa.timestamp("ms"))}).to_pandas()["at"],
    *(np.array(MOMENTS, "M8[ms]"), np.array(MOMENTS, "M8[ms]").astype("M8[ns]"), np.array(DATES, object)),
    *([np.datetime64(ms, "ms") for ms in MOMENTS], DATES, [at.replace(tzinfo=None) for at in DATES]),
]
NO_TIMES = [
    *(np.array(["2023-11-14", "NaT"], "M8[ms]"), ["2023-11-14T00:00:00"] * 2, np.array([1.0, 2.0]), [1, None]),
    # they are not wrapped around
    *(pa.array([T // 1000, time], pa.timestamp("s")) for time in (2**62, 2**62 + T // 1000, -(2**62))),
    *(pa.array([T, -1], pa.timestamp(unit)) for unit in ("us", "ns")),
]


def test_times_of_each_form_keep_their_second(index):
    for number, times in enumerate(TIMES):
        index.put_batch(batch(2, key=str(number), timestamp_ms=times))
        assert [item.timestamp_ms for item in index.query("t", str(number))] == [T + 1000, T], times


def of_wrong_values(name):
    if name in ("topic", "key"):
        return NO_TEXTS
    over = LIMITS[name] + 1
    arrays = np.array([0, -1]), np.array([0, over], np.uint64), pa.array([0, -1], pa.int8())
    lists = [[0, wrong] for wrong in (-1, over, 2**64, -(2**70))]
    return [*NO_NUMBERS, *arrays, *lists, *(NO_TIMES if name == "timestamp_ms" else [])]


@pytest.mark.parametrize("name", ["topic", "key", *LIMITS])
def test_a_column_of_wrong_values_is_refused(refusing, name):
    for values in of_wrong_values(name):
        refused(name, refusing.put_batch, batch(2) | {name: values})
        if isinstance(values, pa.Array):
            refused(name, refusing.put_batch, batch(2) | {name: pa.chunked_array([values])})
    unchanged(refusing)


def test_batches_are_tables_and_days_are_their_midnight(index):
    table = pa.table(batch(2, timestamp_ms=MOMENTS))
    index.put_batch(pa.concat_tables([table, table]))
    assert [item.timestamp_ms for item in index.query("t", "k")] == [T + 1000, T]
    refused(None, index.put_batch, pa.table([pa.array([1]), pa.array([1])], names=["a", "a"]))
    index.put_batch(batch(2, key="day", timestamp_ms=np.array(["2023-11-14", "2023-11-15"], "M8[D]")))
    assert [item.timestamp_ms % 86_400_000 for item in index.query("t", "day")] == [0, 0]


def test_a_wrong_query_is_refused(index):
    index.put(**GOOD)
    wrong = each(begin_ms=(1.0, float("nan")), end_ms=["1"], max_count=(0, -1, True, None))
    wrong += each(cursor=(5, b"x", "", "\u00e4", "AAAA", "A" * 10_000))
    for bad in (*wrong, {"begin_ms": 2, "end_ms": 1}):
        refused(None, index.query, "t", "k", **bad)
    for topic in NO_TOPICS:
        refused("topic", index.query, topic, "k")
    for key in (None, 5, b"k", "", "x" * 32_768):
        refused("key", index.query, "t", key)


def test_wide_ranges_and_counts_are_fine(index):
    index.put(**GOOD)
    upload(index)
    index.put(**(GOOD | {"offset": 7}))
    for limits in ((-(10**30), 10**30), (None, 2**63), (-1, None), (-5, -1)):
        result = index.query("t", "k", *limits, max_count=10**30)
        assert (len(result), result.status) == (0 if limits == (-5, -1) else 2, "complete")
    assert len(index.query("t", "k", np.int64(0), np.int64(2**62), np.int32(5))) == 2


class PolarsLike:
    """Export texts as views, and categories as dictionaries of views, as Polars does."""

    def __init__(self, columns):
        topics = pa.DictionaryArray.from_arrays(pa.array([0] * len(columns["key"]), pa.uint32()), pa.array(["t"]))
        views = {"topic": topics.cast(pa.dictionary(pa.uint32(), pa.string_view()))}
        views["key"] = pa.array(columns["key"], pa.string_view())
        views["timestamp_ms"] = pa.array(columns["timestamp_ms"]).cast(pa.timestamp("ms", "UTC"))
        self._table = pa.table({**columns, **views})

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def filtered_frame(columns):
    """Return a pandas frame whose index is not a plain count, and therefore becomes a column."""
    return pytest.importorskip("pandas").DataFrame(columns).query("offset < 3")


@pytest.mark.parametrize("make", [filtered_frame, PolarsLike, pa.table])
def test_data_frames_are_batches(index, make):
    columns = {name: [value] * 2 for name, value in GOOD.items() if name != "keys"} | {"key": ["a", "b"]}
    assert index.put_batch(make(columns | {"offset": [1, 2]}), "s", 7) == 2
    assert [item.offset for key in "ab" for item in index.query("t", key)] == [1, 2]
    index.flush()
    assert index.durable_position("s") == 7
