"""Of Spark's data sources."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

READING, MESSAGES = "tests/spark/test_datasource_reading.py", "tests/spark/test_datasource_messages.py"

MUTANTS = (
    Mutant(
        "prunes-where-scans-mix", "pushed filters leave entries out that another scan of the frame needs",
        "spark/datasource_entries.py", '(mode == "auto" and self.scans_are_apart)', '(mode == "auto")',
        (f"{READING}::test_pushed_filters",),
    ),
    Mutant(
        "unknown-key-silent", "a filter on a key that nobody looks for finds nothing, without a word",
        "spark/datasource_filters.py", "        if self.keys is None and any(", "        if self.keys is None and not any(",
        (f"{READING}::test_filters_that_need_an_unknown_key_are_refused",),
    ),
    Mutant(
        "shares-overlap", "the run at a cut is read by two partitions",
        "spark/datasource_reading.py", "for run in runs[first:last] if", "for run in runs[first : last + 1] if",
        (f"{READING}::test_a_giant_slot_is_cut_and_read_by_time",),
    ),
    Mutant(
        "stream-believes-a-cut-log", "a log that was written anew below a checkpoint goes on as if nothing was",
        "spark/datasource_stream.py", 'now != offset["before"]:', "now is None:",
        (f"{MESSAGES}::test_a_log_that_its_broker_cut",),
    ),
    Mutant(
        "stream-stuck-at-a-blank", "a blank that is longer than a micro-batch stops a stream for ever",
        "spark/datasource_stream.py", "return segment.end if position == begin else position", "return position",
        (f"{MESSAGES}::test_a_stream_passes_blanks_and_damage_that_are_longer_than_a_bite",),
    ),
)  # fmt: skip
