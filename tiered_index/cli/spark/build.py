"""`tiered-index spark build`: build window tables from files or a commit log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tiered_index.cli.exit_codes import FINDING
from tiered_index.cli.on_spark import run_job, spark_columns, spark_of
from tiered_index.cli.options import Column, Constant, SparkOptions, given_columns
from tiered_index.cli.session import Session, storage_uri
from tiered_index.cli.write.linking import tell_missing
from tiered_index.connectors.files.damaged import damage_text, known_damage
from tiered_index.connectors.files.spec import RowOptions
from tiered_index.connectors.source import FIRST
from tiered_index.errors import InvalidArgument

if TYPE_CHECKING:
    from tiered_index.spark.writing.build import BuildResult
    from tiered_index.spark.writing.linked import RowsOfFiles


def build(
    session: Session,
    *,
    source: list[str],
    window: str,
    column: Column,
    constant: Constant,
    shards: str,
    mode: str,
    max_windows: int,
    begin: int | None,
    end: int | None,
    skip_corrupt: bool,
    dry_run: bool,
    key: list[str] | None,
    skip_bad: bool,
    of_rows: RowOptions,
    on: SparkOptions,
) -> int:
    """Build window tables from files or a commit log with Spark."""
    config = session.config()
    if shards != "auto" and not shards.isdecimal():
        raise InvalidArgument(f"--shards is auto or a number, not {shards!r}")
    wanted_shards = "auto" if shards == "auto" else int(shards)
    # those that are checked before Spark, which takes seconds to start
    known: dict[str, Any] = {"storage": storage_uri(config), "config": config}
    known |= {"window": window, "shards": wanted_shards}
    more: dict[str, Any] = {"max_windows": max_windows, "dry_run": dry_run}
    if of_rows != RowOptions() or key:
        refused = {"--column": column, "--constant": constant, "--begin": begin, "--end": end}
        refused |= {"--skip-corrupt": skip_corrupt, "--mode": mode != "error"}
        if wrong := [name for name, value in refused.items() if value]:
            raise InvalidArgument(f"leave {wrong[0]} out: it is not for rows of files (--topic)")
        return _build_files(
            session,
            source,
            _rows_of(of_rows, key),
            on,
            {**known, **more, "skip_bad": skip_bad, "strict": of_rows.strict},
        )
    if skip_bad:
        raise InvalidArgument("--skip-bad needs --topic")
    columns, constants = given_columns(column, constant)
    from tiered_index.spark.writing.build import build as build_tables
    from tiered_index.spark.writing.build import check_build

    known["mode"] = mode
    check_build(source, fields={**columns, **dict.fromkeys(constants)}, **known)
    spark = spark_of(session, on)
    more |= {"columns": spark_columns(columns, constants), "begin_ms": begin, "end_ms": end}
    result, elapsed_s = run_job(build_tables, spark, source, skip_corrupt=skip_corrupt, **known, **more)
    return _show_build(session, result, elapsed_s)


def _rows_of(options: RowOptions, keys: Sequence[str] | None) -> RowsOfFiles:
    """Return the fields of rows of files. Raises `InvalidArgument`, which names a missing option."""
    from tiered_index.connectors.files.first_rows import mapping_of
    from tiered_index.spark.writing.linked import RowsOfFiles

    topic, mapping = mapping_of(options, keys)
    topics, zone = (topic, mapping.topic), None if mapping.zone is None else mapping.zone.name
    return RowsOfFiles(tuple(mapping.keys), mapping.time, mapping.unit, *topics, mapping.dialect, zone=zone)


def _build_files(
    session: Session, sources: Sequence[str], rows: RowsOfFiles, on: SparkOptions, options: dict[str, Any]
) -> int:
    """Index the rows of files where they are, and return the exit code."""
    from tiered_index.connectors.files.listing import missing_paths
    from tiered_index.connectors.files.rows.zone import UnclearTimes
    from tiered_index.spark.writing.linked import link_files

    tell_missing(session, missing_paths(sources))
    result, elapsed_s = run_job(link_files, spark_of(session, on), sources, rows, **options)
    for uri in result.changed:
        session.out.note(f"{uri} has changed since it was indexed: its earlier rows can't be read any more")
    for uri in result.held_back:
        session.out.note(
            f"{uri}: the last row has no newline or an open quote: it may be cut. A later run reads it when it ends"
        )
    for text in UnclearTimes(result.doubled_times, result.missing_times).texts(result.time_zone or ""):
        session.out.note(text)
    for damage in result.damaged_first[:FIRST]:
        session.out.note(f"damaged: {damage_text(damage)}")
    for text in known_damage(result.known_damaged, result.known_damaged_first):
        session.out.note(text)
    bad = [{"where": where, "problem": problem} for where, problem in result.skipped_first]
    _show_build(session, result, elapsed_s, skipped_first=bad)
    return FINDING if result.damaged or (result.skipped_rows and not options["skip_bad"]) else 0


def _show_build(session: Session, result: BuildResult, elapsed_s: float, **more: Any) -> int:
    """Print the result of a build, with `more` fields, and return the exit code."""
    document = {
        "status": "planned" if result.dry_run else "built",
        **asdict(result),
        "windows": [
            {"begin_ms": begin * 1000, "window_s": length, "entries": n} for begin, length, n in result.windows
        ],
        "removed_topics": [{"topic": topic, "entries": entries} for topic, entries in result.removed_topics],
        "skipped": [{"file": file, "begin": b, "end": e, "problem": problem} for file, b, e, problem in result.skipped],
        **more,
        "elapsed_s": round(elapsed_s, 3),
    }
    session.out.show(document)
    return 0
