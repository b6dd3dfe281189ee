"""If a writer died between the deletions of a compacted file's entries and journal, every lookup beside it failed."""

from __future__ import annotations

import shutil


def test_a_journal_alone_does_not_stop_readers(open_index, open_reader, tmp_path):
    root, service = tmp_path / "root", open_index()
    service.put("t", 0, "k", 1, 1, 1_700_000_000_000)
    service.seal()
    (journal,) = (root / "unsealed").glob("*.journal")
    kept = shutil.copy(journal, tmp_path)
    for published in (False, True):
        service.run_lifecycle()
        shutil.copy(kept, journal)
        if published:  # the local copy is retired: only the storage has the file
            for path in (root / "uploaded").iterdir():
                path.unlink()
        result = open_reader("root").query("t", "k")
        assert (result.status, [item.offset for item in result]) == ("complete", [1])
    service.abandon()
    assert [item.offset for item in open_index().query("t", "k")] == [1]
    assert not journal.exists()
