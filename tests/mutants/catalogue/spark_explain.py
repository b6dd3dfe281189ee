"""Of what reads of Spark's data sources tell, and of what `register` warns of."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

READING, MESSAGES = "tests/spark/test_datasource_reading.py", "tests/spark/test_datasource_messages.py"
WRITING = "tests/spark/test_datasource_write.py"

MUTANTS = (
    Mutant(
        "explain-counts-nothing",
        "lines of a read tell no requests",
        "spark/datasource/options.py",
        "                yield metered, line\n",
        "                yield opened, line\n",
        (f"{READING}::test_what_is_explained_is_what_the_proxy_counts",),
    ),
    Mutant(
        "explain-put-fails-silent",
        "a read whose lines could not be put passes for one that was told",
        "spark/datasource/options.py",
        '(() if ended == "whole" else (TieredIndexError,))',
        "(TieredIndexError,)",
        (f"{READING}::test_a_place_that_takes_no_lines_fails_the_read",),
    ),
    Mutant(
        "explain-within-the-index",
        "lines lie among the index's own objects",
        "spark/datasource/options.py",
        'if self.explain is not None and f"',
        'if self.explain is None and f"',
        (f"{READING}::test_a_place_that_takes_no_lines_fails_the_read",),
    ),
    Mutant(
        "explain-stopped-as-failed",
        "an attempt that Spark wanted no more rows of passes for one that failed",
        "spark/datasource/options.py",
        '        ended = "stopped"\n',
        "",
        (f"{MESSAGES}::test_what_is_read_of_local_files_is_told",),
    ),
    Mutant(
        "explain-reads-without-bytes",
        "lines of a commit log's read tell no bytes",
        "spark/datasource/options.py",
        "        self.reads.bytes_read += len(data)\n",
        "",
        (f"{MESSAGES}::test_what_is_read_of_local_files_is_told",),
    ),
    Mutant(
        "explain-messages-not-counted",
        "lines of a commit log's read tell no rows",
        "spark/datasource/messages.py",
        "            line.rows += len(batch)\n",
        "",
        (f"{MESSAGES}::test_what_is_asked_of_an_archive_is_told",),
    ),
    Mutant(
        "explain-within-the-store",
        "lines lie in the broker's own folders",
        "spark/datasource/messages.py",
        ".is_relative_to(folder.resolve())",
        " == folder",
        (f"{MESSAGES}::test_places_that_take_no_lines",),
    ),
    Mutant(
        "explain-of-a-stream-ignored",
        "a stream takes the option and tells nothing",
        "spark/datasource/messages.py",
        "if settings.explain is not None:",
        "if settings.explain is not None and settings.skip_corrupt:",
        (f"{MESSAGES}::test_places_that_take_no_lines",),
    ),
    Mutant(
        "denials-not-warned-of",
        "register says nothing of speculation with one failure allowed",
        "spark/session.py",
        "    warn_of_denials(lambda name, default: str(spark.conf.get(name, default)))\n",
        "",
        (f"{WRITING}::test_register_warns_by_the_settings_of_its_session",),
    ),
    Mutant(
        "denials-warned-of-one-alone",
        "two or three failures allowed pass for enough",
        "spark/session.py",
        "and failures < _LEAST_FAILURES:",
        "and failures < 2:",
        (f"{WRITING}::test_settings_by_which_a_denied_attempt_fails_a_write_are_warned_of",),
    ),
    Mutant(
        "denials-without-speculation",
        "register warns where Spark doesn't speculate",
        "spark/session.py",
        '.lower() == "true" and failures',
        '.lower() != "" and failures',
        (f"{WRITING}::test_settings_by_which_a_denied_attempt_fails_a_write_are_warned_of",),
    ),
    Mutant(
        "registers-in-one-session",
        "a second session of an application can't register",
        "spark/session.py",
        "    sessions.setActiveSession(spark._jsparkSession)\n",
        "",
        (f"{WRITING}::test_each_session_of_an_application_registers_for_itself",),
    ),
    Mutant(
        "registering-moves-the-session",
        "the session that registers stays the active one",
        "spark/session.py",
        "sessions.setActiveSession(before.get()) if",
        "None if",
        (f"{WRITING}::test_each_session_of_an_application_registers_for_itself",),
    ),
)
