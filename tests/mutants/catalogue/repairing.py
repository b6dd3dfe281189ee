"""Defects of repairs: a bad copy is taken for a good one, a good object is given up, what is lost is not told."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

REPAIR = "tests/unit/service/test_repair.py"
REBUILD = "tests/integration/cli/test_repair.py"
FILE = "service/checks/repair.py"
SALVAGE = "service/checks/salvage.py"
SEGMENTS = "rocketmq/archive/repair.py"
ERASED = "tests/rocketmq/test_archive_erased.py"

MUTANTS = (
    Mutant(
        "repair-from-a-copy-that-does-not-verify",
        "a copy is taken for a good one though its bytes are damaged",
        FILE,
        "if check(WindowedRead(read, size, lambda start, window: None), size, name):",
        "if check is None:",
        (f"{REPAIR}::test_a_copy_that_does_not_verify_is_none",),
    ),
    Mutant(
        "repair-names-what-it-did-not-read-back",
        "what was damaged on its way is recorded",
        FILE,
        "if again.findings or not _is_like(wanted or old, new):",
        "if not _is_like(wanted or old, new):",
        (f"{REPAIR}::test_what_was_damaged_on_its_way_is_not_recorded",),
    ),
    Mutant(
        "repair-gives-up-what-is-whole",
        "an object that a finding names is given up without another look",
        FILE,
        "        if not again.findings:\n            return False\n",
        "",
        (f"{REPAIR}::test_what_was_damaged_for_a_moment_is_left_alone",),
    ),
    Mutant(
        "repair-gives-up-what-is-newer",
        "an object of a newer version is taken for damage",
        FILE,
        "        except UnsupportedVersion:\n            return False\n",
        "        except UnsupportedVersion:\n            return True\n",
        (f"{REPAIR}::test_what_a_newer_version_wrote_is_left_alone",),
    ),
    Mutant(
        "repair-brings-back-what-was-merged",
        "an object that was merged meanwhile is put beside what it was merged into",
        FILE,
        "if name in state.objects or old.name not in state.objects:\n                return None",
        "if name in state.objects:\n                return None",
        (f"{REPAIR}::test_an_object_that_was_merged_meanwhile_is_left_alone",),
    ),
    Mutant(
        "repair-dry-run-acts",
        "what has no good copy is given up by a dry run",
        FILE,
        '        if yes:\n            self.log.append("what was lost", None, make)',
        '        self.log.append("what was lost", None, make)',
        (f"{REPAIR}::test_what_was_never_hidden_or_ingested_makes_no_entries",),
    ),
    Mutant(
        "salvage-forgets-what-is-lost",
        "an object of what verifies takes the place, and nothing says what is missing",
        FILE,
        "gone = () if lost is None else (lost,)",
        "gone = ()",
        (f"{REPAIR}::test_what_still_verifies_of_an_object_is_kept",),
    ),
    Mutant(
        "salvage-says-too-few-slots",
        "of the slots that are lost the last group's are not named",
        SALVAGE,
        "slot_high=firsts[last + 1]",
        "slot_high=firsts[first] + 1",
        (f"{REPAIR}::test_what_still_verifies_of_an_object_is_kept",),
    ),
    Mutant(
        "repaired-object-unseen",
        "a reader goes on reading the object whose place another has taken",
        "service/files/window_table.py",
        "shown.stored.stored != stored:",
        "shown.stored.stored is None:",
        (f"{REPAIR}::test_a_reader_that_stood_before_reads_the_object_that_took_the_place",),
    ),
    Mutant(
        "repair-believes-hashes",
        "a segment is sent again without messages whose key has the hash of an erased one",
        SEGMENTS,
        "if copy.crc32(patches) == segment.crc32:",
        "if copy.crc32(patches) is not None:",
        (f"{ERASED}::test_a_repair_from_the_source_leaves_keys_of_an_equal_hash_whole",),
    ),
    Mutant(
        "repair-segment-from-any-copy",
        "a segment is put back from a copy that is damaged itself",
        SEGMENTS,
        "if crc32 == segment.crc32:",
        "if crc32 is not None:",
        (f"{ERASED}::test_a_copy_that_is_damaged_or_of_another_log_is_none",),
    ),
    Mutant(
        "verify-believes-repairs",
        "a record that puts other entries in the place of an object is no finding",
        "service/checks/checks.py",
        "            if said != [(file_id, count + lost_entries, shard) for file_id, count, shard in put]:",
        "            if not said:",
        (f"{REPAIR}::test_a_record_that_puts_other_entries_in_the_place_is_found",),
    ),
    Mutant(
        "rebuild-brings-back-the-erased",
        "a rebuilt index takes what was erased out of the archive again",
        "cli/recovery.py",
        "shown = _shown(batch.columns, hidden, old.genesis)",
        "shown = batch.columns",
        (f"{REBUILD}::test_a_rebuilt_index_brings_back_nothing_that_was_erased",),
    ),
    Mutant(
        "rebuild-forgets-tombstones",
        "what was erased comes back with the store that a rebuilt index follows",
        "cli/recovery.py",
        "        take_over(index.storage, hidden, SystemClock())\n",
        "",
        (f"{REBUILD}::test_a_rebuilt_index_brings_back_nothing_that_was_erased",),
    ),
    Mutant(
        "repair-gives-up-unasked",
        "a damaged segment is given up though most of its messages can be read",
        "rocketmq/archive/repair.py",
        "            elif self.give_up:\n",
        "            else:\n",
        (f"{REBUILD}::test_segments_without_a_copy_are_given_up_when_that_is_asked_for",),
    ),
    Mutant(
        "repair-takes-another-index-for-a-copy",
        "another index counts as a copy that has nothing",
        "cli/verify.py",
        "if state is not None and not _origins(state) & _origins(other):",
        "if not other.genesis:",
        (f"{REBUILD}::test_places_that_are_none_are_refused_by_name[another]",),
    ),
    Mutant(
        "lost-without-a-dry-run",
        "a dry run gives up what the storage lost",
        "service/lifecycle/orphans.py",
        "    if dry_run:\n",
        "    if dry_run and not missing:\n",
        ("tests/integration/cli/test_verify.py::test_a_lost_object_is_named_then_given_up",),
    ),
)
