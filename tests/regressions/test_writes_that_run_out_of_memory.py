"""A file stayed behind, half made, if the making of its bytes failed with an error other than one of the operating
system. Each round of a life cycle without enough memory left one more.
"""

from __future__ import annotations

import pytest

from tests.support.disk_faults import FaultDisk
from tiered_index.format import compacted
from tiered_index.storage.disk import Disk

NOW_MS = 1_700_000_000_000
ERRORS = [MemoryError("no memory for a piece"), ValueError("no such piece"), OSError(5, "no disk")]


@pytest.mark.parametrize("disk", [Disk(), FaultDisk()], ids=["disk", "fault disk"])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("pieces", [0, 1, 5])
def test_a_file_whose_making_fails_is_removed(tmp_path, disk, error, pieces):
    def making():
        for _ in range(pieces):
            yield b"x" * 100
        raise error

    with pytest.raises(type(error)) as raised:
        disk.write_file(tmp_path / ".tmp-1", making())
    assert raised.value is error
    assert list(tmp_path.iterdir()) == []


def test_a_compaction_that_fails_leaves_nothing_behind(open_index, tmp_path, monkeypatch):
    service = open_index()
    for number in range(30):
        service.put("t", 0, "k", number, 1, NOW_MS)
    service.seal()

    def fail(*arguments):
        raise MemoryError("no memory for a chunk")

    with monkeypatch.context() as patch:
        patch.setattr(compacted.Compaction, "_gathered", fail)
        for _ in range(3):
            with pytest.raises(MemoryError):
                service.run_lifecycle()
            assert list((tmp_path / "root" / "compacted").iterdir()) == []
            service.abandon()
            service = open_index()
    assert len(service.query("t", "k")) == 30
    service.run_lifecycle()
    assert [handle.place for handle in service.files()] == ["uploaded"]
    assert len(service.query("t", "k")) == 30
    assert [path.name for path in (tmp_path / "root").rglob(".tmp-*") if path.parent.name == "compacted"] == []
