"""A writer that died between the deletions of a compacted file's entries and journal made every lookup beside it
fail.
"""

from __future__ import annotations

import shutil

from tiered_index import IndexReader, IndexService
from tiered_index.storage.memory import MemoryStorage


def test_a_journal_alone_does_not_stop_readers(tmp_path):
    root, storage = tmp_path / "root", MemoryStorage()
    settings = {"root": root, "slots": 7, "items": 12, "background": False}
    service = IndexService.open(storage_backend=storage, **settings)
    service.put("t", 0, "k", 1, 1, 1_700_000_000_000)
    service.seal()
    (journal,) = (root / "unsealed").glob("*.journal")
    kept = tmp_path / journal.name
    shutil.copy(journal, kept)
    for published in (False, True):
        service.run_lifecycle()
        shutil.copy(kept, journal)
        if published:  # the local copy is retired: only the storage has the file
            for path in (root / "uploaded").iterdir():
                path.unlink()
        with IndexReader.open(root=root, storage_backend=storage) as reader:
            result = reader.query("t", "k")
            assert (result.status, [item.offset for item in result]) == ("complete", [1])
    service.abandon()
    with IndexService.open(storage_backend=storage, **settings) as service:
        assert [item.offset for item in service.query("t", "k")] == [1]
    assert not journal.exists()
