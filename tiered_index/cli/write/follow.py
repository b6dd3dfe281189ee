"""Follows a source for commands: `ingest`, to its end or with --follow until stopped, and `serve --follow`.

Both only read the broker's files, also while it runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

from tiered_index.base.units import format_time
from tiered_index.cli.ending import Ending
from tiered_index.cli.exit_codes import FINDING, INTERRUPTED
from tiered_index.cli.options import IntakeOptions
from tiered_index.cli.output import Output, ProgressDisplay, human_bytes, human_count, human_seconds, states
from tiered_index.cli.session import Session
from tiered_index.cli.write.putting import Putting, none_indexed, show_put
from tiered_index.connectors.contract import SourceConnector, SourceRun
from tiered_index.connectors.documents import document_of
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.registry import CONNECTORS
from tiered_index.connectors.source import Source
from tiered_index.errors import TieredIndexError
from tiered_index.service.index import IndexService
from tiered_index.types import inclusive

# seconds between checks of a source that names none
_POLL_S = 0.2


def opened_follower(
    connector: SourceConnector, run: SourceRun, index: IndexService, stop: threading.Event, **of_follower: Any
) -> tuple[Follower, str]:
    """Return a follower of a source, and the name of the source. Raises as `SourceConnector.source`."""
    source, archiver, name = connector.source(run, index)
    how: dict[str, Any] = {"follow": run.follow, "stop": stop, "archiver": archiver, "note": run.note}
    how["poll_s"] = run.poll_s or getattr(source, "poll_s", _POLL_S)
    if not hasattr(source, "document"):
        how["document"] = document_of(CONNECTORS.of_address(run.addresses[0]).name)
    return Follower(index, source, **how, **of_follower), name


def _distance(count: int, unit: str) -> str:
    return human_bytes(count) if unit == "bytes" else f"{human_count(count)} {unit}"


class StatusLines:
    """Shows a follower's state: on the progress bar and, if `records`, as a JSON line for each change."""

    def __init__(self, out: Output, progress: ProgressDisplay, *, records: bool) -> None:
        self._out, self._progress, self._records = out, progress, records
        self._last: dict[str, Any] = {}
        self._losses = 0

    def __call__(self, follower: Follower) -> None:
        """Show the present state."""
        lag, position = follower.source.lag(), follower.position
        problems = [*follower.index.health()["problems"], *follower.problems()]
        seconds = f", {human_seconds(lag.seconds)}" if lag.seconds else ""
        behind = f"{_distance(lag.bytes, follower.source.unit)}{seconds} behind"
        if lag.is_unknown:
            behind = "lag unknown"
        detail = f"{human_count(follower.entries)} entries, {behind}"
        self._progress.update(position, "; ".join([detail, *problems]))
        if not self._records:
            return
        state = follower.to_dict()
        new = follower.losses[self._losses :]
        line = {
            "status": "following",
            **{name: state[name] for name in ("position", "messages", "entries")},
            "lag": lag,
            "losses": new,
            "problems": problems,
            "state": state["tail"],
            "torn": state["torn"] if follower.is_torn_reported else None,
            **{name: state[name] for name in ("archived_segments",) if name in state},
        }
        if new or line != self._last:
            self._last, self._losses = line | {"losses": []}, len(follower.losses)
            self._out.record(line)
            self._out.flush()


class Ended(NamedTuple):
    """The end of a run: whether a signal stopped it, the position where it started, and the seconds that it took."""

    is_stopped: bool
    name: str
    resumed_from: int
    taken_s: float


class IngestReport:
    """Shows a run that reads a source."""

    def __init__(self, session: Session, intake: IntakeOptions, run: SourceRun) -> None:
        self.session, self.out, self.intake, self.run, self.follow = session, session.out, intake, run, run.follow

    def progress(self, source: Source) -> tuple[str, int | None]:
        """Return the title of the progress bar, and its total; None: it has no end."""
        return ("following", None) if self.follow else ("ingesting", source.lag().end_offset or None)

    def begin(self, follower: Follower, progress: ProgressDisplay) -> None:
        """Begin to show the state of a follower."""
        follower.status = StatusLines(self.out, progress, records=self.follow and self.out.as_json)

    def tell(self, follower: Follower) -> None:
        """Note what a user must know of what was read."""

    def document(self, putting: Putting, follower: Follower, ended: Ended) -> dict[str, Any]:
        """Return the document of the command."""
        source, taken_s = follower.source, ended.taken_s
        return putting.document(
            status="stopped" if ended.is_stopped else "complete",
            source_name=ended.name,
            resumed_from=ended.resumed_from,
            **follower.to_dict(),
            ingest_s=taken_s,
            entries_per_s=round(follower.entries / taken_s) if taken_s else None,
            expired=follower.put.expired,
            quarantined_first=[{**m, "where": _where(source, m)} for m in follower.put.quarantined],
            **getattr(source, "counts", dict)(),
            nothing_indexed=_lacks(follower),
        )

    def show(self, document: dict[str, Any], follower: Follower) -> int:
        """Write the document, and return the exit code of a run that was not stopped."""
        show_ingested(self.out, document, streamed=self.follow)
        # a run that follows may be restarted at any time, also while no new message has a key
        nothing = 0 if self.follow else none_indexed(self.session, self.intake, document["nothing_indexed"])
        return FINDING if follower.has_lost else nothing


def ingest_followed(
    opened: Callable[[], AbstractContextManager[Putting]],
    connector: SourceConnector,
    run: SourceRun,
    report: IngestReport,
) -> int:
    """Follow a source into the index that is `opened`, and return the exit code."""
    intake, follow = report.intake, run.follow
    with contextlib.ExitStack() as stack:
        ending = Ending()
        putting = stack.enter_context(opened())
        run = replace(run, stopped=ending.event.is_set)
        follower, name = opened_follower(connector, run, putting.index, ending.event, patience_s=intake.patience)
        stack.enter_context(follower)
        resumed_from = follower.position
        with putting.progress(*report.progress(follower.source), ending.event) as progress:
            report.begin(follower, progress)
            # otherwise a signal ends the command at once: it can simply be run again
            ends_in_order = follow or follower.must_archive
            try:
                with ending if ends_in_order else contextlib.nullcontext():
                    follower.run()
            except TieredIndexError:
                follower.finish_before_end()
                raise
        report.tell(follower)
        taken_s, is_stopped = putting.elapsed_s, ending.event.is_set()
        with ending if ends_in_order and not is_stopped else contextlib.nullcontext():
            if intake.wait or not is_stopped:
                follower.finish_archiving()
            else:
                follower.finish_before_end()
        if ending.exit_code == 0:
            putting.settle()
        document = report.document(putting, follower, Ended(is_stopped, name, resumed_from, taken_s))
    shown = report.show(document, follower)
    # not all was read: SIGTERM without --follow is no success
    stopped = INTERRUPTED if is_stopped and not follow else 0
    return ending.exit_code or stopped or shown


def _lacks(follower: Follower) -> list[str]:
    """Return why none of the messages that were read was indexed; empty: some were, or there were none to index."""
    lacks = getattr(follower.source, "lacks", None)
    if lacks is None or follower.entries or not follower.messages:
        return []
    return list(lacks(follower.messages, follower.hidden, follower.left_out))


def _where(source: Source, message: Mapping[str, Any]) -> str:
    if source.unit == "bytes":
        return f"{source.offsets.removesuffix('s')} {message['offset']}"
    return "{topic}/{queue_id}/{offset}".format_map(message)


# A smaller number of milliseconds (April 1970) is probably one of seconds
_SECONDS_OF_TODAY = 10**10
# Counts that are printed unless they are 0, and their units
_COUNTS = {
    "skipped": "messages",
    "quarantined": "entries with an implausible time",
    "expired": "entries older than the retention: lookups leave them out",
    "hidden": "prepared or rolled back",
    "left_out": "of other topics, or RocketMQ's own",
    "no_json": "no JSON",
    "too_long": "keys longer than 32,767 UTF-16 code units",
    "archived_segments": "uploaded",
}


def show_ingested(out: Output, document: dict[str, Any], *, streamed: bool = False) -> None:
    """Write the summary of an ingested file, store or topics."""
    lag, torn = document.get("lag", {}), document.get("torn")
    lag_bytes = lag.get("bytes")
    unknown = "unknown" if lag_bytes == 0 and lag.get("seconds", 0) is None else None
    for bad in document.get("skipped_first", ()):
        out.remark(f"skipped: {bad['where']}: {bad['problem']}")
    for late in document["quarantined_first"]:
        seconds = "; seconds? timestamp_ms is milliseconds" if late["timestamp_ms"] < _SECONDS_OF_TODAY else ""
        out.remark(f"to quarantine: {late['where']}: {format_time(late['timestamp_ms'])}{seconds}")
    for place in document.get("no_json_first", ()):
        out.remark(f"no JSON: {place}")
    resumed = f" (resumed from {human_count(document['resumed_from'])})" if document["resumed_from"] else ""
    counts = _COUNTS | ({"left_out": "without a key"} if document["unit"] == "records" else {})
    fields = {
        "source": document["source"],
        "position": f"{human_count(document['position'])} {document['unit']}{resumed}",
        "behind": _distance(lag_bytes, document["unit"]) if lag_bytes else unknown,
        **{name: document[name] for name in ("messages", "entries")},
        **{name: f"{document[name]:,} {counted}" for name, counted in counts.items() if document.get(name)},
        "skipped_reasons": document.get("skipped_reasons"),
        "lost": f"{document['loss_count']:,} ranges, named above" if document.get("loss_count") else None,
        "torn": f"{inclusive(torn['begin'], torn['end'])}, {torn['what']} at the end of the log" if torn else None,
        "rate": f"{human_count(document['entries_per_s'])} entries/s" if document["entries_per_s"] else None,
        "elapsed": human_seconds(document["elapsed_s"]),
        "files": states(document["files"]) or "none",
    }
    show_put(out, document, fields, streamed=streamed)
