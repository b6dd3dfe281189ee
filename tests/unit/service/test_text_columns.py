"""Text columns: text in every state and form of an answer, UTF-8 of a fixed width in files."""

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from tests.support.batches import batch
from tests.support.merging import BASE_MS
from tests.support.rounds import upload
from tiered_index import IndexReader, KeyedIndexItem, column
from tiered_index.errors import ConfigError, InvalidArgument, SchemaMismatch
from tiered_index.format.schema import KEYED_SCHEMA, Column, Schema
from tiered_index.service.jobs.copying import Copier
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.read.export import entries_checksum
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import items_table

T = 1_700_000_000_000
# of 0 to 12 bytes; three fill the column
TEXTS = ["", "é", "日本語の", "Ελλάδα", "😀😀😀", "abcdefghijkl", "عربي", " a ", "हिंद", "0x00"]


@dataclass(frozen=True, kw_only=True)
class Place(KeyedIndexItem):
    town: str = column("text", width=12)


@dataclass(frozen=True, kw_only=True)
class Blob(KeyedIndexItem):
    town: bytes = column("S12")


def check(opened, kind=None, texts=TEXTS):
    """Check the text of every entry in all forms of answers."""
    expected = dict(enumerate(texts))

    def seen(values):
        return {value["offset"]: value["town"] for value in values}

    answer = opened.query("t", "k")
    assert {item.offset: item.town for item in answer} == expected
    assert kind is None or {type(item) for item in answer} == {kind}
    assert seen(json.loads(json.dumps(answer.to_dict()))["items"]) == expected
    batched = opened.query_many([("t", "k")])
    for table in (answer.to_arrow(), batched.to_arrow(), items_table(answer.items, type(answer[0]))):
        assert table.schema.field("town").type == pa.string()
        assert seen(table.to_pylist()) == expected
    assert seen(batched.item_documents()[0]) == seen(batched.to_pandas().to_dict("records")) == expected
    with opened.export() as export:
        table = pa.Table.from_batches(list(export), export.schema)
        sums = [entries_checksum(part, export.entry_schema) for part in table.to_batches()]
        assert (export.entries, export.checksum) == (len(texts), sum(sums) % 2**64)
    assert (table.schema.field("town").type, seen(table.to_pylist())) == (pa.string(), expected)


def test_text_is_text_in_every_state(merging, tmp_path):
    life = merging(LocalStorage(tmp_path / "storage"), item_type=Place)
    index = life.index
    for number, text in enumerate(TEXTS[:4]):
        index.put("t", 0, "k", number, 1, BASE_MS, town=text)
    index.put_batch(batch(3, offset=[4, 5, 6], timestamp_ms=BASE_MS, town=TEXTS[4:7]))
    check(index, Place, TEXTS[:7])
    index.flush()
    check(index, Place, TEXTS[:7])
    life.publish()
    index.put_batch(
        batch(4, offset=[7, 8, 9, 10], key=["k", "k", "k", "gone"], timestamp_ms=BASE_MS, town=[*TEXTS[7:], "x"])
    )
    life.publish()

    def check_all():
        check(index, Place)
        with life.reader() as reader:
            check(reader, Place)
        with IndexReader.open(storage_backend=life.storage, clock=life.clock) as reader:
            check(reader)

    life.later()
    assert life.merge().jobs
    erase(life.storage, life.log(), EraseRequest("t", keys=("gone",)), life.clock, yes=True, threads=1)
    index.run_lifecycle()
    check_all()
    target = MemoryStorage(clock=life.clock)
    copier = Copier(life.storage, target, life.clock)
    copier.open()
    copier.run_once()
    with IndexReader.open(storage_backend=target, clock=life.clock) as reader:
        check(reader)


FORMS = {
    "list": list,
    "numpy": np.array,
    "objects": lambda texts: np.array(texts, object),
    "large": lambda texts: pa.array(texts, pa.large_string()),
    "view": lambda texts: pa.array(texts, pa.string_view()),
    "dictionary": lambda texts: pa.array(texts).dictionary_encode(),
    "chunks": lambda texts: pa.chunked_array([texts[:3], texts[3:]]),
    "bytes": lambda texts: [text.encode() for text in texts],
    # as Java and JavaScript have a character beyond 16 bits
}


@pytest.mark.parametrize("form", FORMS)
def test_text_of_any_form_is_stored_alike(open_index, form):
    index = open_index(item_type=Place)
    index.put_batch(batch(len(TEXTS), town=FORMS[form](TEXTS)))
    index.flush()
    check(index)
    index.put_batch(batch(0, town=FORMS[form](TEXTS)[:0]))


WRONG = {
    "long": ("日本語のé", r"must be text of at most 12 bytes in UTF-8, and '日本語のé' has 14"),
    "nul": ("a\0", r"must be text without NUL, not 'a\\x00'"),
    "half": ("\ud800", r"must be text, and '\\ud800' has half a surrogate pair"),
    "bytes": (b"\xff", r"must be text, and b'\\xff' has bytes that are not UTF-8"),
}


@pytest.mark.parametrize("why", WRONG)
def test_wrong_texts_are_refused(open_index, why):
    index = open_index(item_type=Place)
    value, problem = WRONG[why]
    with pytest.raises(InvalidArgument, match=f"^town {problem}$"):
        index.put("t", 0, "k", 1, 1, T, town=value)
    good = b"good" if isinstance(value, bytes) else "good"
    with pytest.raises(InvalidArgument, match=rf"^column 'town' {problem} \(row 1\)$"):
        index.put_batch(batch(2, town=[good, value]))
    for number in (7, None):
        with pytest.raises(InvalidArgument, match=f"^town must be text, not {number}$"):
            index.put("t", 0, "k", 1, 1, T, town=number)
        with pytest.raises(InvalidArgument, match=r"^column 'town' .*text of at most 12 bytes"):
            index.put_batch(batch(1, town=[number]))
    assert not index.query("t", "k")


def test_the_declaration_in_files(open_index):
    """A column of text has the same bytes in an item as one of bytes, and another type."""
    base = [["key_hash", ">i4", False], ["topic_id", ">i4", False], ["queue_id", ">i4", True], ["offset", ">i8", True]]
    base += [["size", ">i4", False], ["time_diff_s", ">i4", False], ["fingerprint", ">u4", False]]
    assert KEYED_SCHEMA.to_json() == {"name": "KeyedIndexItem", "columns": base}
    assert Schema.of(Blob).to_json() == {"name": "Blob", "columns": [*base, ["town", "|S12", False]]}
    declared = Schema.of(Place).to_json()
    assert declared == {"name": "Place", "columns": [*base, ["town", ">S12", False]]}
    again = Schema.from_json(declared)
    assert again == Schema.of(Place) == Schema.of(again.item_type())
    assert (np.dtype(">S12"), again.item, again.row) == (np.dtype("S12"), Schema.of(Blob).item, Schema.of(Blob).row)

    @dataclass(frozen=True, kw_only=True)
    class Odd(KeyedIndexItem):
        town: bytes = column(">S12")

    assert Schema.of(Odd).extra[-1] == Column("town", "|S12")


def test_an_index_of_bytes_stays_one(open_index, storage):
    index = open_index("root", item_type=Blob)
    index.put("t", 0, "k", 1, 1, T, town=b"Paris")
    upload(index)
    assert index.query("t", "k")[0].to_dict()["town"] == b"Paris".ljust(12, b"\0").hex()
    index.close()
    problem = r"Blob\(fingerprint: >u4, town: \|S12\), not Place\(fingerprint: >u4, town: text of at most 12 bytes\)"
    with pytest.raises(SchemaMismatch, match=problem):
        open_index("root", item_type=Place)
    with pytest.raises(SchemaMismatch):
        IndexReader.open(storage_backend=storage, item_type=Place)


def test_defaults_and_declarations(open_index):
    @dataclass(frozen=True, kw_only=True)
    class Known(KeyedIndexItem):
        town: str = column("text", width=4, default="née")

    @dataclass(frozen=True, kw_only=True)
    class Long(KeyedIndexItem):
        town: str = column("text", width=3, default="née")

    assert Schema.of(Known).extra[-1] == Column("town", ">S4")
    for wrong in ({}, {"width": 0}, {"width": "4"}, {"width": True}):
        with pytest.raises(ConfigError, match="needs its width in bytes"):
            column("text", **wrong)
    with pytest.raises(ConfigError, match="takes no width"):
        column("S4", width=4)
    with pytest.raises(ConfigError, match="identity column 'town' must be an integer"):
        Schema("S", (Column("town", ">S4", identity=True),))
    index = open_index(item_type=Known)
    index.put("t", 0, "k", 1, 1, T)
    index.put_batch(batch(1, offset=[2]))
    assert [item.town for item in index.query("t", "k")] == ["née", "née"]
    with pytest.raises(ConfigError, match="a default of Long: town must be text of at most 3 bytes"):
        open_index(item_type=Long)


def test_stored_bytes_that_are_no_utf_8_are_shown_with_a_replacement(open_index, monkeypatch):
    index = open_index(item_type=Place)
    monkeypatch.setattr("tiered_index.service.write.validation._stored_text", lambda name, value, width: value)
    index.put("t", 0, "k", 0, 1, T, town=b"\xffParis")
    index.put("t", 0, "k", 1, 1, T, town=b"Rome")
    index.flush()
    assert index.query("t", "k").to_arrow()["town"].to_pylist() == ["Rome", "\ufffdParis"]
    assert [item.town for item in index.query("t", "k")] == ["Rome", "\ufffdParis"]
