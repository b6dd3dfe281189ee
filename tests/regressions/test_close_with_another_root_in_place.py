"""`close` deleted files by name that compaction had replaced, even if another folder had taken the root's place. So a
restored backup lost its only copy of the entries.
"""

from __future__ import annotations

import shutil

import pytest

from tests.support.storage_faults import FaultStorage
from tiered_index import IndexConfig
from tiered_index.errors import RootBehind, StorageUnavailable
from tiered_index.service.anew import begin_anew

NOW_MS = 1_700_000_000_000


def contents(root):
    """Return the files of a root with their bytes, except half-made ones, which any process may delete."""
    paths = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".tmp-")]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("more", [False, True], ids=["nothing buffered", "a put buffered"])
@pytest.mark.parametrize("copied", ["before", "after"])
@pytest.mark.parametrize("uploads", [False, True], ids=["no upload", "uploaded"])
def test_a_backup_in_the_roots_place_stays_as_it_is(open_index, storage, tmp_path, copied, uploads, more, clock):
    root, backup = tmp_path / "root", tmp_path / "backup"
    faulty = FaultStorage(storage)
    service = open_index(storage_backend=faulty, local_keep_s=0)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.seal()
    if copied == "before":
        shutil.copytree(root, backup)
    if not uploads:
        faulty.fail("put", times=None, name_prefix="data/")
    with service._catalog.reading():  # a running lookup, so that the replaced file has to wait
        if uploads:
            service.run_lifecycle()
        else:
            with pytest.raises(StorageUnavailable):
                service.run_lifecycle()
    assert service._catalog._disposals
    if copied == "after":
        shutil.copytree(root, backup)
    root.rename(tmp_path / "moved")
    backup.rename(root)
    before = contents(root)
    assert any(name.startswith("unsealed/") for name in before)
    with pytest.raises(StorageUnavailable, match="opened"):
        service.run_lifecycle()
    if more:  # there is no file for it
        service.put("t", 0, "k", 2, 1, NOW_MS)
        with pytest.raises(StorageUnavailable, match="opened"):
            service.close()
    else:
        service.close()
    assert contents(root) == before
    if copied == "before" and uploads:  # the copy doesn't know the later publications of its root
        with pytest.raises(RootBehind):
            open_index()
        config = IndexConfig(root=root, slots=7, items=20, background=False, query_threads=2)
        assert begin_anew(config, clock=clock, storage=storage).stored == 1
    restored = open_index()
    assert [(item.offset, item.size) for item in restored.query("t", "k")] == [(1, 1)]
    assert restored.health()["problems"] == []


def test_close_deletes_replaced_files_in_its_own_root(open_index, tmp_path):
    service = open_index(local_keep_s=0)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.seal()
    with service._catalog.reading():
        service.run_lifecycle()
    assert contents(tmp_path / "root" / "unsealed")
    service.close()
    assert contents(tmp_path / "root" / "unsealed") == {}
