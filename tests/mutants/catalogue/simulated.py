"""Defects that show where threads, hosts, crashes and faults meet: the simulation finds each within its first lives."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

LIVES = ("tests/reliability/test_simulation.py::test_no_life_goes_wrong[short]",)

MUTANTS = (
    Mutant(
        "lives-name-before-sync",
        "a file gets its name before its bytes are durable",
        "storage/disk.py",
        "                self.sync(descriptor)\n        except Exception:",
        "                pass\n        except Exception:",
        LIVES,
    ),
    Mutant(
        "lives-journal-unsynced",
        "a flush returns before its journal is durable",
        "service/files/unsealed.py",
        "log, self._journal_length)\n        self._disk.sync(self._journal_descriptor)\n",
        "log, self._journal_length)\n",
        LIVES,
    ),
    Mutant(
        "lives-gap-while-flushed",
        "entries leave the buffer before a file shows them",
        "service/writing/flusher.py",
        "        try:\n            # positions become durable with the last rows",
        "        self._buffer.end_flush()\n        try:\n            # positions become durable with the last rows",
        LIVES,
    ),
)
