"""Compacted files of preset native with packed runs have the items of plain files, and `verify` names every damage."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.compacted_files import SMALL, verify
from tests.unit.format.test_compacted import LAYOUTS, giant_file, naive_slots
from tiered_index.errors import InvalidArgument
from tiered_index.format import compacted as module
from tiered_index.format.compacted import BLOCK_BYTES, GROUP_BYTES, SealedFile
from tiered_index.format.layout import NATIVE, ROCKETMQ, Header, Layout
from tiered_index.format.trailer import TAIL_SIZE, parse_trailer
from tiered_index.stored import typed

NATIVES = [kind for kind in sorted(LAYOUTS) if not LAYOUTS[kind][0].newest_first]


def items_of(data):
    """Return the items of a file, read by its directory."""
    trailer = parse_trailer(data, "file", len(data))
    runs = trailer.directory.all_runs()
    pieces = [data[run.offset : run.offset + run.length] for run in runs]
    return trailer.metadata.packing.unpack(pieces, np.array([run.count for run in runs]), "file")[0]


@pytest.mark.usefixtures("way")
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 120), st.integers(1, 50), st.integers(1, 12), st.integers(0, 3),
    st.sampled_from(NATIVES), st.integers(1, 130), st.sampled_from([64, GROUP_BYTES]),
)  # fmt: skip
def test_equals_lists_per_slot(make, seed, count, slots, distinct, spread_s, kind, chunk, group_bytes):
    layout = Layout(*LAYOUTS[kind], slots, count + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)  # chunks end anywhere
        patch.setattr(module, "GROUP_BYTES", group_bytes)
        patch.setattr(module, "BLOCK_BYTES", 20 * group_bytes)
        data, entries = make.file(layout, count, seed=seed, distinct_hashes=distinct, spread_s=spread_s, packed=True)
    expected = [
        item.tobytes()[: layout.schema.item.itemsize] for items in naive_slots(entries, layout) for item in items
    ]
    assert items_of(data).tobytes() == b"".join(expected)
    assert verify(data) == []
    found = Header(*struct.unpack_from(">IqqiI", data))
    in_use = len({int(hash) % slots for hash in entries["key_hash"]})
    assert (found.magic, found.slots_in_use, found.items) == (NATIVE.end_magic, in_use, count)
    assert data[-TAIL_SIZE + 8 : -TAIL_SIZE + 12] == struct.pack(">I", 4)


def test_groups_and_blocks_are_those_of_the_plain_file(make):
    data, plain = (giant_file(make, kind)[1] for kind in ("packed", "native"))
    assert verify(data) == [] and len(data) < 0.5 * len(plain)
    ours, theirs = (parse_trailer(each, "file", len(each)).directory for each in (data, plain))
    for name in ("first_slot", "count", "first_block", "blocks"):
        assert ours.groups[name].tolist() == theirs.groups[name].tolist()
    for name in ("count", "hash_min", "hash_max", "second_min", "second_max"):
        assert ours.blocks[name].tolist() == theirs.blocks[name].tolist()
    assert ours.blocks["length"].max() < BLOCK_BYTES // 2
    for group in ours.groups:
        offset, length = int(group["offset"]), int(group["length"])
        assert zlib.crc32(data[offset : offset + length]) == int(group["crc32"])


def test_values_at_their_bounds(make):
    """Columns have their greatest width. The negative hash counts as 0 and is stored unchanged."""
    layout = Layout(NATIVE, NATIVE.schema, 3, 10)
    begin_ms = 2**31 * 1000
    columns = dict.fromkeys(("topic_id", "queue_id", "size"), np.array([-(2**31), 2**31 - 1, 0, 1]))
    columns |= {"offset": np.array([-(2**63), 2**63 - 1, 0, -1]), "fingerprint": np.array([0, 2**32 - 1, 1, 2])}
    times = np.array([0, (2**32 - 1) * 1000, begin_ms, begin_ms])
    table, entries = make.entries(layout, np.array([0, 2**31 - 1, 0, 0], np.int32), times, columns, begin_ms=begin_ms)
    entries = entries.copy()
    entries["key_hash"][2] = -(2**31)
    made = [make.compacted(table, entries, packed=packed) for packed in (True, False)]
    items = np.frombuffer(made[1], layout.schema.item, 4, layout.items_position)
    assert items_of(made[0]).tobytes() == items.tobytes()


def test_rocketmqs_files_are_not_packed(make):
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, 5, 20)
    with pytest.raises(InvalidArgument, match="cannot pack"):
        make.file(layout, 12, packed=True)


def test_a_sealed_file_says_how_it_is_compacted():
    stored = {
        "file_id": "f", "layout": SMALL.to_json(), "begin_ms": 0, "end_ms": 0, "count": 1, "lane": "main",
        "sequence": 1, "predecessor": None, "created_ms": 0, "offset_space": "custom", "topics": [], "positions": {},
        "writer": "w",
    }  # fmt: skip
    assert not typed(stored, SealedFile).packed
    sealed = typed({**stored, "packed": True}, SealedFile)
    assert sealed.packed and sealed.to_json()["packed"]
    assert "packed" not in typed(stored, SealedFile).to_json()
    of_rocketmq = Layout(ROCKETMQ, ROCKETMQ.schema, 5, 20).to_json()
    with pytest.raises(ValueError, match="packed"):
        typed({**stored, "packed": True, "layout": of_rocketmq}, SealedFile)
