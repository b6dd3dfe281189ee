"""The files of our codecs under preset `rocketmq` equal those of RocketMQ's own code, byte for byte and call for
call.
"""

import hashlib
import json

import numpy as np
import pytest

from tests.golden import codec, naive
from tests.golden.codec import layout_of
from tests.support.compacted_files import unsealed_image
from tests.support.foreign_lookups import find_unsealed
from tiered_index.errors import InvalidArgument
from tiered_index.format.compacted import Compaction
from tiered_index.format.foreign import ForeignUnsealed
from tiered_index.format.unsealed import UnsealedTable


def test_every_file_that_rocketmqs_code_wrote_has_the_recorded_sha256():
    recorded = json.loads((naive.DATA / "MANIFEST.json").read_text())["sha256"]
    files = [path for path in naive.DATA.rglob("*") if path.is_file() and path.name != "MANIFEST.json"]
    names = {str(path.relative_to(naive.DATA)).removesuffix(".gz") for path in files}
    assert {name: hashlib.sha256(naive.raw(name)).hexdigest() for name in names} == recorded and len(recorded) == 203


@pytest.mark.parametrize("batch", [1, 7, 10**9])
def test_bytes_equal_java(normal_case, batch):
    layout = layout_of(normal_case)
    table, entries = codec.write(normal_case.rows, layout, normal_case.begin_ms, batch)
    assert unsealed_image(table, entries) == normal_case.unsealed
    if not len(entries):
        # Java compacts an empty file to 0 bytes and uploads it; our code refuses
        assert normal_case.name == "empty"
        assert normal_case.compacted == b""
        with pytest.raises(InvalidArgument):
            Compaction(entries, layout, normal_case.begin_ms, table.end_ms)
        return
    compaction = Compaction(entries, layout, normal_case.begin_ms, table.end_ms)
    written = b"".join(map(bytes, compaction.pieces(file_id="f", topics=(), **codec.ABOUT)))
    size = layout.compacted_size(len(entries))
    assert size == len(normal_case.compacted)
    assert written[:size] == normal_case.compacted


def test_counters_after_every_call(normal_case):
    """Item count, slot count and end timestamp equal Java's after each put. A put that doesn't fit changes nothing."""
    layout = layout_of(normal_case)
    table = UnsealedTable(layout, normal_case.begin_ms)
    refused_by_seal_only = 0
    for call in normal_case.calls:
        rows = normal_case.rows_of(call)
        if call["result"] == "SUCCESS" and rows:
            table.commit(table.prepare(*codec.columns_of(rows, layout)))
        elif call["result"] == "FILE_FULL":
            if len(rows) <= table.free:
                # Java's file sealed itself after an earlier put that didn't fit; here the service seals files
                refused_by_seal_only += 1
                continue
            before = (table.header(), table.heads.copy())
            with pytest.raises(InvalidArgument, match="do not fit"):
                table.prepare(*codec.columns_of(rows, layout))
            assert table.header() == before[0]
            assert (table.heads == before[1]).all()
        counted = tuple(call[name] for name in ("itemCount", "slotCount", "endTimestamp"))
        assert (table.count, table.slots_in_use, table.end_ms) == counted
    assert refused_by_seal_only == (1 if normal_case.name == "multikey_full" else 0)


@pytest.mark.parametrize("batch", [1, 10**9])
def test_min_value_keys_are_neither_lost_nor_misplaced(min_value_case, batch):
    """Java writes into the header, loses entries or fails. Our file has every entry of every put, under hash 0."""
    layout = layout_of(min_value_case)
    rows = min_value_case.wanted_rows
    table, entries = codec.write(rows, layout, min_value_case.begin_ms, batch)
    assert table.count == len(rows) == len(entries)
    special = [row for row in rows if row.key in ("boxvajrkywm", "euuudrqcyle")]
    assert len(special) == {"minvalue_slots31": 4}.get(min_value_case.name, 3)
    assert all(naive.java_hash(row.topic, row.key) == 0 for row in special)
    assert int((entries["key_hash"] == 0).sum()) == len(special)
    assert not (entries["key_hash"] < 0).any()
    image = ForeignUnsealed(unsealed_image(table, entries), layout, "ours")
    for query in min_value_case.queries:
        answer = find_unsealed(image, naive.java_hash(query["topic"], query["key"]), query["begin"], query["end"])
        items_of_query = [naive.Found(*map(int, item)) for item in answer.tolist()]
        assert items_of_query == naive.truth(rows, min_value_case.begin_ms, query)
    compaction = Compaction(entries, layout, min_value_case.begin_ms, table.end_ms)
    items = np.frombuffer(b"".join(map(bytes, compaction.arrays())), layout.schema.item)
    assert len(items) == len(rows)
    slot_0_items = int.from_bytes(compaction.slot_table()[4:8], "big") // layout.schema.item.itemsize
    assert np.flatnonzero(items["key_hash"] == 0).max() < slot_0_items


def test_min_value_slots16_differs_in_the_hashes_only():
    """MIN_VALUE % 16 is 0, so Java's file is sound. Ours has 0 for the negative hash, and is otherwise the same."""
    case = naive.load("minvalue_slots16")
    table, entries = codec.write(case.rows, layout_of(case), case.begin_ms, 10**9)
    ours, java = unsealed_image(table, entries), case.unsealed
    differing = [at for at in range(len(java)) if ours[at] != java[at]]
    base = layout_of(case).items_position
    places = [(*divmod(at - base, 32), java[at], ours[at]) for at in differing]
    assert places == [(21, 0, 0x80, 0), (24, 0, 0x80, 0), (26, 0, 0x80, 0)]
