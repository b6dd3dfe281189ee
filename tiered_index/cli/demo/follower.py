"""The ingesting process, and its deaths: `tiered-index ingest STORE_DIR --follow` in a process of its own, killed and started again.

It follows the store while the broker writes; SIGKILL ends it twice. A kill in the middle of an upload is made exact by stopping the process
first: while it stands still its upload can't end, so what is unfinished then is unfinished when it dies. One thread.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_index.errors import StorageUnavailable, TieredIndexError
from tiered_index.format.names import DATA_PREFIX, STATES
from tiered_index.storage.base import Storage

__all__ = ["Follower", "ProcessFailed", "upload_under_way"]

_POLL_S = 0.002
_IN_FLIGHT_S = 0.05
# what a stopped process has sent already may still be carried out
_LIMIT_S = 300.0


class ProcessFailed(TieredIndexError):
    """A process of the demo ended with an error of its own."""

    exit_code = 1


@dataclass(frozen=True)
class Follower:
    """How to start the process; its environment is this one's."""

    source: Path
    root: Path
    storage_uri: str
    slots: int
    items: int
    config_file: Path | None = None

    def run_until(self, moment: Callable[[], bool], over: Callable[[], bool]) -> bool:
        """Start it and kill it as soon as `moment` is true, with the process standing still; return whether it was killed.

        Once `over` is true the moment will not come any more, and the process is ended in good order.
        """
        process = self._start(*self._ingest())
        try:
            deadline = time.monotonic() + _LIMIT_S
            while process.poll() is None and time.monotonic() < deadline:
                if moment():
                    process.send_signal(signal.SIGSTOP)
                    time.sleep(_IN_FLIGHT_S)
                    if moment():
                        process.kill()
                        process.wait()
                        return True
                    process.send_signal(signal.SIGCONT)
                elif over():
                    process.terminate()
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
            output, errors = process.communicate()
        if process.returncode:
            raise ProcessFailed(f"ingest ended with exit code {process.returncode}: {errors.strip() or output.strip()}")
        return False

    def finish(self, position: int) -> dict[str, Any]:
        """Let it follow the store up to a position and upload everything; return the last status line it prints."""
        process = self._start(*self._ingest(), "--wait")
        assert process.stdout is not None
        last: dict[str, Any] = {}
        try:
            for line in process.stdout:
                last = json.loads(line)
                if last["status"] == "following" and last["position"] >= position:
                    process.terminate()
            errors = process.communicate(timeout=_LIMIT_S)[1]
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode or last.get("status") != "stopped":
            raise ProcessFailed(f"ingest ended with exit code {process.returncode}: {errors.strip() or last}")
        return last

    def is_idle(self) -> bool:
        """Return whether nothing waits to be compacted or uploaded but the newest unsealed file."""
        unsealed, compacted = (sum(name.endswith(".index") for name in _names(self.root / state)) for state in STATES[:2])
        return unsealed <= 1 and not compacted

    def _ingest(self) -> tuple[str, ...]:
        return ("ingest", str(self.source), "--follow", "--slots", str(self.slots), "--items", str(self.items))

    def recover(self) -> dict[str, Any]:
        """Run `recover`; return what it prints."""
        return self._finished("recover")

    def files_begun(self) -> int:
        """Return how many index files the root holds, in whatever state."""
        return sum(name.endswith(".index") for state in STATES for name in _names(self.root / state))

    def _finished(self, *arguments: str) -> dict[str, Any]:
        process = self._start(*arguments)
        try:
            output, errors = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise ProcessFailed(f"{arguments[0]} did not end within {_LIMIT_S:.0f} s") from error
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            raise ProcessFailed(f"{arguments[0]} ended with exit code {process.returncode}: {errors.strip() or output.strip()}")
        document: dict[str, Any] = json.loads(output)
        return document

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "tiered_index.cli", *arguments, "--root", str(self.root), "--storage", self.storage_uri]
        if self.config_file is not None:
            line += ["--config", str(self.config_file)]
        return subprocess.Popen(
            [*line, "--json", "--quiet"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def upload_under_way(storage: Storage) -> bool:
    """Return whether a multipart upload of an index file is unfinished."""
    try:
        return next(iter(storage.list_uploads(DATA_PREFIX)), None) is not None
    except StorageUnavailable:
        return False


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
