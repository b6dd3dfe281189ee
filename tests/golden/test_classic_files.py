"""The classic `IndexFile`: our writes have the same bytes, our reads the same answers. If Java's answer lacks entries,
ours has them all.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cached_property
from typing import Any

import pytest

from tests.golden import naive
from tests.support.classic_lookups import find_in, is_time_matched, select_offsets
from tests.support.classic_writer import WritableClassicFile, absolute_hash
from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.classic import Geometry, infer_geometry


class Case:
    def __init__(self, name: str) -> None:
        self.meta = json.loads(naive.raw(f"classic/{name}/meta.json"))
        self.calls = naive.lines(f"classic/{name}/input.jsonl")
        self.queries = naive.lines(f"classic/{name}/queries.jsonl")
        self.image = naive.raw(f"classic/{name}/index.bin")
        self.geometry = Geometry(self.meta["slots"], self.meta["items"])

    @cached_property
    def by_hash(self) -> dict[int, list[tuple[int, int]]]:
        """Offset and time of every accepted call, newest first, by the hash of its key, from the calls alone."""
        found = defaultdict(list)
        accepted = [call for call in self.calls if call["result"]]
        # this is the right time of the first entry of an inheriting file; Java's is off, since it takes another begin
        begin_ms = accepted[0]["storeTimestamp"] if accepted else 0
        for call in reversed(accepted):
            after_s = max(call["storeTimestamp"] - begin_ms, 0) // 1000 if begin_ms > 0 else 0
            entry = call["phyOffset"], begin_ms + min(after_s, 2**31 - 1) * 1000
            found[naive.java_hash(*call["key"].split("#", 1))].append(entry)
        return found

    def truth(self, query: dict[str, Any]) -> list[int]:
        """Return all offsets under a key's hash within the range, newest first."""
        entries = self.by_hash[naive.java_hash(*query["key"].split("#", 1))]
        return [offset for offset, time_ms in entries if query["begin"] <= time_ms <= query["end"]]


NAMES = (
    *("collide", "empty", "empty_inherit", "far_future", "full", "inherit_entries", "late"),
    *("m5000_20000", "minvalue", "one", "timerange", "ts_zero", "unicode"),
)


@pytest.fixture(params=NAMES)
def classic(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_bytes_and_results_of_every_call(classic):
    file = WritableClassicFile.create(
        classic.geometry, end_offset=classic.meta["ctorEndPhyOffset"], end_ms=classic.meta["ctorEndTimestamp"]
    )
    for call in classic.calls:
        assert file.put_key(call["key"], call["phyOffset"], call["storeTimestamp"]) is call["result"]
        assert file.is_full is call["writeFull"]
    assert file.data == classic.image
    names = ("beginTimestamp", "endTimestamp", "beginPhyOffset", "endPhyOffset", "hashSlotCount", "indexCount")
    assert file.header == tuple(classic.meta["header"][name] for name in names)


def test_answers_equal_java(classic):
    file = WritableClassicFile(classic.image, classic.geometry)
    assert classic.queries
    for query in classic.queries:
        found: list[int] = []
        select_offsets(file, found, query["key"], query["maxNum"], query["begin"], query["end"])
        assert found == query["result"], query
        assert is_time_matched(file, query["begin"], query["end"]) is query["isTimeMatched"]
        assert absolute_hash(query["key"]) == query["keyHash"]


def test_find_leaves_nothing_out(classic):
    file = WritableClassicFile(classic.image, classic.geometry)
    more = 0
    for query in classic.queries:
        found = find_in(file, query["key"], query["begin"], query["end"])
        assert found == classic.truth(query)
        more += found != query["result"]
    # Java's answers lack entries here: by its bounds, its stop at the first entry before the range, and its time of the
    # first entry
    assert bool(more) is (classic.meta["name"] in ("collide", "full", "inherit_entries", "late", "one"))


def test_geometry_is_found_in_the_contents(classic):
    assert infer_geometry(classic.image) == classic.geometry


def test_entries_come_in_order_of_insertion(classic):
    entries = WritableClassicFile(classic.image, classic.geometry).entries()
    accepted = [call for call in classic.calls if call["result"]]
    assert entries["offset"].tolist() == [call["phyOffset"] for call in accepted]
    # the first entry's time counts from the end of the file before
    seconds = [0, *(max(second, 0) for second in entries["seconds"].tolist()[1:])]
    begin_ms = WritableClassicFile(classic.image, classic.geometry).header.begin_ms
    times = [begin_ms + 1000 * second for second in seconds[: len(entries)]]
    assert all(
        abs(time - min(max(call["storeTimestamp"], times[0]), times[0] + (2**31 - 1) * 1000)) < 1000 or times[0] == 0
        for time, call in zip(times, accepted, strict=True)
    )
    assert entries["key_hash"].tolist() == [absolute_hash(call["key"]) for call in accepted]


def test_another_geometry_is_refused(classic):
    with pytest.raises(CorruptFile, match="size of a file"):
        WritableClassicFile(classic.image, Geometry(classic.geometry.slots + 1, classic.geometry.items))
