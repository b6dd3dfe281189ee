"""Defects that show where threads, hosts, crashes and faults meet: the simulation finds each within its first lives."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

LIVES = ("tests/reliability/test_simulation.py::test_no_life_goes_wrong[short]",)

MUTANTS = (
    Mutant(
        "lives-fence-passed", "a writer that was taken over publishes on",
        "service/storage_log.py", "                if epoch is not None and state.epoch > epoch:", "                if epoch == 0:",
        LIVES,
    ),
    Mutant(
        "lives-name-before-sync", "a file gets its name before its bytes are durable",
        "storage/disk.py", "                self.sync(descriptor)\n            finally:", "                pass\n            finally:",
        LIVES,
    ),
    Mutant(
        "lives-deleted-before-compacted", "a sealed file goes before its successor is there",
        "service/lifecycle.py", "            disk.write_file(temporary, pieces)\n",
        "            self._deletions.unlink([file.journal_path, file.path])\n            disk.write_file(temporary, pieces)\n",
        LIVES,
    ),
    Mutant(
        "lives-journal-unsynced", "a flush returns before its journal is durable",
        "service/unsealed_file.py",
        "log, self._journal_length)\n        self._disk.sync(self._journal_descriptor)\n", "log, self._journal_length)\n",
        LIVES,
    ),
    Mutant(
        "lives-swept-young", "a sweep takes what is about to be published",
        "service/orphans.py", "for info in storage.list(prefix) if info.modified_ms < before_ms]", "for info in storage.list(prefix)]",
        LIVES,
    ),
)
