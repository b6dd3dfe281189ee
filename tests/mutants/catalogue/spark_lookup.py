"""Defects of bulk lookups on Spark: questions, plans, searches, answers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

HERE = "tests/spark/test_lookup_answers.py"

MUTANTS = (
    Mutant(
        "lookup-slot-border",
        "a shard's last base slot is asked for nothing",
        "spark/lookup/plan.py",
        "(of < self.base_high)",
        "(of < self.base_high - 1)",
        (f"{HERE}::test_answers_equal_a_readers[native-3]",),
    ),
    Mutant(
        "lookup-file-of-one-second",
        "a file that begins at a question's last second is passed over",
        "spark/lookup/plan.py",
        '(lookups["second_max"] >= stored.second_min)',
        '(lookups["second_max"] > stored.second_min)',
        (f"{HERE}::test_answers_equal_a_readers[native-10000]",),
    ),
    Mutant(
        "lookup-cut-too-early",
        "an answer of as many as asked and more is told as complete",
        "spark/lookup/search.py",
        "np.full(len(places), self._plan.max_count + 1)",
        "np.full(len(places), self._plan.max_count)",
        (f"{HERE}::test_answers_equal_a_readers[native-3]",),
    ),
    Mutant(
        "lookup-forgets-a-failure",
        "a file that can't be read is passed over in silence",
        "spark/lookup/answers.py",
        '        status[list(self._failed)] = STATUSES.index("partial")\n',
        "",
        (f"{HERE}::test_a_file_that_cannot_be_read_fails_or_is_named[native-denied]",),
    ),
    Mutant(
        "lookup-goes-on-without-an-object",
        "an object that a merge removed is taken for one that holds nothing",
        "spark/lookup/search.py",
        "                report.missing = error.name\n                return\n",
        "                continue\n",
        (f"{HERE}::test_an_object_that_a_merge_removed_ends_the_plan[native]",),
    ),
    Mutant(
        "lookup-short-when-run-again",
        "tasks that run again for blocks that Spark lost leave out an object that was removed since",
        "spark/lookup/search.py",
        "yield from _blocks(MISSING, names, None, plan, error.name.encode())",
        "pass",
        (f"{HERE}::test_blocks_that_are_made_again_are_never_short[native-False]",),
    ),
    Mutant(
        "lookup-partitions-in-one",
        "the partitions that a task sees to run into one another",
        "spark/lookup/answers.py",
        "            if here != number:\n",
        "            if number < 0:\n",
        (f"{HERE}::test_answers_of_small_pieces[native]",),
    ),
    Mutant(
        "lookup-last-partition-unanswered",
        "a task forgets the last partition that it sees to",
        "spark/lookup/answers.py",
        "            partition.add(kind, blocks)\n    yield from partition.answers(nested=nested)\n",
        "            partition.add(kind, blocks)\n",
        (f"{HERE}::test_answers_equal_a_readers[native-3]",),
    ),
    Mutant(
        "lookup-answers-of-another-object",
        "what an object held for some questions is told as of others",
        "spark/lookup/search.py",
        "yield Matches(batch.places[found.lookups], found.rows)",
        "yield found",
        (f"{HERE}::test_answers_equal_a_readers[native-3]",),
    ),
    Mutant(
        "lookup-lost-one-by-one",
        "each plan learns of one lost object a task, until there are too many plans",
        "spark/lookup/lookup.py",
        " | _not_listed(opened, state)",
        "",
        ("tests/spark/test_lookup.py::test_many_objects_that_are_lost_are_one_partial_answer",),
    ),
    Mutant(
        "lookup-ranges-in-one-partition",
        "all ranges of a key are answered at once, however many they are",
        "spark/lookup/plan.py",
        '("topic", "second_min", "second_max")',
        '("topic",)',
        (f"{HERE}::test_ranges_of_one_key_are_of_many_partitions",),
    ),
    Mutant(
        "lookup-filter-at-any-price",
        "a filter of megabytes is read for one key",
        "spark/lookup/search.py",
        "(stored.filter_length + request) * _FILTER_SHARE <= wanted",
        "wanted >= 0",
        (f"{HERE}::test_a_filter_is_read_where_it_spares_more",),
    ),
    Mutant(
        "lookup-held-partition-too-short",
        "the last lookup of a partition of those that the driver holds is of none",
        "spark/lookup/plan.py",
        "return slice(low, high)",
        "return slice(low, high - 1)",
        (f"{HERE}::test_lookups_that_the_driver_holds[native]",),
    ),
    Mutant(
        "lookup-held-topic-of-a-lot",
        "topics of the keys of one task are taken for those of all",
        "spark/lookup/packing.py",
        'np.array([places[topic] for topic in row["topics"]], np.uint32)[part',
        "np.arange(len(topics), dtype=np.uint32)[part",
        (f"{HERE}::test_keys_are_counted_and_packed_in_lots",),
    ),
    Mutant(
        "lookup-held-before-expiry",
        "lookups that the driver holds find what has expired",
        "spark/lookup/packing.py",
        "if self.lookups is None or not kept_from:",
        "if True:",
        (f"{HERE}::test_keys_are_counted_and_packed_in_lots",),
    ),
)
