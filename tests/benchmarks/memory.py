"""Peak memory and CPU time of processes below this one: Java's, and the Python workers that Spark forks. Linux.

The kernel keeps each process's greatest resident size (VmHWM), so that sampling misses nothing but a process that lives
between two samples; `restart` sets it back. CPU time is summed over samples too, and misses what a process has used
since its last one: the time of an idle worker that Spark ends is in no process's times of its children. Threads: the
sampler's own, and the caller's.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

__all__ = ["ProcessWatch", "below"]

_SAMPLE_S = 0.25
_KIB_A_MIB = 1024
_TICKS_A_S = os.sysconf("SC_CLK_TCK")


class ProcessWatch:
    """While entered, samples every process below this one.

    A Python worker is a Python process that a Python process started.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, dict[int, int]] = {}
        # CPU seconds of each process, by its id and when it began
        self._spent: dict[str, dict[tuple[int, str], float]] = {"java": {}, "python": {}}
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
            for pid in below(os.getpid()):
                _try_write(Path(f"/proc/{pid}/clear_refs"), "5")

    def peaks_mib(self) -> dict[str, list[int]]:
        """Return the peaks in MiB, greatest first, by kind: ``java``, ``worker``, ``python`` (other ones)."""
        with self._lock:
            self._sample()
            return {
                kind: sorted((peak // _KIB_A_MIB for peak in peaks.values()), reverse=True)
                for kind, peaks in self._peaks.items()
            }

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds that this process and those below it have used, ended ones too: ``java``,
        ``python``.
        """
        with self._lock:
            self._sample()
            return {kind: sum(spent.values()) for kind, spent in self._spent.items()}

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            with self._lock:
                self._sample()

    def _sample(self) -> None:
        names = below(os.getpid())
        for pid, (name, _) in {os.getpid(): ("python", 0), **names}.items():
            began, spent = _times(pid)
            self._spent["java" if name == "java" else "python"][pid, began] = spent
        for pid, (name, parent) in names.items():
            kind = (
                "java"
                if name == "java"
                else None
                if not _is_python(name)
                else "worker"
                if _is_python(names.get(parent, ("", 0))[0])
                else "python"
            )
            peak = _status(pid).get("VmHWM")
            if kind is not None and peak is not None:
                held = self._peaks.setdefault(kind, {})
                held[pid] = max(held.get(pid, 0), int(peak.split()[0]))


def _is_python(name: str) -> bool:
    return name.startswith("python")


def below(root: int) -> dict[int, tuple[str, int]]:
    """Return (name, parent) of every process below `root`, by its id."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (status := _status(int(path.name))):
            found[int(path.name)] = status["Name"], int(status["PPid"])
    below = {root}
    while more := {pid for pid, (_, parent) in found.items() if parent in below} - below:
        below |= more
    return {pid: found[pid] for pid in below if pid != root}


def _times(pid: int) -> tuple[str, float]:
    """Return when a process began, and its CPU seconds; nothing where it has ended."""
    try:
        # behind the name, which may have blanks
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[19], (int(fields[11]) + int(fields[12])) / _TICKS_A_S


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
