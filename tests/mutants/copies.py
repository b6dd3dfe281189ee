"""Private copies of the tree, where defects are put in and taken out again; the working tree itself is never written
to.

Compiled files are checked by content (or not written at all): two versions of a file within one second and of one
length would otherwise be taken for each other. Threads: a copy belongs to one thread at a time; `stop` from any.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import witness
from tests.mutants.mutant import PACKAGE, Mutant, mutate

__all__ = ["Copy", "NotTheCopy", "Run", "copy_tree"]

_WITNESS = "mutants_witness"


class NotTheCopy(Exception):
    """The tests imported the package from somewhere else, so nothing that they say is about the copy."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of pytest. `code` is None where it ran out of time; `failed` holds (node id, phase)."""

    code: int | None
    passed: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
    output: str
    seconds: float


def copy_tree(source: Path, target: Path) -> None:
    """Copy what git tracks in `source`, or would: changes that aren't committed are among it, caches and the like are
    not.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=source,
        check=True,
        capture_output=True,
    )
    for name in sorted(set(listed.stdout.decode().split("\0")) - {""}):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


class Copy:
    """The tree in `folder`, ready to run tests in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._scratch = self.folder.with_name(self.folder.name + ".scratch")
        self._scratch.mkdir()
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._stopped = False
        (self.folder / f"{_WITNESS}.py").write_text(Path(witness.__file__).read_text())
        compileall = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", PACKAGE]
        subprocess.run(compileall, cwd=self.folder, check=True)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[int]:
        """Put the defect in, yield the line that it is at, and take it out again. Raises `OutOfDate`."""
        path, bad, line = mutate(mutant, self.folder / PACKAGE)
        good = path.read_text()
        path.write_text(bad)
        try:
            yield line
        finally:
            path.write_text(good)

    def run(self, tests: Sequence[str], timeout_s: float, *, until_first: bool = True) -> Run:
        """Run the tests named. Raises `NotTheCopy`."""
        report = self._scratch / "report.json"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", _WITNESS]
        command += [f"--basetemp={self._scratch / 'tests'}", *(["-x"] if until_first else []), *tests]
        started_s = time.monotonic()
        code, output = self._finish(command, report, timeout_s)
        seconds = time.monotonic() - started_s
        if code is None or not report.exists():
            return Run(code, (), (), output, seconds)
        document = json.loads(report.read_text())
        origin = document["origin"]
        if origin is not None and not Path(origin).resolve().is_relative_to(self.folder):
            raise NotTheCopy(f"{PACKAGE} was imported from {origin}, not from {self.folder}")
        passed = tuple(document["passed"])
        if origin is None and passed:
            raise NotTheCopy(f"the tests ran without importing {PACKAGE}")
        return Run(code, passed, tuple((test, phase) for test, phase in document["failed"]), output, seconds)

    def stop(self) -> None:
        """End what is running here, and run nothing more."""
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _finish(self, command: Sequence[str], report: Path, timeout_s: float) -> tuple[int | None, str]:
        inherited = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("TIERED_INDEX_", "PYTEST_", "HYPOTHESIS_", "PYTHON"))
        }
        environment = {
            **inherited,
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "MUTANTS_REPORT": str(report),
            "MUTANTS_PACKAGE": PACKAGE,
        }
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            # a session of its own: what the tests have started ends with them
            self._process = process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output
        return process.returncode, output
