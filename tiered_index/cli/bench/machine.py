"""The machine that a bench runs on (Linux): its facts, cores and memory. Pinning concerns the threads that it names."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tiered_index._version import __version__
from tiered_index.spark.executors import give_back

_SAMPLE_S = 0.01
_MIB = 1 << 20


def facts(folder: Path) -> dict[str, Any]:
    """Return what figures depend on, JSON-ready; `folder` is where they are taken."""
    return {
        "cpu": _proc_value("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _proc_value("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyarrow": pa.__version__,
        "tiered_index": __version__,
        "filesystem": _filesystem(folder),
        "load_average": round(os.getloadavg()[0], 2),
    }


def cores() -> tuple[int, int]:
    """Return a core for the work that is measured and one for everything else; the same one where there is but one."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[-1], usable[0]


def pin_thread(core: int) -> None:
    """Keep the calling thread on one core."""
    os.sched_setaffinity(0, {core})


def core_wait_s() -> float:
    """Return how long the calling thread has been ready to run while others had its core: what neighbours cost it."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Keep the whole process on one core: its threads, and those that they start."""
    usable = os.sched_getaffinity(0)
    _pin_all({core})
    try:
        yield
    finally:
        _pin_all(usable)


def _pin_all(usable: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(int(thread), usable)


def settle() -> None:
    """Sync earlier writes and give freed memory back, so that what is measured next pays for neither."""
    os.sync()
    give_back()


class MemoryWatch:
    """A thread samples the process's anonymous memory; `peak_mib` is the greatest increase over the start."""

    def __init__(self) -> None:
        self.peak_mib = 0.0
        self._before = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._before = _anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_SAMPLE_S):
            self.peak_mib = max(self.peak_mib, (_anonymous_bytes() - self._before) / _MIB)


def _anonymous_bytes() -> int:
    return int((_proc_value("/proc/self/status", "RssAnon") or "0 kB").split()[0]) * 1024


def _proc_value(path: str, name: str) -> str | None:
    """Return the value of the first ``name: value`` line of a file in /proc, or None."""
    for line in Path(path).read_text().splitlines():
        found, _, value = line.partition(":")
        if found.strip() == name:
            return value.strip()
    return None


def _filesystem(folder: Path) -> str:
    """Return the type of the file system that holds `folder`: the longest mount point above it counts."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    path = folder.resolve()
    holding = [(len(point), kind) for _, point, kind, *_ in mounts if path.is_relative_to(point)]
    return max(holding, default=(0, "unknown"))[1]
