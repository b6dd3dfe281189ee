"""Of audits on Spark, and of how jobs run."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

TESTS = "tests/spark/test_audit.py"
RUNNING = "tests/spark/test_running_jobs.py"

MUTANTS = (
    Mutant(
        "audit-topics-unseen",
        "entries that stand under another topic, where no look-up finds them, are no finding",
        "spark/audit/entries.py",
        "yield Part(INDEX, columns, topics, None, stored.name)",
        "yield Part(INDEX, columns, None, None, stored.name)",
        (f"{TESTS}::test_entries_under_another_topic_are_wrong",),
    ),
    Mutant(
        "audit-gone-is-missing",
        "what a merge and a sweep removed during an audit is told as missing from the index",
        "spark/audit/pairing.py",
        "if name in self.damaged | unread]",
        "if name in ()]",
        (f"{TESTS}::test_what_is_merged_and_swept_during_an_audit_is_not_missing",),
    ),
    Mutant(
        "audit-half-read-silent",
        "an object that is read in part is not told of, and what it held is missing",
        "spark/audit/entries.py",
        "            unread = True\n",
        "",
        (f"{TESTS}::test_what_damage_found_late_hides_is_not_missing",),
    ),
    Mutant(
        "audit-time-alone-hides",
        "one damaged shard of a day hides what is missing from the others, which are sound",
        "spark/audit/pairing.py",
        "hidden |= inside & np.logical_or.reduce([(slot >= low) & (slot < high) for slot in slots])",
        "hidden |= inside",
        (f"{TESTS}::test_a_damaged_shard_hides_nothing_of_another",),
    ),
    Mutant(
        "audit-first-interval-only",
        "of damaged objects only the first interval excuses what is not found",
        "spark/audit/pairing.py",
        "        return joined\n",
        "        return joined[:1]\n",
        (f"{TESTS}::test_what_damage_found_late_hides_is_not_missing",),
    ),
    Mutant(
        "audit-bounds-cut-pairs",
        "an entry whose second is wrong and lies beyond a bound is told as missing or extra",
        "spark/audit/differences.py",
        "bounded = seconds != ALL_TIME",
        "bounded = seconds == ALL_TIME",
        (f"{TESTS}::test_a_wrong_second_beyond_a_bound_is_wrong_and_told_once",),
    ),
    Mutant(
        "audit-sound-half-pairs",
        "what index and source both have outside of the bounds makes a missing entry a wrong one",
        "spark/audit/pairing.py",
        """np.flatnonzero(values.in_source != values.in_index)
        if len(alone):
            mine, none = values.in_source[alone],""",
        """np.flatnonzero(values.in_source | values.in_index)
        if len(alone):
            mine, none = ~values.in_index[alone],""",
        (f"{TESTS}::test_a_wrong_second_beyond_a_bound_is_wrong_and_told_once",),
    ),
    Mutant(
        "audit-misplaced-same-digest",
        "an entry under another topic, alike in all else, is no difference",
        "spark/audit/matching.py",
        'return int(mixed_columns([digests["topic"]], digests["entry"])',
        'return int(mixed_columns([], digests["entry"])',
        ("tests/spark/test_audit_matching.py::test_an_entry_under_another_topic_differs",),
    ),
    Mutant(
        "audit-range-at-the-end",
        "the last range of a partition is not compared",
        "spark/audit/ranges.py",
        "    if held is not None:\n        yield held\n",
        "",
        (f"{TESTS}::test_what_index_and_source_disagree_about_is_told_once_each",),
    ),
    Mutant(
        "audit-marks-of-one-range",
        "what differs is sought in the first range of digests only",
        "spark/audit/matching.py",
        "whole[number * size : (number + 1) * size]",
        "whole[:size]",
        ("tests/spark/test_audit_matching.py::test_what_is_cut_is_compared_whole_and_what_differs_is_marked",),
    ),
    Mutant(
        "audit-unlike-values-in-any-order",
        "of an entry that is there more than once any value is laid beside any other",
        "spark/audit/pairing.py",
        "order = ordered([*values, *identities])",
        "order = ordered([*values[:0], *identities])",
        ("tests/spark/test_audit_matching.py::test_what_differs_is_laid_side_by_side",),
    ),
    Mutant(
        "audit-one-entry-by-two-keys",
        "an entry that tasks read by two keys of one hash is listed twice",
        "spark/audit/pairing.py",
        "if name not in _NAMES], pc.Scalar",
        "if name != 'object'], pc.Scalar",
        ("tests/spark/test_audit_matching.py::test_one_entry_by_two_keys_or_of_two_objects_is_told_once",),
    ),
    Mutant(
        "audit-pairs-unordered",
        "of two entries of one key the later value may come first",
        "spark/audit/pairing.py",
        "swapped = np.where(before == after, swapped, after < before)",
        "swapped = after < before",
        ("tests/spark/test_audit_matching.py::test_rows_are_ordered_as_a_stable_sort_does",),
    ),
    Mutant(
        "spark-modules-collected",
        "a worker looks for garbage among its modules behind each task",
        "spark/executors.py",
        "        gc.freeze()\n",
        "        pass\n",
        (f"{RUNNING}::test_a_worker_sets_its_modules_apart_behind_its_first_task",),
    ),
    Mutant(
        "spark-batches-stay-large",
        "a session keeps the batches of a job that failed",
        "spark/executors.py",
        "        spark.conf.set(_ROWS, before)\n",
        "        pass\n",
        (f"{RUNNING}::test_batches_are_large_while_a_job_runs_and_as_before_behind_it",),
    ),
    Mutant(
        "spark-interrupt-unexpected",
        "Ctrl-C during a Spark job is told as an error of its connection to Java",
        "cli/spark/__init__.py",
        "            while isinstance(behind, Exception):\n                behind = behind.__context__\n",
        "",
        (f"{RUNNING}::test_what_fails_behind_an_interrupt_is_the_interrupt",),
    ),
    Mutant(
        "spark-log-by-way-of-java",
        "entries of a commit log go through Java between the task that reads and the one that packs them",
        "spark/build/sources.py",
        "if log is not None and not columns and set(",
        "if log is None and not columns and set(",
        (f"{RUNNING}::test_a_log_is_read_by_the_tasks_that_pack_it",),
    ),
    Mutant(
        "spark-jobs-undescribed",
        "Spark's pages don't say what a job of ours does",
        "spark/metrics.py",
        "for name, value in named.items():\n        context.setLocalProperty(name, value)",
        "for name, value in [*named.items()][:1]:\n        context.setLocalProperty(name, value)",
        (f"{RUNNING}::test_each_job_has_a_group_of_its_own_and_says_what_it_does",),
    ),
    Mutant(
        "told-alone-with-what-shares-a-mark",
        "an entry that both sides have is told as one that a side has alone where the marks of two are one",
        "spark/audit/entries.py",
        "inside[likely] = self.digests[at] == digests[likely]",
        "inside[likely] = True",
        (f"{TESTS}::test_what_one_side_has_alone_is_told_as_a_comparison_tells_it[missing]",),
    ),
    Mutant(
        "told-alone-in-the-last-object",
        "an entry that several objects hold is told with the last of them by those that read one side",
        "spark/audit/pairing.py",
        '"said", "held", "object")]',
        '"said", "held")]',
        ("tests/spark/test_audit_matching.py::test_one_entry_by_two_keys_or_of_two_objects_is_told_once",),
    ),
)
