"""Layouts, schemas and names have limits, and wrong declarations are refused."""

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest

from tiered_index.errors import ConfigError, CorruptFile, SchemaMismatch
from tiered_index.format import names
from tiered_index.format.layout import NATIVE, ROCKETMQ, Layout
from tiered_index.format.schema import BASE_COLUMNS, KEYED_SCHEMA, ROCKETMQ_SCHEMA, Column, Schema
from tiered_index.types import IndexItem, KeyedIndexItem, column


@dataclass(frozen=True, kw_only=True)
class OrderItem(KeyedIndexItem):
    region: int = column("<u2", identity=True)
    price: float = column(">f8")
    label: bytes = column("S16", default=b"")


def test_impossible_geometry():
    slots = 3
    items = (2**31 - 1 - 28 - 8 * slots) // 28 + 1
    assert Layout(ROCKETMQ, ROCKETMQ_SCHEMA, slots, items).compacted_size(items - 1) <= 2**31 - 1
    with pytest.raises(ConfigError, match="limit is 2,147,483,647"):
        Layout(ROCKETMQ, ROCKETMQ_SCHEMA, slots, items + 1)
    for some_slots, some_items in ((0, 10), (-1, 10), (2**28 + 1, 10), (1, 1), (1, 2**30 + 1), (2**28, 2)):
        with pytest.raises(ConfigError):
            Layout(NATIVE, NATIVE.schema, some_slots, some_items)
    with pytest.raises(ConfigError, match="RocketMQ"):
        Layout(ROCKETMQ, KEYED_SCHEMA, 10, 10)


def test_layout_round_trip():
    layout = Layout(NATIVE, Schema.of(OrderItem), 10, 20)
    assert Layout.from_json(layout.to_json()) == layout
    for change in ({"preset": "future"}, {"slots": None}, {"slots": "x"}):
        with pytest.raises(ConfigError):
            Layout.from_json(layout.to_json() | change)
    with pytest.raises(SchemaMismatch):
        Layout.from_json(layout.to_json() | {"schema": {}})


def test_declared_schema():
    schema = Schema.of(OrderItem)
    own = (Column("region", ">u2", True), Column("price", ">f8"), Column("label", "|S16"))
    assert schema.extra == (Column("fingerprint", ">u4"), *own)
    assert schema.item.itemsize == 28 + 4 + 2 + 8 + 16
    assert schema.identity_extra == ("region",)
    assert schema.keyed
    assert not ROCKETMQ_SCHEMA.keyed
    assert [c.name for c in schema.caller_columns] == ["region", "price", "label"]
    restored = Schema.from_json(schema.to_json())
    assert restored == schema
    item_type = restored.item_type()
    about = {"topic": "t", "topic_id": 1, "queue_id": 2, "offset": 3, "size": 4, "timestamp_ms": 5, "key_hash": 6}
    own = {"fingerprint": 0, "region": 7, "price": 0, "label": "78"}
    assert item_type(**about, region=7, label=b"x").to_dict() == about | own
    assert Schema.of(item_type) == schema
    assert (ROCKETMQ_SCHEMA.item_type(), KEYED_SCHEMA.item_type()) == (IndexItem, KeyedIndexItem)


@pytest.mark.parametrize(
    "column",
    [
        *(Column(name, ">u4") for name in ("queue_id", "previous", "timestamp_ms", "two words", "", "class")),
        *(Column("x", dtype) for dtype in ("<u4", "u4", ">c8", "O", "S", "nonsense", "3>u2", ">u2,>u2", ">M8[s]")),
        *(Column("x", dtype, True) for dtype in (">f8", "S4")),
    ],
    ids=str,
)
def test_refused_columns(column):
    with pytest.raises(ConfigError, match="schema S"):
        Schema("S", (column,))
    with pytest.raises(ConfigError):
        Schema("S", (Column("twice", ">u4"), Column("twice", ">u4")))


def test_a_class_with_fields_must_be_a_dataclass():
    class Annotated(IndexItem):
        region: int = column(">u4")

    class Assigned(KeyedIndexItem):
        region = column(">u4")

    class Mixin:
        cache: dict[str, int]

    class WithConstants(Mixin, KeyedIndexItem):
        LABEL: ClassVar[str] = "x"

        def describe(self):
            return self.topic

    @dataclass(frozen=True, kw_only=True)
    class Next(WithConstants):
        LABEL: ClassVar[str] = "y"
        region: int = column(">u4")

    @dataclass(frozen=True, kw_only=True)
    class Plain(IndexItem):
        region: int = 0

    again = type("Again", (KeyedIndexItem,), {"__annotations__": {"size": int}, "size": column(">u4")})
    assert Schema.of(WithConstants).extra == KEYED_SCHEMA.extra
    assert Schema.of(Next).extra == (*KEYED_SCHEMA.extra, Column("region", ">u4"))
    for wrong, problem in (
        *((kind, "not a dataclass") for kind in (Annotated, Assigned, type("Below", (Annotated,), {}))),
        (Plain, r"Plain.region"),
        (dataclass(frozen=True, kw_only=True)(again), r"Again.size is a field of .*IndexItem already"),
    ):
        with pytest.raises(ConfigError, match=problem):
            Schema.of(wrong)


def test_foreign_declarations():
    columns = ROCKETMQ_SCHEMA.to_json()["columns"]
    for wrong in (None, [[1]], columns[1:], columns[::-1], []):
        with pytest.raises(SchemaMismatch):
            Schema.from_json({"name": "x", "columns": wrong})
    with pytest.raises(SchemaMismatch):
        Schema.from_json({"columns": columns})
    assert [c.name for c in BASE_COLUMNS if c.identity] == ["queue_id", "offset"]


def test_names():
    file_id = names.new_file_id(1_700_000_000_000)
    assert re.fullmatch(r"001700000000000-[0-9a-f]{12}", file_id)
    assert names.new_file_id(0) != names.new_file_id(0)
    assert names.file_id_of(file_id + ".index") == names.file_id_of(file_id + ".journal") == file_id
    arabic = "".join(chr(0x660 + int(digit)) for digit in file_id[:15])
    others = [f"{file_id}.tmp", f"{file_id}.index.tmp", f".tmp-{file_id}", f"{file_id.upper()}G.index"]
    for name in (file_id, *others, "x.index", "", f"{arabic}{file_id[15:]}.index"):
        assert names.file_id_of(name) is None
    assert names.data_name(file_id, "a1") == f"{names.data_prefix(file_id)}a1.index" == f"data/{file_id}/a1.index"
    numbered = {
        names.log_name(7): "log/00000000000000000007",
        names.epoch_name(7): "epoch/00000000000000000007",
        names.lease_name(3, 7): "lease/00000000000000000003/00000000000000000007",
        names.checkpoint_name(7, "a" * 32): "checkpoint/00000000000000000007-aaaaaaaaaaaaaaaa",
    }
    assert all(name == spelled and names.number_of(name) == 7 for name, spelled in numbered.items())
    assert (names.checkpoint_of(name := [*numbered][3]), names.is_foreign(name)) == ((7, "a" * 16), False)
    for name in ("checkpoint/7", "checkpoint/00000000000000000007", names.log_name(7), names.checkpoint_name(7, "abc")):
        with pytest.raises(CorruptFile, match="not a checkpoint"):
            names.checkpoint_of(name)
    for name in ("log/12", "log/" + "1" * 21, "log/", "log/0000000000000000001x", "log/" + "\u0661" * 20):
        with pytest.raises(CorruptFile, match="not a numbered object"):
            names.number_of(name)
