"""Checks that are skipped: checksums, numbers that must follow each other, files that are not what they say."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

DAMAGE = "tests/faults/test_damage.py"
DAMAGED_LOG = "tests/faults/test_damaged_log.py"
JOURNAL = "tests/unit/format/test_journal.py"
TRAILER = "tests/unit/format/test_trailer.py"
MEANING = "tests/regressions/test_bytes_of_wrong_meaning.py"
TABLES = "tests/regressions/test_tables_of_a_compacted_file.py::test_a_damaged_table_is_not_published"

MUTANTS = (
    Mutant(
        "entries-crc-skipped",
        "entries are believed without their CRC32",
        "service/files/unsealed.py",
        "problem, batch.crc32, crc, offset=start",
        "problem, crc, crc, offset=start",
        (f"{DAMAGE}::test_an_entry_that_rots_while_the_writer_runs_is_not_compacted",),
    ),
    Mutant(
        "slot-group-crc-skipped",
        "slot groups are believed without their CRC32",
        "service/cold/path.py",
        "if (found := crc32(piece)) != run.crc32:",
        "if (found := crc32(piece)) is None:",
        (f"{DAMAGE}::test_a_damaged_object_is_named_and_other_files_still_answer",),
    ),
    Mutant(
        "tail-crc-skipped",
        "a trailer's tail is believed without its CRC32",
        "format/trailer.py",
        "if found != crc:",
        "if found is None:",
        (f"{TRAILER}::test_every_flipped_bit_is_noticed",),
    ),
    Mutant(
        "directory-crc-skipped",
        "a directory is believed without its CRC32",
        "format/trailer.py",
        "if (found := crc32(part)) != crc:",
        'if (found := crc32(part)) != crc and name != "directory":',
        (f"{TRAILER}::test_every_flipped_bit_is_noticed",),
    ),
    Mutant(
        "directory-unchecked",
        "a directory is believed that does not cover the items once",
        "format/trailer.py",
        "    trailer.directory.check(trailer.metadata, tail.position, file)\n",
        "",
        (f"{MEANING}::test_lookups[overlapping]",),
    ),
    Mutant(
        "blocks-unchecked",
        "blocks are believed that are empty or end before they begin",
        "format/trailer.py",
        'if not blocks["count"].all() or',
        "if False and",
        (f"{MEANING}::test_lookups[ends_before_it_begins]",),
    ),
    Mutant(
        "journal-of-another-file",
        "a journal is believed that names another file than its name does",
        "format/journal.py",
        "file_id not in (None, journal.file_id)",
        "file_id == ()",
        (f"{MEANING}::test_a_journal_that_names_another_file_leaves_that_one_alone",),
    ),
    Mutant(
        "floats-for-integers",
        "a document's float or flag is taken for a number",
        "documents.py",
        "if value.__class__ is int and low <= value <= high:",
        "if low <= value <= high:",
        (f"{MEANING}::test_a_journal_of_other_types[a flag as order]",),
    ),
    Mutant(
        "metadata-crc-skipped",
        "metadata are believed without their CRC32",
        "format/trailer.py",
        "if (found := crc32(part)) != crc:",
        'if (found := crc32(part)) != crc and name != "metadata":',
        (f"{TRAILER}::test_every_flipped_bit_is_noticed",),
    ),
    Mutant(
        "filter-crc-skipped",
        "verify passes a damaged filter",
        "format/verify.py",
        "if zlib.crc32(data) != tail.filter_crc32:",
        "if data is None:",
        (f"{TRAILER}::test_filter_lies_between_arrays_and_directory",),
    ),
    Mutant(
        "items-that-the-filter-denies",
        "verify passes a filter that denies items of the file",
        "format/verify.py",
        "        if denied:\n",
        "        if denied < 0:\n",
        ("tests/unit/format/test_verify.py::test_every_bit_of_the_filter_counts",),
    ),
    Mutant(
        "tables-crc-skipped",
        "a compacted file with a damaged header or slot table is published",
        "service/files/compacted.py",
        'does not match its CRC32", expected, found, offset=start)',
        'does not match its CRC32", found, found, offset=start)',
        (f"{TABLES}[native-False-slot table]",),
    ),
    Mutant(
        "items-unverified-before-upload",
        "a compacted file with damaged items is published",
        "service/lifecycle/lifecycle.py",
        "        verify_tables(file)\n        verify_runs(file)\n",
        "        verify_tables(file)\n",
        ("tests/unit/service/test_uploads.py::test_damaged_items_are_not_published",),
    ),
    Mutant(
        "journal-crc-skipped",
        "journal records are believed without their CRC32",
        "format/journal.py",
        "== crc else None",
        "is not None else None",
        (f"{JOURNAL}::test_every_flipped_bit",),
    ),
    Mutant(
        "journal-record-lost",
        "a journal that lost a record in its middle is believed",
        "format/journal.py",
        "batch.first != journal.count + 1 or ",
        "",
        (f"{JOURNAL}::test_a_lost_record_is_noticed",),
    ),
    Mutant(
        "journal-damage-taken-for-crash",
        "a damaged record before a whole one passes for a torn last write",
        "format/journal.py",
        'raise CorruptFile(file, "damaged record before a whole one", offset=position)',
        "break",
        (f"{JOURNAL}::test_damaged_middle_names_where",),
    ),
    Mutant(
        "log-crc-skipped",
        "log records are believed without their CRC32",
        "service/log/records.py",
        "if not mark or tail != expected:",
        "if not mark:",
        (f"{DAMAGED_LOG}::test_a_flipped_bit_anywhere_in_a_record_is_found",),
    ),
    Mutant(
        "log-record-lost",
        "a log with a hole is read as if nothing were missing",
        "service/log/log.py",
        '"the log has a hole before this record", expected, number_of(name))',
        '"the log has a hole before this record", expected, expected)',
        ("tests/unit/service/test_checkpoints.py::test_a_record_that_is_lost_is_found_by_whoever_reads_on_or_writes",),
    ),
    Mutant(
        "log-number-unchecked",
        "a record that stands under another number is believed",
        "service/log/state.py",
        "self.number + 1, record.number",
        "record.number, record.number",
        ("tests/unit/service/test_log_and_lease.py::test_a_record_under_another_number_is_damage",),
    ),
    Mutant(
        "checkpoint-damage-fatal",
        "a damaged checkpoint, which is but a cache, keeps the index from opening",
        "service/log/log.py",
        "except CorruptFile as error:",
        "except TypeError as error:",
        (f"{DAMAGED_LOG}::test_a_damaged_checkpoint_is_passed_over",),
    ),
    Mutant(
        "object-of-another-file",
        "an object is believed though it is not the file that the log names",
        "service/cold/path.py",
        "found = (meta.file_id, meta.count,",
        "found = (stored.file_id, meta.count,",
        ("tests/unit/service/test_uploads.py::test_an_object_that_is_another_file_is_damage",),
    ),
    Mutant(
        "cursor-of-another-query",
        "a cursor is taken for another query than the one that gave it out",
        "service/answers/rows.py",
        "if stored != digest:",
        "if stored is None:",
        ("tests/unit/service/test_paging_and_cursors.py::test_a_cursor_belongs_to_its_query",),
    ),
)
