"""Measures a program and the processes below it: time, CPU, peak memory, bytes, disk. Linux.

Bytes are those of read and write calls of all these processes, by `/proc`; reads by memory map are not counted.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.memory import ProcessWatch, Sampler, below, proc_lines

_TOP = Path(__file__).resolve().parents[3]
_TOLD_OF_FAILURE = 3_000


class _Disk(Sampler):
    """While entered, samples the used disk and the bytes that processes read and write."""

    period_s = 1.0

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._before = shutil.disk_usage(folder).used
        self._peak = self._before
        self._bytes: dict[int, tuple[int, int]] = {}

    def figures(self) -> dict[str, int]:
        """Return the bytes."""
        used = shutil.disk_usage(self._folder).used
        read, written = (sum(values) for values in zip(*self._bytes.values(), strict=True)) if self._bytes else (0, 0)
        return {
            "disk_bytes": used - self._before,
            "temporary_bytes": max(0, self._peak - max(used, self._before)),
            "read_bytes": read,
            "written_bytes": written,
        }

    def sample(self) -> None:
        self._peak = max(self._peak, shutil.disk_usage(self._folder).used)
        for pid in below(os.getpid()):
            if moved := proc_lines(f"{pid}/io"):
                self._bytes[pid] = int(moved["rchar"]), int(moved["wchar"])


def measured(command: Sequence[str], folder: Path, codes: Sequence[int] = (0,)) -> tuple[dict[str, Any], Any]:
    """Run a program; return its figures and the JSON document on its stdout, None without one.

    `codes`: exit codes of success. Raises `RuntimeError` with the end of stderr for another one.
    """
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(_TOP)}
    with (folder / "stderr.log").open("w+") as complaints, ProcessWatch() as watch, _Disk(folder) as disk:
        before, begun = watch.cpu_s(), time.perf_counter()
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=environment,
            cwd=folder,
            check=False,
        )
        wall_s, after, peaks = time.perf_counter() - begun, watch.cpu_s(), watch.peaks_mib()
        complaints.seek(0)
        if done.returncode not in codes:
            said = complaints.read()[-_TOLD_OF_FAILURE:] + done.stdout[-_TOLD_OF_FAILURE:]
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {said}")
    figures = {
        "wall_s": wall_s,
        "java_cpu_s": after["java"] - before["java"],
        "python_cpu_s": after["python"] - before["python"],
        **{f"{kind}_peak_mib": max(values, default=0) for kind, values in peaks.items()},
        **disk.figures(),
    }
    return figures, json.loads(done.stdout) if done.stdout.lstrip().startswith("{") else None
