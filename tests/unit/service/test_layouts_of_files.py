"""How native files are compacted is a setting of each start: files of both layouts live side by side and merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.merging import BASE_MS, HOUR_MS, Merging, RegionItem
from tiered_index import IndexConfig, IndexItem, IndexService, Lookup, hash_key
from tiered_index.errors import ConfigError
from tiered_index.format.trailer import parse_trailer
from tiered_index.storage.memory import MemoryStorage


def test_rocketmqs_files_cannot_be_packed(tmp_path: Path) -> None:
    given = {
        "root": tmp_path / "root",
        "storage_backend": MemoryStorage(),
        "preset": "rocketmq",
        "slots": 7,
        "items": 9,
    }
    with pytest.raises(ConfigError, match="layout = packed is for preset native"):
        IndexService.open(**given, layout="packed")
    IndexService.open(**given, layout="plain").close()
    del given["preset"]
    with pytest.raises(ConfigError, match="layout = packed is for preset native"):
        IndexService.open(**given, layout="packed")
    IndexService.open(**given).close()
    with pytest.raises(ConfigError, match="layout must be one of 'packed' or 'plain'"):
        IndexConfig(layout="flat")


@pytest.mark.parametrize(("keep_s", "item_type"), [(0, None), (10**9, RegionItem)])
def test_each_start_may_have_another_layout(tmp_path: Path, keep_s: int, item_type: type[IndexItem] | None) -> None:
    life = Merging(tmp_path, settings={"slots": 50, "local_keep_s": keep_s}, item_type=item_type)
    versions = []
    for number, layout in enumerate(("plain", "packed", None, "plain")):
        life.index.close()
        life.index = life.open(layout=layout)
        life.put((BASE_MS + number * HOUR_MS + row * 1000, f"k{row % 9}") for row in range(60))
        life.publish()
        newest = max(life.state.files.values(), key=lambda stored: stored.sequence)
        data = life.storage.get(newest.name)
        versions.append(parse_trailer(data, newest.name, len(data)).metadata.version)
        life.check(life.index)
    assert versions == [1, 4, 4, 1]
    life.check()
    life.later()
    life.merge()
    assert not life.state.files
    life.check()
    life.close()


@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_a_key_that_a_file_lacks_takes_nothing_from_a_giant_slot_beside_it(open_index: Any, layout: str) -> None:
    """The slots before the giant one are empty: their group begins where its first block does."""
    index = open_index(slots=7, items=10_000, layout=layout)
    giant, absent = (next(f"k{n}" for n in range(99) if hash_key("t", f"k{n}") % 7 == slot) for slot in (3, 1))
    columns = {"topic": ["t"], "key": [giant], "queue_id": [0], "size": [1], "timestamp_ms": [BASE_MS]}
    index.put_batch({name: 10_000 * values for name, values in columns.items()} | {"offset": range(10_000)})
    index.seal()
    index.run_lifecycle()
    found = index.query_many([Lookup(topic="t", key=key, max_count=2) for key in (giant, absent)])
    assert [[item.offset for item in result.items] for result in found] == [[9_999, 9_998], []]
