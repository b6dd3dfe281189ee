"""Before an upload, only the items of a local compacted file were checked. So a damaged header, slot table or filter
was published: this project's lookups don't need them, but other readers do.
"""

from __future__ import annotations

import pytest

from tests.support.damage import flip
from tiered_index.errors import CorruptFile
from tiered_index.format.trailer import Tail

FILTER = -1
PLACES = {
    "filter": FILTER,
    "header": 10,
    "end of the header": 27,
    "slot table": 28 + 8 * 3 + 2,
    "end of the slot table": 28 + 8 * 7 - 1,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("preset", ["native", "rocketmq"])
def test_a_damaged_table_is_not_published(leave_compacted, open_index, storage, tmp_path, place, reopened, preset):
    service = leave_compacted(count=20, preset=preset)
    (path,) = (tmp_path / "root" / "compacted").iterdir()
    if place == FILTER:
        place = Tail.decode(path.read_bytes(), path.name, path.stat().st_size).position + 5
    flip(path, place)
    damaged = path.read_bytes()
    if reopened:
        service.abandon()
        service = open_index()
    for _ in range(2):
        with pytest.raises(CorruptFile, match=path.name):
            service.run_lifecycle()
        assert not list(storage.list("data/"))
        assert not service.log_state.objects
        assert path.read_bytes() == damaged
    assert service.health()["problems"]
