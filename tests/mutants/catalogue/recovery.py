"""Defects of what a restart makes of the folders."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

CRASHES = "tests/reliability/test_crashes.py::test_every_crash[writing]"
BURSTS = "tests/regressions/test_bursts_of_disk_faults.py"
DAMAGE = "tests/faults/test_damage.py"

MUTANTS = (
    Mutant(
        "recovery-keeps-temporaries",
        "half-made work of a crash is never deleted",
        "service/lifecycle/recovery.py",
        "for path in temporaries:",
        "for path in temporaries[:0]:",
        (CRASHES,),
    ),
    Mutant(
        "recovery-prefers-unsealed",
        "of a file that is both unsealed and compacted the earlier state is kept beside the later one",
        "service/lifecycle/recovery.py",
        "state is not None and file_id not in local and _has_newer_journal(file_id, path, journal_path, state",
        """(
            path.exists()
            or state is not None
            and file_id not in local
            and _has_newer_journal(file_id, path, journal_path, state)
        """,
        ("tests/unit/service/test_recovery.py::test_an_unsealed_form_that_came_back_is_dropped[compacted]",),
    ),
    Mutant(
        "recovery-prefers-compacted",
        "of a file that is both compacted and uploaded the earlier state is kept beside the later one",
        "service/lifecycle/recovery.py",
        "if file_id in ids[UPLOADED]:",
        "if file_id in ids[UPLOADED] and False:",
        ("tests/unit/service/test_recovery.py::test_of_two_states_of_a_file_the_later_one_stays",),
    ),
    Mutant(
        "recovery-trusts-compacted",
        "an unsealed file is dropped for a compacted one whose items don't verify",
        "service/lifecycle/recovery.py",
        "                verify_runs(file)\n",
        "",
        (f"{DAMAGE}::test_a_damaged_compacted_file_is_made_again_from_its_unsealed_form",),
    ),
    Mutant(
        "recovery-drops-before-the-name",
        "an unsealed file is dropped before the name of its compacted form is durable",
        "service/lifecycle/recovery.py",
        "        root.disk.sync_folder(root.folder(COMPACTED))\n",
        "",
        (f"{BURSTS}::test_a_compacted_file_has_its_name_before_a_recovery_drops_the_unsealed_one",),
    ),
    Mutant(
        "recovery-believes-short-journal",
        "a journal that lost durable entries passes for a short file",
        "service/lifecycle/recovery.py",
        "claims.get(file_id, 0)",
        "0",
        (
            "tests/regressions/test_lost_end_of_a_journal.py::test_what_a_journal_lost_is_damage_where_a_younger_file_is",
        ),
    ),
    Mutant(
        "recovery-forgets-damage",
        "a file that can't be read is left out: a short answer without a word",
        "service/lifecycle/recovery.py",
        "            found.damaged.append(_damaged(file_id, UNSEALED, typed, journal))",
        "            del typed",
        (f"{DAMAGE}::test_a_damaged_unsealed_file_fails_the_lookups_that_meet_it_and_is_kept",),
    ),
    Mutant(
        "recovery-forgets-positions",
        "durable positions of unsealed files are lost at a restart",
        "service/lifecycle/recovery.py",
        "found.positions = max_positions(found.positions, unsealed.positions)",
        "pass",
        ("tests/unit/service/test_buffer_flush_catalog.py::test_positions_survive_every_file",),
    ),
    Mutant(
        "recovery-loses-end-time",
        "the header's end timestamp is lost at a restart (RocketMQ 10656)",
        "service/files/unsealed.py",
        "table.load(entries, journal.end_ms)",
        "table.load(entries, journal.begin_ms)",
        ("tests/unit/service/test_recovery.py::test_the_end_timestamp_survives_a_restart",),
    ),
    Mutant(
        "recovery-chains-not-rebuilt",
        "entries of a recovered file are there but no chain leads to them",
        "format/unsealed.py",
        "self.heads[:] = self._next_heads\n        self.end_ms",
        "self.end_ms",
        (CRASHES,),
    ),
    Mutant(
        "reader-forgets-damage",
        "a reader beside the writer leaves out an unsealed file that it can't read",
        "service/reading/root_view.py",
        "except (TieredIndexError, ValueError) as error:",
        "except (TieredIndexError, ValueError) as error:\n                continue",
        (f"{DAMAGE}::test_a_damaged_journal_fails_a_readers_lookups_too",),
    ),
)
