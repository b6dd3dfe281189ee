"""Defects of answers: ranges, order, identity, pages, and the word about their completeness."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

PAGING = "tests/unit/service/test_paging_and_cursors.py"
INTERVAL = "tests/unit/service/test_buffer_flush_catalog.py::test_a_files_interval_grows_with_what_it_takes"
MANY_ITEMS = "tests/unit/service/test_rows_of_items.py::test_both_ends_of_the_range_are_in_it"
DAMAGE = "tests/faults/test_damage.py"
MANY = "tests/property/test_query_many.py"
FIRST = f"{PAGING}::test_the_first_answers_are_a_sort_and_a_set"

MUTANTS = (
    Mutant(
        "range-end-exclusive",
        "an entry of the range's last second is left out",
        "service/answers/rows.py",
        '(rows["second"] <= lookup.second_max)',
        '(rows["second"] < lookup.second_max)',
        (MANY_ITEMS,),
    ),
    Mutant(
        "range-begin-exclusive",
        "an entry of the range's first second is left out",
        "service/answers/rows.py",
        '(rows["second"] >= lookup.second_min)',
        '(rows["second"] > lookup.second_min)',
        (MANY_ITEMS,),
    ),
    Mutant(
        "range-of-few-exclusive",
        "the short way past a few items leaves out the range's first second",
        "service/answers/rows.py",
        "lookup.second_min <= second <=",
        "lookup.second_min < second <=",
        (INTERVAL,),
    ),
    Mutant(
        "range-end-floored-away",
        "a range's end is rounded down to the second before",
        "service/answers/rows.py",
        "min(high, 2**63 - 1) // 1000, count",
        "(min(high, 2**63 - 1) - 999) // 1000, count",
        (INTERVAL,),
    ),
    Mutant(
        "batch-range-exclusive",
        "batched lookups leave out the range's last second",
        "service/answers/batch.py",
        "(seconds <= self.second_max[lookups])",
        "(seconds < self.second_max[lookups])",
        (f"{MANY}::test_equals_single_queries_in_every_state[native]",),
    ),
    Mutant(
        "reader-file-end-exclusive",
        "a reader passes over a file whose last second is the range's first one",
        "service/reading/views.py",
        "handle.second_max >= second_min",
        "handle.second_max > second_min",
        (INTERVAL,),
    ),
    Mutant(
        "order-by-second",
        "answers come oldest first",
        "service/answers/rows.py",
        '~rows["offset"], -rows["second"]]',
        '~rows["offset"], rows["second"]]',
        (f"{PAGING}::test_a_file_is_skipped_only_below_the_last_answers_second",),
    ),
    Mutant(
        "order-by-offset",
        "within a second answers come by rising offset",
        "service/answers/rows.py",
        '~rows["offset"], -rows["second"]]',
        'rows["offset"], -rows["second"]]',
        (f"{PAGING}::test_a_file_is_skipped_only_below_the_last_answers_second",),
    ),
    Mutant(
        "order-by-queue",
        "within an offset answers come by falling queue",
        "service/answers/rows.py",
        'keys += [rows["queue_id"], ~',
        'keys += [-rows["queue_id"].astype(np.int64), ~',
        (FIRST,),
    ),
    Mutant(
        "identity-without-queue",
        "messages of one offset in two queues are one answer",
        "service/answers/rows.py",
        'identity = ("queue_id", "offset", *',
        'identity = ("offset", *',
        (FIRST,),
    ),
    Mutant(
        "identity-kept-twice",
        "an entry that was put twice is two answers",
        "service/answers/rows.py",
        "    kept = np.sort(first)\n",
        "    kept = np.arange(len(rows) + 0 * len(first))\n",
        (FIRST,),
    ),
    Mutant(
        "identity-without-topic",
        "entries of another topic whose key has the same hash are answers, too",
        "service/answers/rows.py",
        'places = places[_is_one_of(items["topic_id"][places], topic_ids)]',
        "pass",
        ("tests/unit/service/test_colliding_topics.py::test_each_topic_has_its_own_answers",),
    ),
    Mutant(
        "identity-without-topic-buffered",
        "in the buffer, entries of another topic whose key has the same hash are answers, too",
        "service/answers/rows.py",
        'places = places[_is_one_of(columns["topic_id"][places], topic_ids)]',
        "pass",
        ("tests/unit/service/test_colliding_topics.py::test_each_topic_has_its_own_answers",),
    ),
    Mutant(
        "one-answer-too-many",
        "an answer holds one more than max_count (RocketMQ 10471)",
        "service/lookup/budget.py",
        "return self._rows[: self._max_count],",
        "return self._rows[: self._max_count + 1],",
        (f"{PAGING}::test_a_file_is_skipped_only_below_the_last_answers_second",),
    ),
    Mutant(
        "one-batched-answer-too-many",
        "a batched answer holds one more than max_count",
        "service/answers/batch.py",
        "kept = rank < limits[lookups]",
        "kept = rank <= limits[lookups]",
        (f"{MANY}::test_equals_single_queries_in_every_state[native]",),
    ),
    Mutant(
        "file-skipped-one-second-early",
        "a file is skipped though it ends in the second of the last answer",
        "service/lookup/budget.py",
        "second_max >= self._cutoff",
        "second_max > self._cutoff",
        (f"{PAGING}::test_a_file_is_skipped_only_below_the_last_answers_second",),
    ),
    Mutant(
        "skipped-file-called-complete",
        "an answer that left files out is called complete",
        "service/lookup/budget.py",
        "self.skipped or len(self._rows) > self._max_count",
        "len(self._rows) > self._max_count",
        (f"{PAGING}::test_an_answer_that_left_files_out_is_not_called_complete",),
    ),
    Mutant(
        "failed-file-called-complete",
        "an answer is called complete though a file could not be read",
        "service/lookup/query.py",
        'status="partial" if failed else "truncated" if more',
        'status="truncated" if more',
        (f"{DAMAGE}::test_a_damaged_unsealed_file_fails_the_lookups_that_meet_it_and_is_kept",),
    ),
    Mutant(
        "failed-batch-called-complete",
        "a batched answer is called complete though a file could not be read",
        "service/answers/results.py",
        '"partial" if failed else "truncated" if more',
        '"truncated" if more',
        (f"{MANY}::test_a_lost_object_fails_the_batch_or_is_named",),
    ),
    Mutant(
        "failure-is-a-short-list",
        "a file that can't be read makes the answer short instead of an error",
        "service/lookup/query.py",
        "if scan.errors and scan.failed:\n            raise _error(scan)",
        "if scan.errors and scan.failed and not scan.reports:\n            raise _error(scan)",
        (f"{DAMAGE}::test_a_damaged_unsealed_file_fails_the_lookups_that_meet_it_and_is_kept",),
    ),
    Mutant(
        "lost-object-is-a-short-list",
        "an object that is gone though the log names it is passed over",
        "service/lookup/missing.py",
        "if lost and not self.allow_partial:",
        "if lost and not self._read_log:",
        (f"{DAMAGE}::test_a_lost_object_is_a_failure_never_a_short_list",),
    ),
    Mutant(
        "removed-object-not-looked-up-again",
        "a lookup fails where an object was removed by a later record",
        "service/lookup/missing.py",
        "if error.name in state.objects]",
        "if state.objects or state.number]",
        (f"{DAMAGE}::test_an_object_that_a_later_record_removed_makes_a_reader_look_again[False]",),
    ),
    Mutant(
        "damaged-copy-not-passed-over",
        "a damaged local copy fails the lookup though the storage has the file",
        "service/files/compacted.py",
        "_file(self.local, lookup)\n            except (CorruptFile, StorageUnavailable):\n                if "
        "self.stored is None:",
        "_file(self.local, lookup)\n            except (CorruptFile, StorageUnavailable):\n                if "
        "self.local is not None:",
        (f"{DAMAGE}::test_a_damaged_local_copy_is_answered_from_the_storage",),
    ),
    Mutant(
        "cursor-repeats-its-last",
        "a page begins with the last answer of the page before",
        "service/answers/rows.py",
        "else values > bound)",
        "else values >= bound)",
        (f"{PAGING}::test_a_cursor_goes_on_whatever_became_of_the_files",),
    ),
    Mutant(
        "cursor-skips-ties",
        "a page leaves out answers of the second that the page before ended in",
        "service/answers/rows.py",
        "later |= equal & (values < bound",
        'later |= equal & (name == "second") & (values < bound',
        (f"{PAGING}::test_a_cursor_goes_on_whatever_became_of_the_files",),
    ),
    Mutant(
        "strangers-answer",
        "a file of another schema takes part in answers",
        "service/lifecycle/recovery.py",
        "    _set_strangers_aside(layout, found)\n",
        "",
        ("tests/regressions/test_files_of_another_schema.py::test_it_is_named_kept_and_never_published",),
    ),
)
