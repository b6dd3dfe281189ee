"""Defects of exports: entries missing or twice, files deleted under them, a checksum that overlooks something."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

EXPORT = "tests/unit/service/test_export.py"
FILE = "service/lookup/export.py"
STATES = f"{EXPORT}::test_every_state_has_each_entry_once"

MUTANTS = (
    Mutant(
        "export-without-flush",
        "a writer's export misses what is in the buffer",
        "service/index.py",
        "self.flush()\n        return super().export(topics, begin_ms, end_ms)",
        "return super().export(topics, begin_ms, end_ms)",
        (STATES,),
    ),
    Mutant(
        "export-end-exclusive",
        "entries of the range's last second are left out",
        FILE,
        "(seconds <= wanted.second_max)",
        "(seconds < wanted.second_max)",
        (STATES,),
    ),
    Mutant(
        "export-of-merged-copies",
        "local copies of merged files are exported beside the table",
        FILE,
        "elif not handle.is_left_over(files):",
        "else:",
        (f"{EXPORT}::test_local_copies_of_merged_files_do_not_count_twice",),
    ),
    Mutant(
        "export-holds-nothing",
        "a writer deletes files that an open export has yet to read",
        "service/lookup/lookups.py",
        "held.enter_context(self._catalogs[0].reading())",
        "held.callback(int)",
        (f"{EXPORT}::test_a_writer_deletes_nothing_that_an_open_export_may_read",),
    ),
    Mutant(
        "export-of-damaged-copies",
        "a damaged local copy fails an export though the storage has the file",
        FILE,
        "verify_runs(copy)",
        "hash(verify_runs)",
        (f"{EXPORT}::test_a_damaged_local_copy_is_passed_over_where_the_storage_has_the_file",),
    ),
    Mutant(
        "export-checksum-without-topic",
        "entries of another topic have the same checksum",
        FILE,
        'items["topic_id"] = ids[',
        'items["topic_id"] = 0 * ids[',
        (f"{EXPORT}::test_the_checksum_tells_topics_and_values_but_not_ids_or_order",),
    ),
    Mutant(
        "export-of-a-dead-writers-root-twice",
        "a file that was published unheard and merged since is counted with what it was merged into",
        "service/lookup/inventory.py",
        "over |= begun.keys() & self._removals.files(state, min(begun.values()))",
        "pass",
        (f"{EXPORT}::test_a_file_that_was_merged_before_its_dead_writer_knew_counts_once",),
    ),
)
