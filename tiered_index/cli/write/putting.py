"""Runs a command that puts entries into an index: ingest.

Flushes all entries, also after an error. With --wait it uploads everything. One thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from tiered_index.cli.exit_codes import DONE, FINDING
from tiered_index.cli.options import IntakeOptions
from tiered_index.cli.output import Output, ProgressDisplay, counted
from tiered_index.cli.session import Session
from tiered_index.config import IndexConfig
from tiered_index.connectors.follow import PatientPut
from tiered_index.errors import BackPressure, CloseTimeout, StorageUnavailable, TieredIndexError
from tiered_index.format.names import COMPACTED, UNSEALED
from tiered_index.format.topic_documents import DocumentOf
from tiered_index.service.index import IndexService
from tiered_index.service.read.files.compacted import DamagedFile

_LOOK_INTERVAL_S = 0.25
_PAUSE_S = 1.0


def settle(index: IndexService, patience_s: float, progress_of: Callable[[str, int], ProgressDisplay]) -> None:
    """Seal all files, and return when every file is in the storage. One thread drives the life cycle.

    Raises `StorageUnavailable` and `BackPressure` after `patience_s` without progress, other errors at once, also those
    of damaged files.
    """
    index.seal()
    waiting = len(_steps_left(index))
    total, quiet_since = 2 * waiting, time.monotonic()
    with (
        ThreadPoolExecutor(1, "tiered-index-settle") as pool,
        progress_of("compacting and uploading", total) as progress,
    ):
        while True:
            trouble: TieredIndexError = StorageUnavailable(f"{waiting} files were not uploaded: try again later")
            work: Future[object] = pool.submit(index.run_lifecycle)
            while not wait([work], _LOOK_INTERVAL_S).done:
                progress.update(total - sum(_steps_left(index)))
            try:
                work.result()
            except (StorageUnavailable, BackPressure) as error:
                # the next round sends the files that wait, as a writer's does after an outage
                trouble = error
            for handle in index.files():
                if isinstance(handle, DamagedFile):
                    raise handle.error
            left = len(_steps_left(index))
            if not left:
                return
            if left < waiting:
                waiting, quiet_since = left, time.monotonic()
            elif time.monotonic() - quiet_since > patience_s:
                raise trouble
            else:
                progress.update(total - sum(_steps_left(index)), f"waiting: {trouble}")
                time.sleep(_PAUSE_S)


def _steps_left(index: IndexService) -> list[int]:
    """Return for each file that is not uploaded the number of steps before it is."""
    steps = {UNSEALED: 2, COMPACTED: 1}
    return [steps[handle.place] for handle in index.files() if handle.place in steps]


@dataclass(eq=False)
class Putting:
    """A command that puts entries, and its index."""

    session: Session
    index: IndexService
    intake: IntakeOptions
    started_s: float

    @classmethod
    @contextlib.contextmanager
    def open(cls, session: Session, config: IndexConfig, intake: IntakeOptions) -> Iterator[Putting]:
        """Open the index of `config` for a command. Raises as `IndexService.open`."""
        started_s = time.monotonic()
        try:
            with IndexService.open(config) as index:
                yield cls(session, index, intake, started_s)
        except CloseTimeout as error:
            # all entries are on the disk, which is what a command without --wait promises
            session.out.note(str(error))

    def patient(
        self, stop: threading.Event | None = None, *, is_outside: bool = False, document: DocumentOf | None = None
    ) -> PatientPut:
        """Return a `put` that waits while the disk is full or the storage does not answer, until `stop` is set.

        `is_outside` and `document` are those of `PatientPut`.
        """
        stop = threading.Event() if stop is None else stop
        return PatientPut(self.index, self.intake.patience, stop, document, is_outside=is_outside)

    @contextlib.contextmanager
    def progress(self, title: str, total: int | None, stop: threading.Event | None = None) -> Iterator[ProgressDisplay]:
        """Show progress in the block, and flush the entries at its end, also after an error, which is raised.

        Without an error it waits while the disk is full, until `stop` is set.
        """
        with self.session.out.progress(title, total) as progress:
            try:
                yield progress
            except TieredIndexError:
                with contextlib.suppress(TieredIndexError):
                    self.index.flush()
                raise
            self.patient(stop).finish()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the command started."""
        return round(time.monotonic() - self.started_s, 3)

    def settle(self) -> None:
        """Upload everything, if --wait asks for it. Raises as `settle`."""
        if self.intake.wait:
            settle(self.index, self.intake.patience, self.session.out.progress)

    def document(self, **more: Any) -> dict[str, Any]:
        """Return the command's document: `more` and the state of the index."""
        health = self.index.health()
        waits = {name: health[name] for name in ("files", "unpublished")}
        return {**more, "quarantined": health["quarantined_entries"], "elapsed_s": self.elapsed_s, **waits}


def none_indexed(session: Session, intake: IntakeOptions, reasons: Sequence[str]) -> int:
    """Return the exit code of a finished run, and say why it indexed none of the messages that it read, if so."""
    # also with --quiet, unless it is no error
    say = session.out.remark if intake.allow_none else session.out.error_line
    for reason in reasons:
        say(f"nothing was indexed: {reason}")
    return FINDING if reasons and not intake.allow_none else DONE


def show_put(
    out: Output, document: dict[str, Any], fields: Mapping[str, Any] | None = None, *, streamed: bool = False
) -> None:
    """Write the document of a command; for people its `fields` (None: all), and the files that wait for upload.

    People see nothing with --quiet.
    """
    out.answer(document, streamed=streamed)
    if out.quiet:
        return
    out.fields(document if fields is None else fields, without=("unpublished",))
    waits = document["unpublished"]
    if waits["entries"]:
        files, entries = counted(waits["files"], "file"), counted(waits["entries"], "entry", "entries")
        out.line(f"not in the storage yet: {files}, {entries}; --wait uploads")
