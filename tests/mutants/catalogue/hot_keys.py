"""Defects of batches that meet hot keys: what is read too often, held too long or left out too early."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MANY = "tests/property/test_query_many.py"
CUT = f"{MANY}::test_cut_slots_equal_single_queries_and_are_read_once"
SLOT = "tests/unit/service/test_giant_slots_of_batches.py"
HOT = "tests/unit/service/cold/test_hot_keys_in_batches.py"

MUTANTS = (
    Mutant(
        "batch-twice",
        "an entry that lies in two files is two answers of a batch",
        "service/answers/rows.py",
        "(offsets[1:] < offsets[:-1])",
        "(offsets[1:] <= offsets[:-1])",
        ("tests/property/test_query_many.py::test_rows_come_in_answer_order_and_once_however_they_are_found",),
    ),
    Mutant(
        "batch-unordered",
        "rows of a batch whose offsets fall stay as they are found, whatever their times",
        "service/answers/rows.py",
        " & (seconds[1:] <= seconds[:-1])",
        "",
        ("tests/property/test_query_many.py::test_rows_come_in_answer_order_and_once_however_they_are_found",),
    ),
    Mutant(
        "batch-done-with-a-hole",
        "a lookup of a batch is done though a block before its answers isn't read",
        "service/files/search.py",
        "behind |= needing & unread",
        "behind |= needing & behind",
        (f"{SLOT}::test_what_was_read_behind_a_hole_does_not_make_a_page[True]",),
    ),
    Mutant(
        "batch-done-within-a-second",
        "a lookup of a batch is done though unread blocks have entries of the same second",
        "service/files/search.py",
        "(first | (last > newest))",
        "(first | (last >= newest))",
        (f"{SLOT}::test_unread_entries_of_the_last_second_count_where_there_is_no_order[False]",),
    ),
    Mutant(
        "batch-reads-over-what-it-read",
        "a gap is read together with what lies in it and was read before",
        "service/files/search.py",
        "if bisect_left(done, after.offset) > bisect_left(done, end):",
        "if after.offset < end:",
        (f"{CUT}[rocketmq-700]",),
    ),
    Mutant(
        "batch-throws-away-what-it-needs",
        "what lies in a gap that is read is read once more when it is needed",
        "service/files/search.py",
        "segment += waiting[bisect_left(offsets, end) :",
        "segment += waiting[len(waiting) :",
        (f"{CUT}[rocketmq-700]",),
    ),
    Mutant(
        "batch-reads-all-blocks",
        "a batch reads all blocks of a giant slot, whatever its pages need",
        "service/files/search.py",
        "[self._open], _ALL) + 1) << self._round",
        "[self._open], _ALL) + 1) << 20",
        (f"{HOT}::test_a_page_costs_a_page[packed]",),
    ),
    Mutant(
        "batch-holds-all-rows",
        "a batch holds every row that it finds until the end",
        "service/answers/batch.py",
        "if self._count > self._most:",
        "if self._count < 0:",
        (f"{HOT}::test_rows_are_cut_as_they_come",),
    ),
    Mutant(
        "batch-cut-to-the-page",
        "a batch forgets that there is more than its page",
        "service/answers/batch.py",
        "first_rows(self.batch.max_count + 1,",
        "first_rows(self.batch.max_count,",
        (f"{CUT}[plain-0]",),
    ),
    Mutant(
        "hot-pairs-done-within-a-second",
        "a hot key's lookup is done though more entries of the same second follow",
        "service/answers/batch.py",
        "page_ends(open_, gathered.first()) <= newest",
        "page_ends(open_, gathered.first()) < newest",
        (f"{MANY}::test_hot_keys_in_the_write_buffer[native]",),
    ),
)
