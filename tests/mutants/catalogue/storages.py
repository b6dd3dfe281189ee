"""Defects of the backends: put-if-absent, listings over pages, halves that are seen, errors taken for something else."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

CONFORMANCE = "tests/storage/test_conformance.py"
ROWS = "tests/storage/test_sqlite_rows.py"
S3 = "tests/storage/test_s3_answers.py"
DEADLINE = "tests/storage/test_s3_deadline.py"
BUDGETS = "tests/unit/storage/test_budgets.py"

MUTANTS = (
    Mutant(
        "local-put-if-absent-renames",
        "an object that appears meanwhile is overwritten by a put-if-absent",
        "storage/local/files.py",
        "self.disk.link(temporary, target)",
        "self.disk.rename(temporary, target)",
        ("tests/storage/test_local_crashes.py::test_an_object_that_appears_during_a_put_if_absent_is_kept",),
    ),
    Mutant(
        "local-part-unverified",
        "an upload is completed of parts that are not the ones named",
        "storage/local/storage.py",
        "if digest.hexdigest() != part.etag:",
        "if not part.etag:",
        (f"{CONFORMANCE}::TestLocalStorage::test_completing_what_can_not_be_completed",),
    ),
    Mutant(
        "local-full-disk-is-passing",
        "a full disk is reported as a passing fault",
        "storage/local/files.py",
        "if error.errno in _FULL:",
        "if error.errno is None:",
        ("tests/storage/test_local_crashes.py::test_a_full_disk_refuses_whole_and_the_next_put_works",),
    ),
    Mutant(
        "memory-put-if-absent-overwrites",
        "put-if-absent overwrites",
        "storage/memory.py",
        "if self._shelf.objects.setdefault(name, value) is not value:",
        "self._shelf.objects[name] = value\n            if not value:",
        (f"{CONFORMANCE}::TestMemoryStorage::test_put_if_absent_keeps_what_is_there",),
    ),
    Mutant(
        "memory-list-one-page",
        "a listing ends with its first page",
        "storage/memory.py",
        "if len(page) < PAGE:",
        "if page or not page:",
        (f"{CONFORMANCE}::TestMemoryStorage::test_list_goes_on_over_many_pages",),
    ),
    Mutant(
        "sqlite-named-before-its-body",
        "an object is visible before its last rows",
        "storage/sqlite/bodies.py",
        "                draft = self._write_batch(doing, draft, data, batch)\n",
        "                draft = self._write_batch(doing, draft, data, batch)\n"
        "                self._pool.write(doing, lambda connection, body=draft: name_it(connection, body))\n",
        (f"{ROWS}::test_a_big_object_is_invisible_until_its_last_transaction",),
    ),
    Mutant(
        "sqlite-put-if-absent-replaces",
        "put-if-absent replaces an object that came meanwhile",
        "storage/sqlite/storage.py",
        "INSERT OR IGNORE INTO objects",
        "INSERT OR REPLACE INTO objects",
        (f"{ROWS}::test_what_a_losing_put_wrote_is_removed",),
    ),
    Mutant(
        "sqlite-sweeps-young-drafts",
        "a sweep takes drafts that are not old enough",
        "storage/sqlite/bodies.py",
        "WHERE touched_ms < ?",
        "WHERE touched_ms <= ?",
        (f"{ROWS}::test_a_sweep_takes_old_drafts_and_leaves_young_ones_and_objects",),
    ),
    Mutant(
        "sqlite-swept-draft-named",
        "an object is named though a sweep took half of its rows",
        "storage/sqlite/bodies.py",
        "if touched.rowcount != 1:",
        "if touched.rowcount > 1:",
        (f"{ROWS}::test_a_writer_whose_draft_was_swept_publishes_nothing",),
    ),
    Mutant(
        "sqlite-list-one-page",
        "a listing ends with its first page",
        "storage/sqlite/storage.py",
        "if len(infos) < PAGE:",
        "if len(infos) <= PAGE:",
        ("tests/storage/test_sqlite_locks.py::test_a_listing_keeps_nobody_from_writing",),
    ),
    Mutant(
        "s3-put-if-absent-unconditional",
        "put-if-absent sends no condition",
        "storage/s3/storage.py",
        'self._put(name, data, IfNoneMatch="*")',
        "self._put(name, data)",
        (f"{S3}::test_put_if_absent_sends_the_condition_and_reads_412",),
    ),
    Mutant(
        "s3-412-taken-for-a-fault",
        "the answer that an object exists is taken for a fault",
        "storage/s3/failures.py",
        'if code == "PreconditionFailed" or status == 412:',
        'if code == "Exists":',
        (f"{S3}::test_put_if_absent_sends_the_condition_and_reads_412",),
    ),
    Mutant(
        "s3-409-taken-for-a-loss",
        "a conflict of two requests is taken for an object that exists",
        "storage/s3/failures.py",
        "return PassingFault(text)",
        "return ObjectExists(name, uri)",
        (f"{S3}::test_a_conditional_conflict_is_repeated_within_a_bound",),
    ),
    Mutant(
        "s3-full-taken-for-a-set-up",
        "a storage that is full is taken for one that is set up wrongly",
        "storage/s3/failures.py",
        "if code in _FULL_CODES or status == _INSUFFICIENT_STORAGE:",
        "if False:",
        (f"{S3}::test_errors_say_what_to_do_next",),
    ),
    Mutant(
        "s3-one-attempt-too-many",
        "a passing fault is repeated once more than the bound says",
        "storage/s3/retry.py",
        "if count >= (self.max_attempts if is_request else self.transfer_attempts):",
        "if count > (self.max_attempts if is_request else self.transfer_attempts):",
        (f"{S3}::test_a_conditional_conflict_is_repeated_within_a_bound",),
    ),
    Mutant(
        "s3-list-one-page",
        "a listing ends with its first page",
        "storage/s3/storage.py",
        """if not answer.get("IsTruncated"):
                return
            parameters["ContinuationToken"]""",
        """if answer:
                return
            parameters["ContinuationToken"]""",
        (f"{S3}::test_list_pages_skips_foreign_keys_and_is_lazy",),
    ),
    Mutant(
        "s3-uploads-one-page",
        "a listing of uploads ends with its first page",
        "storage/s3/storage.py",
        """if not answer.get("IsTruncated"):
                return
            parameters["KeyMarker"]""",
        """if answer:
                return
            parameters["KeyMarker"]""",
        (f"{S3}::test_uploads_are_listed_over_pages_by_age",),
    ),
    Mutant(
        "s3-failed-deletes-swallowed",
        "objects that could not be deleted count as deleted",
        "storage/s3/storage.py",
        'if failures := answer.get("Errors", []):',
        "if failures := answer.get('', []):",
        (f"{S3}::test_delete_many_goes_in_batches_and_raises_every_failure",),
    ),
    Mutant(
        "s3-range-unchecked",
        "another range than the one that was asked for is returned",
        "storage/s3/reads.py",
        "if (first, size) != (start, length):",
        "if first is None:",
        (f"{S3}::test_a_range_that_is_not_what_was_asked_is_never_returned",),
    ),
    Mutant(
        "s3-suffix-unchecked",
        "other bytes than the object's last ones are returned as its end",
        "storage/s3/reads.py",
        " or first + size != total",
        "",
        (f"{S3}::test_suffix_answers_are_verified",),
    ),
    Mutant(
        "s3-repeats-past-the-deadline",
        "a wait before a repeat passes the caller's deadline",
        "storage/s3/retry.py",
        "if left_s is not None and wait_s >= left_s:",
        "if wait_s < 0:",
        (
            f"{DEADLINE}::test_repeats_end_before_a_wait_that_would_pass_the_deadline",
            "tests/unit/storage/test_deadline.py::test_a_wait_that_would_pass_the_deadline_is_not_begun",
        ),
    ),
    Mutant(
        "s3-attempts-past-the-deadline",
        "a repeat is sent after the caller's deadline",
        "storage/s3/retry.py",
        "            check_deadline(what)\n",
        "",
        (f"{DEADLINE}::test_an_attempt_that_a_wait_left_no_time_for_is_not_sent",),
    ),
    Mutant(
        "s3-redirects-past-the-deadline",
        "botocore follows a redirect after the caller's deadline",
        "storage/s3/retry.py",
        """check_deadline(f"sending {event_name.rpartition('.')[2]}")""",
        "event_name.strip()",
        (f"{DEADLINE}::test_a_redirect_is_not_followed_past_the_deadline",),
    ),
    Mutant(
        "s3-pool-of-any-size",
        "parallel reads share too few connections, and each opens one more",
        "storage/s3/options.py",
        "max(FEWEST_CONNECTIONS, parallel_reads + _SPARE_CONNECTIONS)",
        "1",
        ("tests/storage/test_s3_faulty_reads.py::test_parallel_reads_keep_their_connections_in_a_pool_of_their_size",),
    ),
    Mutant(
        "deadline-of-the-outer-scope-lost",
        "a nested deadline that is further away replaces the nearer one",
        "storage/context.py",
        "self.deadline_s <= deadline_s",
        "self.deadline_s >= deadline_s",
        ("tests/unit/storage/test_deadline.py::test_of_nested_deadlines_the_nearest_holds",),
    ),
    Mutant(
        "budget-one-request-too-many",
        "a lookup makes one request more than its budget allows",
        "storage/metering.py",
        "if requests > self.max_requests:",
        "if requests > self.max_requests + 1:",
        (f"{BUDGETS}::test_what_would_pass_max_requests_is_neither_sent_nor_counted",),
    ),
    Mutant(
        "budget-bytes-under-way-forgotten",
        "ranges under way at the same time pass the limit of bytes together",
        "storage/metering.py",
        "known = self.bytes_read + self._bytes_held",
        "known = self.bytes_read",
        (f"{BUDGETS}::test_bytes_of_calls_under_way_are_held",),
    ),
    Mutant(
        "budget-refusal-counted",
        "a call that one limit refused counts towards another",
        "storage/metering.py",
        "usage._take_back(call)",
        "usage.end(call)",
        (f"{BUDGETS}::test_of_several_limits_the_narrowest_holds_and_a_refusal_counts_nowhere",),
    ),
    Mutant(
        "budget-failed-bytes-kept",
        "bytes that a failed call did not deliver stay taken from the budget",
        "storage/metering.py",
        "            for usage in usages:\n                usage.end(call)\n            raise",
        "            raise",
        (f"{BUDGETS}::test_a_failed_call_gives_its_bytes_back_but_not_its_request",),
    ),
    Mutant(
        "budget-not-atomic",
        "threads that ask at the same moment are all admitted",
        "storage/metering.py",
        "self._lock = threading.RLock()",
        "self._lock = contextlib.nullcontext()",
        (f"{BUDGETS}::test_many_threads_never_get_more_than_the_limit",),
    ),
    Mutant(
        "s3-attempts-of-a-foreign-client-multiplied",
        "requests that a caller's own client has repeated are repeated again, as often each time",
        "storage/s3/storage.py",
        "self.options.max_attempts if client is None else 1",
        "self.options.max_attempts",
        (f"{S3}::test_a_callers_client_repeats_requests_as_it_was_built_to",),
    ),
    Mutant(
        "lean-get-of-a-foreign-client",
        "handlers of a caller's own client are passed over",
        "storage/s3/storage.py",
        "is_lean = (client is None and self.options.lean_gets)",
        "is_lean = self.options.lean_gets",
        ("tests/storage/test_s3_gets.py::test_a_client_of_the_callers_own_goes_the_ordinary_way",),
    ),
    Mutant(
        "lean-get-unseen",
        "lean requests ask no handlers before they are sent, so nobody counts or bounds them",
        "storage/s3/reads.py",
        "response = first_non_none_response(self._events.emit(_BEFORE_SEND, request=prepared))",
        "response = None",
        ("tests/storage/test_s3_gets.py::test_a_passing_fault_is_repeated_by_the_clients_method_after_a_wait",),
    ),
    Mutant(
        "lean-get-in-the-old-region",
        "a bucket in another region costs further requests at every range",
        "storage/s3/reads.py",
        'signing.get("region") or about["region_name"]',
        'about["region_name"]',
        ("tests/storage/test_s3_gets.py::test_another_region_is_found_once",),
    ),
)
