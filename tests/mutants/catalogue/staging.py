"""Defects of compaction by jobs: what is staged, who may publish it, when the local copy goes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

STAGING = "tests/unit/service/staging"

MUTANTS = (
    Mutant(
        "staged-though-it-may-go-on",
        "a file whose seal is not durable is staged",
        "service/files/unsealed.py",
        "return self.sealed and not self.failed",
        "return self.sealed",
        (f"{STAGING}/test_staged_files.py::test_a_file_that_is_not_sealed_durably_is_compacted_here",),
    ),
    Mutant(
        "fenced-file-compacted",
        "a job publishes files of a fenced writer",
        "service/lifecycle/staged.py",
        "    if ticket.epoch != state.epoch:\n",
        "    if ticket.epoch > state.epoch:\n",
        (f"{STAGING}/test_races.py::test_nothing_of_a_fenced_writer_is_published",),
    ),
    Mutant(
        "compacted-twice",
        "a job publishes a file that is in the log already",
        "service/lifecycle/staged.py",
        "    if state.object_of(ticket.file_id) is not None:\n",
        "    if False:\n",
        (f"{STAGING}/test_races.py::test_two_jobs_publish_a_file_once",),
    ),
    Mutant(
        "merged-file-compacted-again",
        "a job publishes a file that was published and merged away",
        "service/lifecycle/staged.py",
        "if ticket.file_id in gone else",
        "if ticket.file_id is gone else",
        (f"{STAGING}/test_races.py::test_a_file_that_was_published_and_merged_away_does_not_come_again[staged]",),
    ),
    Mutant(
        "host-beside-a-job",
        "a host's upload and a job's publish one file under two names",
        "service/log/log.py",
        "if state.object_of(o.file_id) is None and o.file_id not in",
        "if o.name not in state.objects and o.file_id not in",
        (f"{STAGING}/test_races.py::test_a_job_that_takes_the_very_log_number_wins[False]",),
    ),
    Mutant(
        "adopted-before-the-position",
        "the local copy that is the last to say a position goes",
        "service/lifecycle/staging.py",
        "not is_needed(kept, handles, logged)",
        "kept",
        (f"{STAGING}/test_positions.py::test_positions_never_run_ahead_of_an_older_file",),
    ),
    Mutant(
        "position-dropped-at-recovery",
        "a file that a job has published goes at a restart, and its position with it",
        "service/lifecycle/recovery.py",
        "return has_newer_positions(journal, state.positions)",
        "return False",
        (f"{STAGING}/test_positions.py::test_positions_never_run_ahead_of_an_older_file",),
    ),
    Mutant(
        "adopted-unseen",
        "an object of another size than the log says is believed",
        "service/lifecycle/staging.py",
        'check_size(storage, stored, "the local file")',
        "storage.head(stored.name)",
        (f"{STAGING}/test_damage.py::test_an_object_of_another_size_is_not_believed",),
    ),
    Mutant(
        "staged-damage-compacted",
        "staged entries are believed without their CRC32",
        "service/lifecycle/staged.py",
        "if len(data) == length and found == list(pieces):",
        "if len(data) == length:",
        (f"{STAGING}/test_damage.py::test_a_flipped_bit_among_staged_entries_is_found",),
    ),
    Mutant(
        "waits-for-good",
        "a host never compacts what it has staged",
        "service/lifecycle/staging.py",
        "return self._enabled and file.ended and not overdue",
        "return self._enabled and file.ended",
        (f"{STAGING}/test_staged_files.py::test_after_its_time_the_host_compacts_by_itself",),
    ),
    Mutant(
        "ticket-not-renewed",
        "a root that is opened again sends its entries again",
        "service/lifecycle/staging.py",
        "                keep = self._renew(file_id, ",
        "                keep = (lambda *_: set())(file_id, ",
        (f"{STAGING}/test_staged_files.py::test_a_restart_renews_tickets_and_keeps_their_time",),
    ),
    Mutant(
        "staged-left-behind",
        "what was staged stays after the file was adopted",
        "service/lifecycle/staging.py",
        "                self._leftovers += [staged.ticket.name, staged.ticket.object]\n",
        "",
        (f"{STAGING}/test_staged_files.py::test_a_file_is_staged_compacted_elsewhere_and_adopted",),
    ),
    Mutant(
        "staged-swept-while-it-waits",
        "orphans are objects that a ticket asks for",
        "service/lifecycle/orphans.py",
        """
        name
        for ticket, modified_ms in tickets
        if not is_over(ticket, modified_ms)
        for name in (ticket.name, ticket.object)
    """,
        "name for ticket, modified_ms in tickets if not is_over(ticket, modified_ms) for name in (ticket.name,)",
        (f"{STAGING}/test_orphans.py::test_orphans_know_what_is_staged",),
    ),
    Mutant(
        "clock-of-the-first-alone",
        "files wait one after another for a storage that refuses staging",
        "service/lifecycle/lifecycle.py",
        "self._staging.begin_clocks(sealed)",
        "self._staging.begin_clocks(sealed[:1])",
        (
            f"{STAGING}/test_faults.py::test_a_storage_that_refuses_staging_for_good_makes_the_host_compact_in_time[put]",
        ),
    ),
    Mutant(
        "one-task-fails-all",
        "an error of a task takes what the others did",
        "service/lifecycle/staged.py",
        "    except (TieredIndexError, OSError) as error:\n        return _failed(ticket, error)\n    return StagedResult(ticket, finished)",
        "    except UnicodeError as error:\n        return _failed(ticket, error)\n    return StagedResult(ticket, finished)",
        (f"{STAGING}/test_faults.py::test_a_file_whose_task_fails_again_and_again_stops_no_other_one[disk]",),
    ),
    Mutant(
        "damage-stays-after-a-merge",
        "a damaged local copy fails lookups though its entries were published and merged away",
        "service/lifecycle/context.py",
        "if file_id not in context.removals.files(state, self._before(state)):",
        "if file_id:",
        (f"{STAGING}/test_damage.py::test_a_damaged_local_copy_of_what_was_published_is_let_go_of[merged--]",),
    ),
    Mutant(
        "position-goes-with-the-damage",
        "what a damaged copy's journal alone says of positions is dropped",
        "service/lifecycle/context.py",
        "has_newer_positions(journal, context.append_positions(journal))",
        "context.append_positions(journal) is None",
        (f"{STAGING}/test_damage.py::test_the_position_of_a_damaged_copy_waits_for_an_older_file",),
    ),
    Mutant(
        "damaged-not-asked-for",
        "of a damaged local copy what is staged is swept, not asked for",
        "service/lifecycle/staging.py",
        "DamagedFile) or (isinstance(file, UnsealedFile) and file.ended)",
        "UnsealedFile) and file.ended",
        (f"{STAGING}/test_damage.py::test_what_is_staged_heals_a_damaged_local_copy[-published]",),
    ),
)
