"""Peak memory and CPU time of processes below this one: Java's, and the Python workers that Spark forks. Linux.

The kernel keeps each process's greatest resident size (VmHWM), so that sampling misses nothing but a process that lives
between two samples; `restart` sets it back. Threads: the sampler's own, and the caller's.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from types import TracebackType

__all__ = ["ProcessWatch", "cpu_s", "keep_orphans"]

_SAMPLE_S = 0.25
_KIB_A_MIB = 1024
_PR_SET_CHILD_SUBREAPER = 36
_TICKS_A_S = os.sysconf("SC_CLK_TCK")


def keep_orphans() -> None:
    """Become the parent of processes below this one whose own has ended, so that `cpu_s` still counts them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def cpu_s() -> dict[str, float]:
    """Return the CPU seconds that this process and those below it have used, ended ones too: ``java``, ``python``."""
    spent = {"java": 0.0, "python": 0.0}
    for pid, (name, _) in {os.getpid(): ("python", 0), **_below(os.getpid())}.items():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue  # it has ended: its parent has its time
        # behind the name, which may have blanks: user, system, and those of children that were waited for
        user, system, *children = map(int, stat.rpartition(")")[2].split()[11:15])
        spent["java" if name == "java" else "python"] += (user + system) / _TICKS_A_S
        spent["python"] += sum(children) / _TICKS_A_S
    return spent


class ProcessWatch:
    """While entered, samples every process below this one.

    A Python worker is a Python process that a Python process started.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, dict[int, int]] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-processes", daemon=True)

    def __enter__(self) -> ProcessWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def restart(self) -> None:
        """Forget all peaks, also the kernel's."""
        with self._lock:
            self._peaks = {}
            for pid in _below(os.getpid()):
                _try_write(Path(f"/proc/{pid}/clear_refs"), "5")

    def peaks_mib(self) -> dict[str, list[int]]:
        """Return the peaks in MiB, greatest first, by kind: ``java``, ``worker``."""
        with self._lock:
            self._sample()
            return {
                kind: sorted((peak // _KIB_A_MIB for peak in peaks.values()), reverse=True)
                for kind, peaks in self._peaks.items()
            }

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            with self._lock:
                self._sample()

    def _sample(self) -> None:
        names = _below(os.getpid())
        for pid, (name, parent) in names.items():
            kind = (
                "java"
                if name == "java"
                else "worker"
                if _is_python(name) and _is_python(names.get(parent, ("", 0))[0])
                else None
            )
            peak = _status(pid).get("VmHWM")
            if kind is not None and peak is not None:
                held = self._peaks.setdefault(kind, {})
                held[pid] = max(held.get(pid, 0), int(peak.split()[0]))


def _is_python(name: str) -> bool:
    return name.startswith("python")


def _below(root: int) -> dict[int, tuple[str, int]]:
    """Return (name, parent) of every process below `root`, by its id."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (status := _status(int(path.name))):
            found[int(path.name)] = status["Name"], int(status["PPid"])
    below = {root}
    while more := {pid for pid, (_, parent) in found.items() if parent in below} - below:
        below |= more
    return {pid: found[pid] for pid in below if pid != root}


def _status(pid: int) -> dict[str, str]:
    """Return the lines of a process's status; nothing where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _try_write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError:
        return  # it has ended
