"""Of audits on Spark."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

TESTS = "tests/spark/test_audit.py"

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
        "spark/audit/differences.py",
        "if o.name in bad | unread]",
        "if o.name in bad]",
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
        "spark/audit/differences.py",
        """
        (F.col("kind") == "missing")
        & F.col("said.second").between(F.col("first"), F.col("last"))
        & reduce(operator.or_, [(where >= F.col("slot_low")) & (where < F.col("slot_high")) for where in places])
    """,
        'F.col("kind") == "missing") & F.col("said.second").between(F.col("first"), F.col("last")) & (places[0] >= 0',
        (f"{TESTS}::test_a_damaged_shard_hides_nothing_of_another",),
    ),
    Mutant(
        "audit-first-interval-only",
        "of damaged objects only the first interval excuses what is not found",
        "spark/audit/differences.py",
        '_joined(damaged), "first long, last long, slot_low long, slot_high long"',
        """
            _joined(damaged)[:1], "first long, last long, slot_low long, slot_high long"
        """,
        (f"{TESTS}::test_what_damage_found_late_hides_is_not_missing",),
    ),
    Mutant(
        "audit-bounds-cut-pairs",
        "an entry whose second is wrong and lies beyond a bound is told as missing or extra",
        "spark/audit/differences.py",
        "if seconds != ALL_TIME and",
        "if seconds == ALL_TIME and",
        (f"{TESTS}::test_a_wrong_second_beyond_a_bound_is_wrong_and_told_once",),
    ),
    Mutant(
        "audit-sound-half-pairs",
        "what index and source both have outside of the bounds makes a missing entry a wrong one",
        "spark/audit/differences.py",
        'isNull() & ((F.col("source") == 0) != (F.col("index") == 0)))',
        "isNull())",
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
        "the last range of digests of a partition is not compared",
        "spark/audit/matching.py",
        "    end()\n    differing =",
        "    differing =",
        ("tests/spark/test_audit_matching.py::test_what_is_cut_is_compared_whole_and_too_much_is_not_told",),
    ),
)
