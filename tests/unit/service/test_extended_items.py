"""A subclass of `IndexItem` has further columns for other systems. They survive every state, also without the class."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from tests.support.batches import batch
from tests.support.core import compiled_core, using
from tests.support.merging import BASE_MS, HOUR_MS, RegionItem
from tests.support.pages import items_by_pages
from tests.support.rounds import upload
from tiered_index import IndexItem, IndexReader, KeyedIndexItem, Lookup, column
from tiered_index.errors import BackPressure, ConfigError, InvalidArgument, SchemaMismatch
from tiered_index.format.compacted import BLOCK_BYTES
from tiered_index.format.packed import _columns_of
from tiered_index.format.schema import Schema
from tiered_index.server.http.problems import Redaction
from tiered_index.server.http.wire import table_of

T = 1_700_000_000_000
ROW = batch(1, offset=[1])


def class_of(base=KeyedIndexItem, slots=False, **columns):
    """Return a class `Named` of items with further columns."""
    made = type("Named", (base,), {"__annotations__": dict.fromkeys(columns, object), **columns})
    return dataclass(frozen=True, kw_only=True, slots=slots)(made)


PlainItem = class_of(IndexItem, zone=column(">i8", identity=True))
NarrowItem = class_of(region=column(">u2"), weight=column(">f4"), note=column("S4"))


def put(index, region, price=1.5, tag=b"ab", offset=1, **more):
    return index.put("t", 0, ["k"], offset, 1, T, region=region, price=price, tag=tag, **more)


def seen(items):
    return [(i.offset, i.region, i.price, i.tag) for i in items]


def test_further_columns_live_through_every_state(open_index, storage, clock, tmp_path):
    index = open_index("root", item_type=RegionItem, local_keep_s=0)
    put(index, 7)
    put(index, 5, offset=2)
    put(index, 7, price=2.5)  # the same identity: the greater price counts
    put(index, 5)  # another region is another answer
    arrays = {"offset": [8], "region": [65_535], "price": [4], "tag": pa.array([b"q"], pa.binary())}
    index.put_batch(pa.RecordBatch.from_pydict(ROW | arrays))
    expected = [(8, 65_535, 4.0, b"q\0\0\0"), (2, 5, 1.5, b"ab\0\0"), (1, 5, 1.5, b"ab\0\0"), (1, 7, 2.5, b"ab\0\0")]

    def check(ask, kind=RegionItem):
        result = ask("t", "k")
        assert seen(result) == expected
        assert kind is None or {type(item) for item in result} == {kind}
        assert seen(items_by_pages(ask, "t", "k", max_count=1)) == expected

    check(index.query)
    index.flush()
    check(index.query)
    with IndexReader.open(root=tmp_path / "root", storage_backend=storage, clock=clock) as reader:
        check(reader.query, None)
    upload(index)
    check(index.query)
    # the reader makes the class from the declaration
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        check(reader.query, None)
        item = reader.query("t", "k").items[0]
        assert (type(item).__name__, item.to_dict()["tag"]) == ("RegionItem", b"q\0\0\0".hex())
    with IndexReader.open(storage_backend=storage, clock=clock, item_type=RegionItem) as reader:
        check(reader.query)
    with pytest.raises(SchemaMismatch):
        IndexReader.open(storage_backend=storage, clock=clock, item_type=PlainItem)
    index.close()
    with open_index("root", slots=..., items=...) as again:
        check(again.query, None)
        put(again, 1, offset=100)
        assert again.query("t", "k").items[0].region == 1
    with pytest.raises(SchemaMismatch):
        open_index("root", item_type=PlainItem)


def test_a_schema_without_fingerprint_and_with_negative_identities(open_index):
    index = open_index(item_type=PlainItem)
    for zone in (5, -5, -(2**63), 2**63 - 1):
        index.put("t", 0, "Aa", 1, 1, T, zone=zone)
    for _ in range(2):
        # these have the same Java hash, and nothing else distinguishes them
        assert [i.zone for i in index.query("t", "BB")] == [-(2**63), -5, 5, 2**63 - 1]
        cursor = index.query("t", "Aa", max_count=1).cursor
        assert [i.zone for i in index.query("t", "Aa", cursor=cursor)] == [-5, 5, 2**63 - 1]
        (many,) = index.query_many([Lookup(topic="t", key="Aa", cursor=cursor)])
        assert [i.zone for i in many] == [-5, 5, 2**63 - 1]
        upload(index)


# longer bytes would be cut, and greater numbers become infinite
WRONG = {
    "region": (-1, 65_536, 1.5, "x", None),
    "weight": ("abc", 1e39, None),
    "note": ("ab", 7, b"longer than it is", b"abcd\0", None),
    "colour": (1,),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_further_column_is_refused(open_index, name):
    index = open_index(item_type=NarrowItem)
    good = {"region": 1, "weight": float("inf"), "note": b"a\0b"}
    problem = "note must be bytes, at most 4, " if name == "note" else name
    for value in WRONG[name]:
        with pytest.raises(InvalidArgument, match=problem):
            index.put("t", 0, "k", 1, 1, T, **good | {name: value})
        for columns in ([value], np.array([value], object)):
            with pytest.raises(InvalidArgument, match=name):
                index.put_batch(ROW | {n: [v] for n, v in good.items()} | {name: columns})
    if name in good:
        with pytest.raises(InvalidArgument, match=name):
            index.put("t", 0, "k", 1, 1, T, **{n: v for n, v in good.items() if n != name})
        with pytest.raises(InvalidArgument, match=name):
            index.put_batch(ROW | {n: [v] for n, v in good.items() if n != name})
    assert index.health()["buffered_entries"] == 0
    index.put("t", 0, "k", 2, 1, T, **good)
    (item,) = index.query("t", "k")
    assert (item.region, item.weight, item.note) == (1, float("inf"), b"a\0b\0")


# the bytes of a block beside the columns of each item
SPARE = BLOCK_BYTES - Schema.of(KeyedIndexItem).item.itemsize
RESERVED = "status Failed position begin_ms end_ms cursor lookup to_dict error lost freshness expired_before_ms"
NO_CLASSES = [
    (class_of(blob=column(f"S{SPARE + 1}")), "an entry of Named has 262,145 bytes"),
    (class_of(zone=column(">u2", default=-1)), "default of Named: zone"),
]
for name in RESERVED.split():
    NO_CLASSES.append((class_of(**{name: column(">u4")}), rf"Named\.{name} has the name of a field of answers"))
for kind in (">u8", ">i4"):
    # no writer could fill such fingerprints
    NO_CLASSES.append((class_of(IndexItem, fingerprint=column(kind)), r"Named\.fingerprint must have .* '>u4'"))


@pytest.mark.parametrize(("item_type", "problem"), NO_CLASSES)
def test_a_class_that_no_index_can_have(open_index, item_type, problem):
    with pytest.raises(ConfigError, match=problem):
        open_index(item_type=item_type)


def test_an_entry_may_be_as_large_as_a_block_of_a_file_and_the_buffers_bound_counts_it(open_index):
    """Compaction of a larger one failed at each round."""
    index = open_index(item_type=class_of(blob=column(f"S{SPARE}")), items=3, buffer_max_bytes=3 * BLOCK_BYTES + 2000)
    for offset in range(3):
        index.put("t", 0, "k", offset, 1, T, blob=b"b")
    with pytest.raises(BackPressure):
        index.put("t", 0, "k", 3, 1, T, blob=b"b")
    upload(index)
    assert [item.offset for item in index.query("t", "k")] == [2, 1, 0]


VALUES = [bytes([number] * (16 - zeros)) + bytes(zeros) for zeros in (0, 1, 3, 15, 16) for number in (0, 7, 255)]
BYTES = {
    "lists": lambda values: values,
    "numpy": lambda values: np.array(values, "S16"),
    "numpy void": lambda values: np.array(values, "V16"),
    "numpy objects": lambda values: np.array(values, object),
    "binary": lambda values: pa.array(values, pa.binary()),
    "large binary": lambda values: pa.array(values, pa.large_binary()),
    "fixed size": lambda values: pa.array(values, pa.binary(16)),
    "view": lambda values: pa.array(values, pa.binary_view()),
}


def test_bytes_of_fixed_width_keep_every_byte(open_index, storage):
    """One UUID of 256 ends in a zero byte, which ends a text in NumPy and C."""
    digests = class_of(digest=column("S16"), timestamp=column(">i8", default=7))
    index, expected = open_index(item_type=digests, items=500), dict(enumerate(VALUES))
    for number, value in expected.items():
        index.put("put", 0, "k", number, 1, T, digest=value)
    for topic, make in BYTES.items():
        index.put_batch(batch(len(VALUES), topic=topic, digest=make(VALUES)))

    def check(opened):
        for topic in ("put", *BYTES):
            answer = opened.query(topic, "k")
            assert {item.offset: item.digest for item in answer} == expected, topic
            table = answer.to_arrow()
            assert dict(zip(table["offset"].to_pylist(), table["digest"].to_pylist(), strict=True)) == expected
            assert {item.offset: item.digest for item in opened.query_many([(topic, "k")])[0]} == expected
            documents = {item["offset"]: item["digest"] for item in answer.to_dict()["items"]}
            assert documents == {number: value.hex() for number, value in expected.items()}

    check(index)
    index.flush()
    check(index)
    upload(index)
    for kind in (digests, None):
        with IndexReader.open(storage_backend=storage, item_type=kind) as reader:
            check(reader)
            for rows in reader.export("put"):
                pairs = zip(rows.column("offset").to_pylist(), rows.column("digest").to_pylist(), strict=True)
                assert all(expected[offset] == digest for offset, digest in pairs)
                # a column of the caller may have this name
                assert {*rows.column("timestamp").to_pylist()} == {7} != {*rows.column("timestamp_ms").to_pylist()}


def test_defaults_of_columns_are_stored(open_index):
    columns = {"zone": column(">u2", default=9), "mark": column("S2", default=b"m"), "size_class": column(">u1")}
    index = open_index(item_type=class_of(**columns))
    index.put("t", 0, "k", 2, 1, T, size_class=1)
    index.put_batch(ROW | {"size_class": [2], "mark": [b"xy"]})
    assert [(i.zone, i.mark, i.size_class) for i in index.query("t", "k")] == [(9, b"m\0", 1), (9, b"xy", 2)]
    with pytest.raises(InvalidArgument, match="'size_class' of schema Named is missing"):
        index.put("t", 0, "k", 3, 1, T)
    with pytest.raises(InvalidArgument, match="'size_class' is missing"):
        index.put_batch(ROW)


def test_an_older_index_with_such_a_column_stays_readable_and_writable(open_index, storage, clock, monkeypatch):
    older = class_of(status=column(">u2"), lookup=column(">u2"))
    with monkeypatch.context() as patch:
        patch.setattr(Schema, "clashing", lambda *_: None)
        open_index("root", item_type=older).close()
    index = open_index("root", item_type=older)
    index.put("t", 0, "k", 1, 2, T, status=3, lookup=4)
    upload(index)
    for kind in (older, None):
        with IndexReader.open(storage_backend=storage, clock=clock, item_type=kind) as reader:
            (answer,) = results = reader.query_many([("t", "k")])
            assert (answer.status, answer.items[0].status, answer.items[0].lookup) == ("complete", 3, 4)
            # a table cannot have two columns of one name
            with pytest.raises(InvalidArgument, match="have a column 'lookup'"):
                table_of(results, Redaction())


@pytest.mark.parametrize("way", ["NumPy", "loops"])
@pytest.mark.parametrize(("width", "columns"), [(456, 64), (464, 65)])
def test_more_columns_than_the_core_has_space_for(merging, way, width, columns):
    """The compiled core has space for 64 columns of packed runs. Eight bytes are one column."""
    traced = class_of(trace=column(f"S{width}"))
    assert len(_columns_of(Schema.of(traced)).order) == columns
    traces = {f"k{number}": bytes(range(number + 1, number + 101)).ljust(width, b"\0") for number in range(3)}

    def check():
        for opened in (life.index, life.reader()):
            life.check(opened)
            for key, trace in traces.items():
                assert {item.trace for item in opened.query("t", key, max_count=1000)} == {trace}

    with using(None if way == "NumPy" else compiled_core()):
        life = merging(item_type=traced, settings={"local_keep_s": 3600})
        for hour in range(2):
            for number, (key, trace) in enumerate([*traces.items()] * 7):
                life.put([(BASE_MS + hour * HOUR_MS + number * 1000, key)], trace=trace)
            life.publish()
        assert {handle.place for handle in life.index.files()} == {"uploaded"}
        check()
        life.later()
        assert life.merge().entries == 42 and not life.state.files
        life.index.run_lifecycle()
        check()


@pytest.mark.parametrize("slots", [False, True])
def test_identity_columns_distinguish_entries_without_offsets(open_index, slots):
    columns = {"event": column(">i8", identity=True), "share": column(">f8"), "tag": column("S4", default=b"ab")}
    index = open_index(item_type=class_of(slots=slots, **columns))
    for event, second in ((7, 0), (8, 1), (9, 2), (9, 2)):
        index.put("t", 0, "k", 0, 0, T + second * 1000, event=event, share=float("nan"))
    result = index.query("t", "k")
    assert [i.event for i in result] == [9, 8, 7]
    assert result.explain.folded_entries == 0  # the same entry, put twice
    if not slots:
        # a cached property leaves such an attribute
        object.__setattr__(result[0], "beside", 1)
    document = result[0].to_dict()
    assert (document["event"], document["tag"], "beside" in document) == (9, b"ab\0\0".hex(), False)
