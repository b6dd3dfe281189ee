"""`tiered-index copy`: copies an index to another storage, once or continuously."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import asdict, dataclass
from typing import Any

from tiered_index.base.clock import SystemClock
from tiered_index.base.units import format_time, human_duration
from tiered_index.cli.ending import Ending
from tiered_index.cli.output import error_document
from tiered_index.cli.session import Session, check_root_of, storage_uri
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    CorruptFile,
    DiskFull,
    InvalidArgument,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.service.jobs.copying import Copier, CopyReport, CopyStopped
from tiered_index.service.jobs.orphans import Orphans
from tiered_index.service.log.publication import JobOverdue
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.prices import rounded_usd

_SWEEP_S = 3600.0


def copy(
    session: Session,
    *,
    source: str | None,
    to: str,
    threads: int,
    follow: bool,
    interval: int,
    must_exist: bool,
    grace: int,
) -> int:
    """Copy an index to another storage, for a backup, a move or a standby."""
    if grace < 3600:
        least = "at least 1h, because readers may be at work"
        raise InvalidArgument(f"--grace must be {least}, not {human_duration(grace)}")
    if interval < 1:
        raise InvalidArgument(f"--interval must be at least 1s, not {interval}")
    config = session.config(storage=source or session.storage)
    with contextlib.ExitStack() as closing:
        read, written = (
            closing.enter_context(contextlib.closing(MeteredStorage(config.open_storage(uri), config.prices)))
            for uri in (storage_uri(config), to)
        )
        copier = Copier(read, written, SystemClock(), threads)
        copier.must_exist = must_exist
        # the root is of the index in --storage
        rounds = _Rounds(session, copier, config if source is None else None, grace)
        if follow:
            return _follow(rounds, interval)
        report = rounds.run_once("copied")
    return _code(report)


@dataclass
class _Rounds:
    """Rounds of one copy. `rooted` has the root to check, if there is one; `last` is the last round's report."""

    session: Session
    copier: Copier
    rooted: IndexConfig | None
    grace_s: int
    last: CopyReport | None = None
    _looked_s: float = float("-inf")
    # records since the last sweep
    _has_news: bool = False

    def run_once(self, status: str) -> CopyReport:
        """Copy, delete what may be deleted at most once an hour, and print the round. A repetition is cheap.

        Raises the errors of `Copier`, and `NotAnIndex` if the root is of another index.
        """
        copier, out, is_first = self.copier, self.session.out, self.last is None
        if is_first:
            copier.open()
            if self.rooted is not None:
                check_root_of(self.rooted, copier.log)
        with out.progress("copying", copier.missing_bytes()) as progress:
            copier.progress = progress.counting("bytes")
            # also if the sweep fails: then the copy is up to date
            report = self.last = copier.run_once()
        swept: Orphans | None = None
        self._has_news = self._has_news or bool(report.records)
        if (now_s := copier.clock.monotonic_s()) - self._looked_s >= _SWEEP_S:
            self._looked_s = now_s
            if self._has_news or copier.may_sweep(self.grace_s):
                swept, self._has_news = copier.sweep(self.grace_s), False
        if out.as_json or is_first or report.records or (swept and swept.objects):
            _write_round(self.session, copier, report, status, swept)
        return report


def _follow(rounds: _Rounds, interval_s: int) -> int:
    """Copy again and again until a signal ends the command; after a storage error try again in the next round."""
    session, copier = rounds.session, rounds.copier
    with Ending() as ending:
        copier.stop = ending.event
        while not ending.event.is_set():
            try:
                rounds.run_once("following")
            except (StorageUnavailable, StorageMisconfigured, DiskFull, JobOverdue) as error:
                session.out.answer(_failed(error, copier, rounds.last), streamed=True)
                session.out.flush()
                behind = f"; the copy is as of {format_time(rounds.last.as_of_ms)}" if rounds.last is not None else ""
                session.out.note(f"{error}{behind}; tried again in {interval_s} s")
            except CopyStopped:
                break
            ending.event.wait(min(interval_s, threading.TIMEOUT_MAX))
        if rounds.last is not None:
            _write_round(session, copier, rounds.last, "stopped")
        else:
            session.out.answer({"status": "stopped"}, streamed=True)
    return ending.exit_code or (_code(rounds.last) if rounds.last is not None else 0)


def _code(report: CopyReport) -> int:
    return CorruptFile.exit_code if report.problems else 0


def _failed(error: TieredIndexError, copier: Copier, last: CopyReport | None) -> dict[str, Any]:
    """Return the JSON document of a failed round."""
    return {
        "status": "failed",
        **error_document(error),
        "as_of_ms": last.as_of_ms if last is not None else None,
        "source_number": last.source_number if last is not None else None,
        "lag_s": _lag_s(copier, last) if last is not None else None,
    }


def _lag_s(copier: Copier, report: CopyReport) -> float:
    return max(0, copier.clock.now_ms() - report.as_of_ms) / 1000


def _write_round(
    session: Session, copier: Copier, report: CopyReport, status: str, swept: Orphans | None = None
) -> None:
    read, written = copier.source, copier.target
    assert isinstance(read, MeteredStorage) and isinstance(written, MeteredStorage)
    lag_s = _lag_s(copier, report)
    gone = swept.objects if swept is not None else ()
    document = {
        "status": status,
        **asdict(report),
        "lag_s": lag_s,
        "deleted": {"objects": len(gone), "bytes": sum(info.size_bytes for info in gone)},
        "requests": {"source": read.total.requests_by_kind, "target": written.total.requests_by_kind},
        "bytes_read": read.total.bytes_read + written.total.bytes_read,
        "bytes_written": written.total.bytes_written,
        "cost_usd": rounded_usd(read.total.cost_usd + written.total.cost_usd),
    }
    session.out.show(document, without=("number", "index_id"), streamed=status != "copied")
    # a pipe would hold the lines of many rounds back
    session.out.flush()
