"""The classic `IndexFile`: the writes of tests and demo have the same bytes, and the package reads all entries."""

import json

import pytest

from tests.golden import naive
from tests.support.classic_writer import ClassicIndexFile, absolute_hash
from tiered_index.connectors.rocketmq.classic import Geometry, decode_header, infer_geometry, read_entries
from tiered_index.errors import CorruptFile


class Case:
    def __init__(self, name: str) -> None:
        self.meta = json.loads(naive.raw(f"classic/{name}/meta.json"))
        self.calls = naive.lines(f"classic/{name}/input.jsonl")
        self.image = naive.raw(f"classic/{name}/index.bin")
        self.geometry = Geometry(self.meta["slots"], self.meta["items"])


NAMES = (
    *("collide", "empty", "empty_inherit", "far_future", "full", "inherit_entries", "late"),
    *("m5000_20000", "minvalue", "one", "timerange", "ts_zero", "unicode"),
)


@pytest.fixture(params=NAMES)
def classic(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_bytes_and_results_of_every_call(classic):
    file = ClassicIndexFile.create(
        classic.geometry, end_offset=classic.meta["ctorEndPhyOffset"], end_ms=classic.meta["ctorEndTimestamp"]
    )
    for call in classic.calls:
        assert file.put_key(call["key"], call["phyOffset"], call["storeTimestamp"]) is call["result"]
        assert file.is_full is call["writeFull"]
    assert file.data == classic.image
    names = ("beginTimestamp", "endTimestamp", "beginPhyOffset", "endPhyOffset", "hashSlotCount", "indexCount")
    assert file.header == tuple(classic.meta["header"][name] for name in names)
    assert infer_geometry(classic.image) == classic.geometry
    with pytest.raises(CorruptFile, match="size of a file"):
        ClassicIndexFile(classic.image, Geometry(classic.geometry.slots + 1, classic.geometry.items))


def test_entries_come_in_order_of_insertion(classic, tmp_path):
    (tmp_path / "index").write_bytes(classic.image)
    entries = read_entries(tmp_path / "index")
    accepted = [call for call in classic.calls if call["result"]]
    assert entries["offset"].tolist() == [call["phyOffset"] for call in accepted]
    # the first entry's time counts from the end of the file before
    seconds = [0, *(max(second, 0) for second in entries["seconds"].tolist()[1:])]
    begin_ms = decode_header(classic.image).begin_ms
    times = [begin_ms + 1000 * second for second in seconds[: len(entries)]]
    assert all(
        abs(time - min(max(call["storeTimestamp"], times[0]), times[0] + (2**31 - 1) * 1000)) < 1000 or times[0] == 0
        for time, call in zip(times, accepted, strict=True)
    )
    assert entries["key_hash"].tolist() == [absolute_hash(call["key"]) for call in accepted]
