"""Defects of what is on the disk when a call returns: syncs left out, steps in the wrong order, space that was only
promised.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

DISK = "tests/unit/storage/test_disk.py"
CRASHES = "tests/reliability/test_crashes.py::test_every_crash"
BURSTS = "tests/regressions/test_bursts_of_disk_faults.py"
LOCAL = "tests/storage/test_local_crashes.py"
SYNCED = f"{LOCAL}::test_data_is_synced_before_it_is_named_and_every_new_name_after"

MUTANTS = (
    Mutant(
        "disk-fdatasync-dropped",
        "a sync of a file never reaches the system",
        "storage/disk.py",
        "os.fdatasync(descriptor)",
        "pass",
        (f"{DISK}::test_syncs_reach_the_system",),
    ),
    Mutant(
        "disk-folder-fsync-dropped",
        "a sync of a folder never reaches the system",
        "storage/disk.py",
        "os.fsync(descriptor)",
        "pass",
        (f"{DISK}::test_syncs_reach_the_system",),
    ),
    Mutant(
        "disk-space-only-promised",
        "the next file's space is a hole, not blocks: a full disk strikes later",
        "storage/disk.py",
        "os.posix_fallocate(descriptor, 0, size_bytes)",
        "os.ftruncate(descriptor, size_bytes)",
        (f"{DISK}::test_reserved_space_is_really_taken",),
    ),
    Mutant(
        "disk-create-overwrites",
        "creating a file takes over one that is there",
        "storage/disk.py",
        "os.O_RDWR | os.O_CREAT | os.O_EXCL",
        "os.O_RDWR | os.O_CREAT",
        (f"{DISK}::test_a_file_that_is_there_is_not_created_anew",),
    ),
    Mutant(
        "disk-write-cut-short",
        "a write that the system cut short is not continued",
        "storage/disk.py",
        "while len(view):",
        "if len(view):",
        (f"{DISK}::test_a_write_that_is_cut_short_goes_on",),
    ),
    Mutant(
        "disk-rename-before-sync",
        "a compacted file gets its name before its bytes are durable",
        "storage/disk.py",
        "                self.sync(descriptor)\n        except Exception:",
        "                pass\n        except Exception:",
        (f"{SYNCED}[put]",),
    ),
    Mutant(
        "disk-publish-without-folder-sync",
        "a published file's name is not durable when its predecessor goes",
        "storage/disk.py",
        "self.rename(temporary, target)\n        self.sync_folder(target.parent)",
        "self.rename(temporary, target)",
        (f"{CRASHES}[lifecycle]",),
    ),
    Mutant(
        "append-entries-unsynced",
        "the journal confirms entries that were not synced",
        "service/files/unsealed.py",
        "    self._disk.sync(self._descriptor)\n        self._is_blank = False",
        "    pass\n        self._is_blank = False",
        (f"{CRASHES}[writing]",),
    ),
    Mutant(
        "append-journal-unsynced",
        "a flush returns before the journal's record is durable",
        "service/files/unsealed.py",
        "self._disk.pwrite(self._journal_descriptor, log, self._journal_length)\n        "
        "self._disk.sync(self._journal_descriptor)",
        "self._disk.pwrite(self._journal_descriptor, log, self._journal_length)",
        (f"{CRASHES}[writing]",),
    ),
    Mutant(
        "append-journal-before-entries",
        "the journal's record is written before the entries that it confirms",
        "service/files/unsealed.py",
        "        if len(batch):\n            self._disk.pwrite(self._descriptor, data",
        "        self._disk.pwrite(self._journal_descriptor, log, self._journal_length)\n"
        "        if len(batch):\n            self._disk.pwrite(self._descriptor, data",
        (f"{CRASHES}[writing]",),
    ),
    Mutant(
        "begin-folder-unsynced",
        "a new file takes entries before its name is durable",
        "service/files/unsealed.py",
        "            disk.sync_folder(root.folder(UNSEALED))\n",
        "",
        (f"{CRASHES}[writing]",),
    ),
    Mutant(
        "append-goes-on-after-failed-sync",
        "a file takes more entries after a sync of it has failed",
        "service/files/unsealed.py",
        "self.failed = True  # until the last line",
        "pass",
        (
            "tests/faults/test_full_disk.py::test_after_a_failed_sync_a_file_takes_no_more_and_its_entries_go_to_the_next_one",
        ),
    ),
    Mutant(
        "append-visible-before-durable",
        "a batch is counted and searchable before it is durable",
        "service/files/unsealed.py",
        "        if len(batch):\n            self._disk.pwrite(self._descriptor, data",
        "        self.table.commit(batch)\n        self.batches.append(record)\n"
        "        if len(batch):\n            self._disk.pwrite(self._descriptor, data",
        (
            "tests/faults/test_full_disk.py::test_after_a_failed_sync_a_file_takes_no_more_and_its_entries_go_to_the_next_one",
        ),
    ),
    Mutant(
        "recovery-trusts-what-it-reads",
        "a journal's last record counts as durable though its sync may have failed",
        "service/files/unsealed.py",
        "root.disk.pwrite(journal_descriptor, data[: journal.valid_length], 0)",
        "pass",
        (f"{BURSTS}::test_recovery_writes_again_what_a_failed_sync_may_not_have_written",),
    ),
    Mutant(
        "given-up-half",
        "a file that is given up is deleted though its journal may say entries",
        "service/files/unsealed.py",
        "root.disk.publish(temporary, journal_path)",
        "pass",
        (f"{BURSTS}::test_a_file_that_is_given_up_is_nothing_to_a_reader_however_far_its_deletion_went",),
    ),
    Mutant(
        "compact-deletes-first",
        "the unsealed file goes before its compacted form has its name",
        "service/lifecycle/lifecycle.py",
        '        root.write_file(target, pieces, f"compacting',
        "        root.disk.unlink(file.journal_path)\n        root.disk.unlink(file.path)\n"
        '        root.write_file(target, pieces, f"compacting',
        (f"{CRASHES}[lifecycle]",),
    ),
    Mutant(
        "local-put-name-unsynced",
        "an object's name is not durable when the put returns",
        "storage/local/files.py",
        "absent)\n            self.disk.sync_folder(target.parent)",
        "absent)",
        (f"{SYNCED}[put_if_absent]",),
    ),
    Mutant(
        "local-folder-unsynced",
        "the folder that an object lies in is not durable when the put returns",
        "storage/local/files.py",
        "            # Also where the folder was there: another process may have made it and not yet synced its "
        "parent.\n"
        "            self.disk.sync_folder(folder.parent)\n",
        "",
        (f"{SYNCED}[put]",),
    ),
    Mutant(
        "local-delete-unsynced",
        "a deleted object can come back after a power cut",
        "storage/local/storage.py",
        "self._disk.sync_folder(parent)",
        "pass",
        (f"{LOCAL}::test_a_delete_is_durable_when_it_returns",),
    ),
    Mutant(
        "sqlite-commit-unsynced",
        "a commit does not wait for the disk",
        "storage/sqlite/connections.py",
        "PRAGMA synchronous=FULL",
        "PRAGMA synchronous=NORMAL",
        ("tests/storage/test_sqlite_locks.py::test_a_commit_waits_for_the_disk",),
    ),
)
