"""`verify_shard` names every kind of defect: damaged bytes, and wrong content with right checksums."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.cases import each
from tests.support.compacted_files import reader
from tests.unit.format.test_verify import change_item, changed, items_in, rebuilt
from tiered_index.format.layout import NATIVE, PRESETS, Layout
from tiered_index.format.packed import PackingOptions
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.format.shard import ShardWriter, answer_sorted
from tiered_index.format.slots import SlotMap
from tiered_index.format.trailer import parse_trailer
from tiered_index.format.verify import Finding, verify_shard

Items = npt.NDArray[Any]
BEGIN_S = 1_700_006_400
MORE = {"table": "t1", "window_s": 86400, "sequence": 3}
SIZE = KEYED_SCHEMA.item.itemsize


def write(
    items: Items, slots: SlotMap, preset: str = "native", more: dict[str, Any] | None = None, *, packed: bool = False
) -> bytes:
    """Return the shard of `items` in the given order."""
    layout = Layout(PRESETS[preset], PRESETS[preset].schema, slots.base, 100)
    options = PackingOptions.of(items, (1, 2), len(items)) if packed else None
    times = BEGIN_S * 1000, (BEGIN_S + 86400) * 1000 - 1
    writer = ShardWriter(layout, slots, (0, slots.slots), *times, len(items), options)
    parts = [writer.begin(), bytes(writer.add(items))]
    return b"".join([*parts, writer.finish("f", "test", "commitlog", {1: "a", 2: "b"}, MORE if more is None else more)])


def make_items(count: int, slots: SlotMap, hot: int = 0, schema: Any = KEYED_SCHEMA) -> Items:
    rng = np.random.default_rng(5)
    items = np.zeros(count + hot, schema.item)
    items["key_hash"] = np.append(rng.integers(0, 2**31, count), np.full(hot, 77))
    items["topic_id"] = rng.integers(1, 3, count + hot)
    items["offset"] = rng.permutation(count + hot)
    items["time_diff_s"] = rng.integers(0, 86400, count + hot)
    if "fingerprint" in items.dtype.names:
        items["fingerprint"] = items["key_hash"].astype(np.uint32) ^ 5
    return items[answer_sorted(items, items["time_diff_s"].astype(np.int64), slots, schema)]


SLOTS = SlotMap(7, split=3)


@pytest.fixture(scope="module")
def small() -> bytes:
    return write(make_items(50, SLOTS), SLOTS)


@pytest.fixture(scope="module")
def giant() -> bytes:
    """A slot of three blocks between small slots."""
    return write(make_items(3000, SLOTS, hot=20_000), SLOTS)


@pytest.fixture(scope="module")
def packed_giant() -> bytes:
    return write(make_items(3000, SLOTS, hot=20_000), SLOTS, packed=True)


def verify(data: bytes) -> list[Finding]:
    return verify_shard(reader(data), len(data), "shard")


def parts(data: bytes) -> set[str]:
    return {finding.part for finding in verify(data)}


@pytest.mark.parametrize("slots", [SlotMap(1), SLOTS, SlotMap(1000), SlotMap(1000, join=64)], ids=str)
@pytest.mark.parametrize("preset", ["native", "rocketmq"])
@pytest.mark.parametrize("packed", [False, True])
def test_sound_shards_pass(slots: SlotMap, preset: str, packed: bool) -> None:
    for count, hot in ((1, 0), (2000, 0), (500, 20_000)):
        data = write(make_items(count, slots, hot, PRESETS[preset].schema), slots, preset, packed=packed)
        assert verify(data) == []
        # shards have this order even if the preset's files have another
        assert b'"order":"answer"' in data


def test_rebuilding_without_change_is_sound(small: bytes, giant: bytes) -> None:
    assert rebuilt(small) == small and rebuilt(giant) == giant
    assert len(parse_trailer(giant, "f", len(giant)).directory.blocks) == 3


@pytest.mark.parametrize("packed", [False, True])
def test_every_flipped_byte_is_found(packed: bool) -> None:
    small = write(make_items(50, SLOTS), SLOTS, packed=packed)
    for position in range(len(small)):
        spoiled = bytearray(small)
        spoiled[position] ^= 16
        assert verify(bytes(spoiled)), position


def test_a_cut_off_shard(small: bytes, giant: bytes) -> None:
    for length in (0, 20, 63, 64, len(small) - 1):
        assert verify(small[:length])
    assert parts(giant[: len(giant) // 2]) == {"tail"}


def test_a_flipped_bit_in_a_block_names_the_block(giant: bytes) -> None:
    block = parse_trailer(giant, "f", len(giant)).directory.blocks[1]
    spoiled = bytearray(giant)
    spoiled[int(block["offset"]) + 5] ^= 1
    (finding,) = verify(bytes(spoiled))
    assert (finding.part, finding.offset) == ("run", int(block["offset"]))


def test_an_item_of_another_slot_group(giant: bytes) -> None:
    wrong = rebuilt(giant, body=change_item(giant, 0, key_hash=int(items_in(giant)["key_hash"][-1])))
    assert {"slot", "order", "checksum"} <= parts(wrong)


def test_items_out_of_order_and_another_sum(small: bytes) -> None:
    def swap_keys(items: Items) -> None:
        for name in ("key_hash", "fingerprint"):
            items[name][[10, 11]] = items[name][[11, 10]]

    assert {"order", "checksum"} <= parts(rebuilt(small, body=changed(small, swap_keys)))
    assert parts(rebuilt(small, body=change_item(small, 4, size=9))) == {"checksum"}


def test_order_across_blocks(giant: bytes) -> None:
    """The first item of a block is newer than the last item of the block before."""
    trailer = parse_trailer(giant, "f", len(giant))
    row = (int(trailer.directory.blocks[1]["offset"]) - 28) // SIZE
    newest = int(items_in(giant)["time_diff_s"].max())
    wrong = rebuilt(giant, body=change_item(giant, row, time_diff_s=newest))
    (finding,) = [finding for finding in verify(wrong) if finding.part == "order"]
    assert finding.offset is not None
    assert parts(wrong) == {"order", "bounds", "checksum"}


def test_seconds_topics_filters_and_counts(small: bytes) -> None:
    meta = parse_trailer(small, "f", len(small)).metadata
    assert parts(rebuilt(small, metadata={"second_max": meta.second_max - 1})) == {"interval"}
    assert parts(rebuilt(small, metadata={"second_max": meta.second_max + 1})) == {"interval"}
    assert parts(rebuilt(small, metadata={"topics": ((1, "a"),)})) == {"topic"}
    assert parts(rebuilt(small, metadata={"topics": ()})) == set()
    assert parts(rebuilt(small, metadata={"slots_in_use": 3})) == {"metadata"}
    assert parts(rebuilt(small, more={"checksum": "0" * 16})) == {"checksum"}
    assert "filter" in parts(rebuilt(small, body=change_item(small, 4, fingerprint=9)))


def test_geometry_and_window(small: bytes) -> None:
    begin_ms = BEGIN_S * 1000 + 1
    for metadata in each(count=[49], begin_ms=[begin_ms], end_ms=[5], slot_base=[8], slot_range=[(0, 22), (5, 5)]):
        assert "metadata" in parts(rebuilt(small, metadata=metadata)), metadata
    assert parts(rebuilt(small, metadata={"second_max": BEGIN_S + 86400})) == {"interval"}
    for more in ({"window_s": None}, {"checksum": None}, {"checksum": "no"}, {"window_s": 3600}):
        assert "metadata" in parts(rebuilt(small, more=more)), more
    assert parts(rebuilt(small, more={"slot_map": {"base": 8, "split": 1, "join": 1}})) == {"metadata"}


def test_a_header_that_contradicts_the_trailer(small: bytes) -> None:
    items = small[28 : parse_trailer(small, "f", len(small)).tail.position]
    for header in (b"TIXC" + small[4:28], small[:20] + b"\0\0\0\1" + small[24:28], small[:11] + b"\1" + small[12:28]):
        assert "header" in parts(rebuilt(small, body=header + items))


def spoiled(data: bytes, table: int, name: str, change: int, row: int = 1) -> set[str]:
    """Return the parts with findings after a change of one number of the groups (0) or blocks (1)."""

    def change_it(*tables: Items) -> None:
        tables[table][name][row] += change

    return parts(rebuilt(data, directory=change_it))


def test_directories_that_do_not_cover_the_items(giant: bytes) -> None:
    for name, change in (("first_slot", 100), ("offset", SIZE), ("length", SIZE), ("count", 1)):
        assert "directory" in spoiled(giant, 0, name, change), name
    assert "directory" in spoiled(giant, 0, "first_slot", 1, row=0)
    for name in ("offset", "length", "count"):
        assert spoiled(giant, 1, name, SIZE) == {"directory"}, name
    for name in ("hash_min", "hash_max", "second_min", "second_max"):
        assert spoiled(giant, 1, name, 1) == {"bounds"}, name


def test_the_metadata_of_a_packed_shard_is_checked(packed_giant: bytes) -> None:
    assert verify(packed_giant) == [] and rebuilt(packed_giant) == packed_giant
    meta = parse_trailer(packed_giant, "f", len(packed_giant)).metadata
    line = meta.more["packed"]
    for wrong in ({**line, "seconds": [7]}, {**line, "shift": 63}, {**line, "base": "0"}, [], None):
        found = parts(rebuilt(packed_giant, more={"packed": wrong}))
        assert found == {"metadata"}, wrong
    assert "checksum" in parts(rebuilt(packed_giant, more={"packed": {**line, "base": line["base"] + 9}}))
    assert parts(rebuilt(packed_giant, more={"checksum": "0"})) == {"checksum"}
    assert "interval" in parts(rebuilt(packed_giant, metadata={"second_max": meta.second_max - 1}))
    assert parts(rebuilt(packed_giant, metadata={"topics": ((1, "a"),)})) == {"topic"}


def test_directories_that_do_not_cover_packed_items(packed_giant: bytes) -> None:
    for table in (0, 1):
        for name in ("offset", "length", "count"):
            assert spoiled(packed_giant, table, name, 1) == {"directory"}, name
    assert spoiled(packed_giant, 0, "first_slot", 100) == {"directory"}
    for name in ("hash_min", "hash_max", "second_min", "second_max"):
        assert spoiled(packed_giant, 1, name, 1) == {"bounds"}, name

    def move_one(groups: Items, blocks: Items) -> None:
        blocks["count"][0] += 1
        blocks["count"][1] -= 1

    (first, second) = verify(rebuilt(packed_giant, directory=move_one))[:2]
    assert (first.part, second.part) == ("run", "run") and "packed run" in first.problem


def test_a_compacted_file_is_not_a_shard() -> None:
    slots = SlotMap(NATIVE.slots)
    data = write(make_items(5, slots), slots)
    assert parts(rebuilt(data, more={"slot_map": None})) == {"metadata"}
