"""Of local files that lookups, builds and audits on Spark read and write (CSV, names, errors), and of sessions that they
refuse.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

HERE = "tests/spark/test_lookup_files.py"

MUTANTS = (
    Mutant(
        "bad-row-of-its-list",
        "a bad row with a list of keys is named by its place among the keys",
        "spark/build/plan.py",
        "at = int(np.frombuffer(place[ROWS], np.int64)[row]) if ROWS in place else row",
        "at = row",
        ("tests/spark/test_bad_input.py::test_a_bad_row_of_a_parquet_file_is_named",),
    ),
    Mutant(
        "csv-backslash-escapes",
        "a backslash in CSV is taken for an escape, so other keys are asked for",
        "spark/lookup/keys.py",
        "csv.reader(_decoded(file, lines), strict=True)",
        'csv.reader(_decoded(file, lines), strict=True, escapechar="\\\\")',
        (f"{HERE}::test_keys_of_csv_are_those_that_were_written",),
    ),
    Mutant(
        "csv-open-quote",
        "a quote that isn't closed takes the rest of the file for its cell, in silence",
        "spark/lookup/keys.py",
        "csv.reader(_decoded(file, lines), strict=True)",
        "csv.reader(_decoded(file, lines))",
        (f"{HERE}::test_csv_that_is_none_is_told_with_its_line",),
    ),
    Mutant(
        "csv-columns-by-place",
        "CSV files of a folder go by the order of columns in the first one",
        "spark/lookup/keys.py",
        "        if found != header:\n",
        "        if len(found) != len(header):\n",
        (f"{HERE}::test_headers_that_differ",),
    ),
    Mutant(
        "csv-replaces-bytes",
        "what is no UTF-8 becomes another key",
        "spark/lookup/keys.py",
        'line.decode("utf-8-sig" if number == 1 else "utf-8")',
        'line.decode("utf-8-sig", "replace")',
        (f"{HERE}::test_csv_that_is_none_is_told_with_its_line",),
    ),
    Mutant(
        "spark-name-is-a-pattern",
        "a local file's name is Spark's pattern, and other files are read",
        "spark/executors.py",
        '_PATTERN.sub(r"\\\\\\g<0>", str(file))',
        "str(file)",
        (f"{HERE}::test_a_files_name_is_no_pattern[.parquet]", f"{HERE}::test_a_sources_name_is_no_pattern[.ndjson]"),
    ),
    Mutant(
        "spark-name-with-escapes",
        "answers go to a folder of another name",
        "spark/lookup/keys.py",
        'f"file://{place}"',
        "place.as_uri()",
        (f"{HERE}::test_answers_go_where_they_are_asked_to[]",),
    ),
    Mutant(
        "ndjson-second-value",
        "of two objects in a line the second is passed over",
        "spark/executors.py",
        r"[}\]]\s*[^\s,\]}]|",
        "",
        (f"{HERE}::test_messages_of_two_in_a_line_are_told",),
    ),
    Mutant(
        "parquet-lacks-a-column",
        "messages of files that name the key's column otherwise are taken for messages without a key",
        "spark/build/sources.py",
        'frame.drop(*columns_not_in_all(frame.columns, files) - {"topic_id"})',
        "frame",
        ("tests/spark/test_parquet_entries.py::test_a_field_that_not_all_files_have_is_missing",),
    ),
    Mutant(
        "source-of-hidden-folders",
        "what a killed job left below _temporary is built with the files that it committed again",
        "spark/build/folders.py",
        "for part in path) for path in parts]",
        "for part in path[-1:]) for path in parts]",
        ("tests/spark/test_parquet_entries.py::test_hidden_folders_and_tables_are_no_folder_of_files",),
    ),
    Mutant(
        "source-of-a-delta-table",
        "files that a table has replaced are built with those that replaced them",
        "spark/build/folders.py",
        "if tables := _TABLES & {part",
        "if tables := set() & {part",
        ("tests/spark/test_parquet_entries.py::test_hidden_folders_and_tables_are_no_folder_of_files",),
    ),
    Mutant(
        "parquet-keys-twice",
        "a key that a message's list has twice makes two entries",
        "spark/build/parquet.py",
        "kept = valid[np.unique(pairs, return_index=True)[1]]",
        "kept = valid",
        ("tests/spark/test_parquet_entries.py::test_entries_are_those_that_spark_makes",),
    ),
    Mutant(
        "parquet-null-keys-counted",
        "a message whose key is null is counted as an entry",
        "spark/build/parquet.py",
        "return not (told is not None and told.has_null_count and told.null_count == 0)",
        "return told is None",
        ("tests/spark/test_parquet_entries.py::test_entries_are_those_that_spark_makes",),
    ),
    Mutant(
        "connect-of-a-vendor",
        "a managed service's own session of Spark Connect ends in an error about the JVM",
        "spark/executors.py",
        "for kind in type(spark).__mro__",
        "for kind in (type(spark),)",
        ("tests/spark/test_connect.py::test_a_session_of_spark_connect_is_refused",),
    ),
    Mutant(
        "connect-not-looked-for",
        "a session of Spark Connect gets as far as its missing context",
        "spark/metrics.py",
        "        check_classic(spark)\n",
        "",
        ("tests/spark/test_connect.py::test_a_session_of_spark_connect_is_refused",),
    ),
)
