"""A closed service or reader answers nothing any more, so it holds no mapping either, whoever still has the object."""

from __future__ import annotations

from tests.stress.census import census
from tiered_index import IndexReader, IndexService
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000


def test_close_lets_go_of_every_file(tmp_path, disk):
    storage = MemoryStorage()
    service = IndexService.open(root=tmp_path / "root", storage_backend=storage, disk=disk, slots=7, items=4, background=False)
    for number in range(30):
        service.put("t", 0, "k", number, 1, NOW_MS)
    service.flush()
    service.run_lifecycle()
    reader = IndexReader.open(root=tmp_path / "root", storage_backend=storage)
    assert len(reader.query("t", "k")) == len(service.query("t", "k")) == 30
    reader.close()
    service.close()
    left = census(tmp_path)
    assert (left.below, left.mappings) == (0, 0)
    assert service.files() is not None  # the objects are still here
    assert reader is not None
