"""Defects of the life cycle: ages, uploads, what the log may say of positions, retirement."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

LIFE = "tests/unit/service/test_buffer_flush_catalog.py"
UPLOADS = "tests/unit/service/test_uploads.py"
LATE = "tests/unit/service/test_late_records.py"

MUTANTS = (
    Mutant(
        "sealed-late-by-age",
        "a file that is exactly old enough is not sealed",
        "service/writing/flusher.py",
        "appender.active.created_ms <= created_ms",
        "appender.active.created_ms < created_ms",
        (f"{LIFE}::test_a_file_is_sealed_by_age_and_not_before",),
    ),
    Mutant(
        "sealed-early-by-age",
        "a file is sealed before it is old enough",
        "service/lifecycle/lifecycle.py",
        "self._context.config.seal_after_s * 1000",
        "self._context.config.seal_after_s * 900",
        (f"{LIFE}::test_a_file_is_sealed_by_age_and_not_before",),
    ),
    Mutant(
        "retired-late-by-age",
        "a local copy that was kept exactly long enough is kept on",
        "service/lifecycle/lifecycle.py",
        "published_ms > before_ms and",
        "published_ms >= before_ms and",
        (f"{LIFE}::test_local_copies_go_by_age_or_by_bytes_oldest_first",),
    ),
    Mutant(
        "retired-newest-first",
        "beyond the bound in bytes the newest local copies go first",
        "service/lifecycle/lifecycle.py",
        "kept.sort(key=lambda file: file.sequence)",
        "kept.sort(key=lambda file: -file.sequence)",
        (f"{LIFE}::test_local_copies_go_by_age_or_by_bytes_oldest_first",),
    ),
    Mutant(
        "positions-lost-on-retire",
        "a local copy goes though nothing else says a source's position",
        "service/lifecycle/lifecycle.py",
        "if not is_needed(file, handles, logged):",
        "if logged is not None:",
        (f"{LIFE}::test_a_local_copy_stays_while_it_alone_says_a_position",),
    ),
    Mutant(
        "retired-though-the-object-is-cut",
        "the local copy goes though the storage's object has another size",
        "service/lifecycle/lifecycle.py",
        'check_size(self._context.session.storage, stored, "its local copy")',
        "assert stored is not None",
        (f"{UPLOADS}::test_a_local_copy_stays_while_its_object_is_not_whole",),
    ),
    Mutant(
        "retention-before-the-log",
        "a file is taken for uploaded before the log names its object",
        "service/lifecycle/lifecycle.py",
        "            make = publishing(session.epoch",
        "            self._move(file)\n            make = publishing(session.epoch",
        (f"{UPLOADS}::test_a_file_is_not_taken_for_uploaded_before_the_log_names_it",),
    ),
    Mutant(
        "upload-error-swallowed",
        "an upload that failed ends early and counts as done",
        "service/lifecycle/lifecycle.py",
        "            publication = self._sent(file_id, memoryview(local.data))\n",
        "            try:\n                publication = self._sent(file_id, memoryview(local.data))\n            except Exception:\n                return\n",
        (f"{UPLOADS}::test_a_failed_upload_leaves_nothing_behind",),
    ),
    Mutant(
        "upload-size-unchecked",
        "an object that arrived cut short is published",
        "service/lifecycle/publication.py",
        "if size == one.size_bytes:",
        "if size == one.size_bytes or self._epoch is not None:",
        (f"{UPLOADS}::test_an_object_that_arrived_cut_short_is_not_published",),
    ),
    Mutant(
        "upload-last-part-missing",
        "the last part of an upload is left out",
        "service/lifecycle/publication.py",
        "complete_upload(one.upload, one.parts)",
        "complete_upload(one.upload, one.parts[:-1])",
        (f"{UPLOADS}::test_a_file_goes_up_in_parts",),
    ),
    Mutant(
        "failed-upload-left-behind",
        "what a failed upload left in the storage stays there",
        "service/lifecycle/publication.py",
        "            upload.abandon()\n            if upload.handle is not None:  # it may be complete\n                _delete(storage, name)\n",
        "            pass\n",
        (f"{UPLOADS}::test_a_failed_upload_leaves_nothing_behind",),
    ),
    Mutant(
        "positions-ahead-of-quarantine",
        "the log says positions while entries wait in quarantine",
        "service/lifecycle/context.py",
        "h.lane == QUARANTINE or h.sequence",
        "h.sequence",
        (f"{LIFE}::test_the_logs_positions_never_run_ahead_of_entries_in_quarantine",),
    ),
    Mutant(
        "positions-ahead-of-main",
        "a quarantine file's record says positions while main files wait",
        "service/lifecycle/context.py",
        "own_positions(file) if file.lane != QUARANTINE else {}",
        "own_positions(file)",
        (f"{LIFE}::test_the_logs_positions_never_run_ahead_of_a_younger_main_file",),
    ),
    Mutant(
        "positions-ahead-of-older-files",
        "the log says positions while an older file waits",
        "service/lifecycle/context.py",
        "h.lane == QUARANTINE or h.sequence < file.sequence",
        "h.lane == QUARANTINE",
        ("tests/faults/test_damage.py::test_an_entry_that_rots_while_the_writer_runs_is_not_compacted",),
    ),
    Mutant(
        "uploads-sweep-forgotten",
        "a restart leaves what earlier uploads of its files left in the storage",
        "service/opening.py",
        "parts.lifecycle.sweep_attempts({file.file_id for file in recovered.compacted})",
        "pass",
        (f"{UPLOADS}::test_a_restart_sweeps_what_its_uploads_left",),
    ),
    Mutant(
        "record-a-day-late",
        "a record names what was uploaded a day before and swept meanwhile",
        "service/lifecycle/lifecycle.py",
        "if publication is not None and publication.is_overdue:",
        "if False:",
        (f"{LATE}::test_a_file_that_waited_for_the_log_is_sent_anew",),
    ),
    Mutant(
        "sent-anew-though-published",
        "what is sent anew after a day is not looked up in the log's records",
        "service/lifecycle/lifecycle.py",
        "        self._context.outcome_unknown.add(file_id)\n",
        "",
        (f"{LATE}::test_a_record_that_nobody_heard_of_is_not_repeated_after_a_day",),
    ),
    Mutant(
        "record-of-a-sleeper",
        "a writer that slept for a day between a look at its object and the record names what was swept",
        "service/lifecycle/publication.py",
        "record.archive) and self.is_overdue:",
        "record.archive) and False:",
        (f"{LATE}::test_a_writer_that_sleeps_before_its_record_sends_anew[data/]",),
    ),
    Mutant(
        "segment-a-day-late",
        "a record names an archived segment that was uploaded a day before and swept meanwhile",
        "service/lifecycle/segment_archive.py",
        " and not sent[1].is_overdue:",
        ":",
        (f"{LATE}::test_a_segment_that_waited_for_the_log_is_sent_anew",),
    ),
)
