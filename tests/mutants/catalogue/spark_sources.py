"""Of Spark's data sources."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

WRITING = "tests/spark/test_partition_tables.py"
CONTENT = "tests/spark/test_batch_content.py"
READING, MESSAGES = "tests/spark/test_datasource_reading.py", "tests/spark/test_datasource_messages.py"

MUTANTS = (
    Mutant(
        "prunes-where-scans-mix",
        "pushed filters leave entries out that another scan of the frame needs",
        "spark/datasource/entries.py",
        """
            address, selection, size, schema, prunes=mode == "on" or (mode == "auto" and self.scans_are_apart)
        """,
        'address, selection, size, schema, prunes=mode == "on" or (mode == "auto")',
        (f"{READING}::test_pushed_filters",),
    ),
    Mutant(
        "unknown-key-silent",
        "a filter on a key that nobody looks for finds nothing, without a word",
        "spark/datasource/reading.py",
        "        if self.keys is None and needing:",
        "        if self.keys is None and not needing:",
        (f"{READING}::test_filters_that_need_an_unknown_key_are_refused",),
    ),
    Mutant(
        "shares-overlap",
        "the run at a cut is read by two partitions",
        "spark/datasource/reading.py",
        "for run in runs[first:last]",
        "for run in runs[first : last + 1]",
        (f"{READING}::test_a_giant_slot_is_cut_and_read_by_time",),
    ),
    Mutant(
        "stream-believes-a-cut-log",
        "a log that was written anew below a checkpoint goes on as if nothing was",
        "spark/datasource/messages.py",
        'now != offset["before"]:',
        "now is None:",
        (f"{MESSAGES}::test_a_log_that_its_broker_cut",),
    ),
    Mutant(
        "stream-stuck-at-a-blank",
        "a blank that is longer than a micro-batch stops a stream for ever",
        "spark/datasource/messages.py",
        "return segment.end if position == begin else position",
        "return position",
        (f"{MESSAGES}::test_a_stream_passes_blanks_and_damage_that_are_longer_than_a_bite",),
    ),
    Mutant(
        "abort-after-a-commit",
        "objects of a record whose answer was lost are deleted",
        "spark/datasource/writing.py",
        "    if len(written) == len(messages):\n",
        "    if not written:\n",
        (f"{WRITING}::test_abort_takes_back_what_is_certainly_not_published",),
    ),
    Mutant(
        "batch-not-said",
        "a micro-batch that comes again is published again",
        "spark/build/build.py",
        "{} if batch is None else {batch.stream: batch.number}",
        "{}",
        (f"{WRITING}::test_a_batch_is_in_the_log_once_and_what_came_again_is_taken_back",),
    ),
    Mutant(
        "batch-before-the-log",
        "two drivers of one query publish one batch",
        "spark/build/build.py",
        "        if batch is not None and batch.is_in(state):\n",
        "        if batch is None:\n",
        (f"{WRITING}::test_two_drivers_publish_one_batch_at_once",),
    ),
    Mutant(
        "range-of-any-number",
        "a position that is no integer gets into a record, and nobody can open the index again",
        "spark/build/positions.py",
        "check_integer(position, getattr(self, position))",
        "getattr(self, position)",
        (
            "tests/spark/test_source_ranges.py::test_ranges_that_are_none",
            "tests/spark/test_source_ranges.py::test_positions_of_numpy_are_integers_of_the_record",
        ),
    ),
    Mutant(
        "older-batch-dropped",
        "a checkpoint that is older than the index loses messages without a word",
        "spark/build/positions.py",
        "        if last > self.number:\n",
        "        if last < -1:\n",
        (f"{WRITING}::test_a_batch_is_in_the_log_once_and_what_came_again_is_taken_back",),
    ),
    Mutant(
        "planned-anew-dropped",
        "a checkpoint one batch older than the index loses messages without a word",
        "spark/build/positions.py",
        "told.number == last and told != self.told:",
        "told.number != last and told != self.told:",
        (f"{CONTENT}::test_other_rows_under_the_last_number_are_refused_and_taken_back",),
    ),
    Mutant(
        "content-by-cut",
        "a micro-batch that comes again in other tasks passes for another one",
        "spark/build/positions.py",
        ' if name != "topic_id"]',
        " if name]",
        (f"{CONTENT}::test_the_same_rows_are_a_repeat_however_they_are_cut",),
    ),
    Mutant(
        "batch-not-in-checkpoints",
        "what a micro-batch held is forgotten with its record",
        "service/log/state.py",
        "optional_members(self.archive.values(), self.batches, ",
        "optional_members(self.archive.values(), {}, ",
        ("tests/unit/service/test_stream_batches.py::test_batches_come_back_as_they_were",),
    ),
)
