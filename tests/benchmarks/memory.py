"""Peak memory and CPU time of processes (Linux): of any one, and of all below this one, such as Java and Spark's
workers.

The kernel keeps each process's greatest resident size (VmHWM), and `restart` resets it. So sampling misses only a
process that lives between two samples. CPU time is summed over samples too. It misses the CPU time after a process's
last sample, because an idle worker that Spark ends is in no process's times of its children. Threads: the sampler's
own, and the caller's.
"""

import contextlib
import os
import threading
from pathlib import Path
from typing import Self

_KIB = 1024
_TICKS_A_S = os.sysconf("SC_CLK_TCK")


class Sampler:
    """While entered, a thread calls `sample` every `period_s`."""

    period_s = 0.25

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self.period_s):
            self.sample()

    def sample(self) -> None:
        raise NotImplementedError


class MemoryWatch(Sampler):
    """While entered, samples this process's anonymous memory. `peak_mib` is the greatest increase over the start."""

    period_s = 0.01
    peak_mib = 0.0

    def __enter__(self) -> Self:
        self._before = memory_bytes("self", "RssAnon")
        return super().__enter__()

    def sample(self) -> None:
        self.peak_mib = max(self.peak_mib, (memory_bytes("self", "RssAnon") - self._before) / (1 << 20))


class ProcessWatch(Sampler):
    """While entered, samples every process below this one.

    A Python worker is a Python process that a Python process started.
    """

    def __init__(self) -> None:
        super().__init__()
        self._peaks: dict[str, dict[int, int]] = {}
        # CPU seconds of each process, by its id and start time
        self._spent: dict[str, dict[tuple[int, str], float]] = {"java": {}, "python": {}}
        self._lock = threading.Lock()

    def peaks_mib(self) -> dict[str, list[int]]:
        """Return the peaks in MiB, greatest first, by kind: ``java``, ``worker``, ``python`` (the others)."""
        self.sample()
        with self._lock:
            return {
                kind: sorted((peak >> 20 for peak in peaks.values()), reverse=True)
                for kind, peaks in self._peaks.items()
            }

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of this process and all below it, ended ones too, by kind: ``java``, ``python``."""
        self.sample()
        with self._lock:
            return {kind: sum(spent.values()) for kind, spent in self._spent.items()}

    def sample(self) -> None:
        with self._lock:
            names = below(os.getpid())
            for pid, (name, _) in {os.getpid(): ("python", 0), **names}.items():
                began, spent = times(pid)
                self._spent["java" if name == "java" else "python"][pid, began] = spent
            for pid, (name, parent) in names.items():
                kind = "java" if name == "java" else ""
                if name.startswith("python"):
                    kind = "worker" if names.get(parent, ("", 0))[0].startswith("python") else "python"
                if kind and (peak := memory_bytes(pid, "VmHWM")):
                    held = self._peaks.setdefault(kind, {})
                    held[pid] = max(held.get(pid, 0), peak)


def below(root: int) -> dict[int, tuple[str, int]]:
    """Return (name, parent) of every process below `root`, by its id."""
    processes = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (state := proc_lines(f"{path.name}/status")):
            processes[int(path.name)] = state["Name"], int(state["PPid"])
    below = {root}
    while more := {pid for pid, (_, parent) in processes.items() if parent in below} - below:
        below |= more
    return {pid: processes[pid] for pid in below if pid != root}


def times(pid: int) -> tuple[str, float]:
    """Return a process's start time and CPU seconds, or nothing if it has ended."""
    try:
        # after the name, which can contain blanks
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[19], (int(fields[11]) + int(fields[12])) / _TICKS_A_S


def proc_lines(file: str) -> dict[str, str]:
    """Return the ``name: value`` lines of a file in /proc, or nothing if the process has ended."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def memory_bytes(pid: int | str, name: str) -> int:
    """Return a number of bytes from a process's status, such as ``VmRSS``; 0 if it has ended."""
    return int(proc_lines(f"{pid}/status").get(name, "0").split()[0]) * _KIB


def disk_bytes(*paths: Path) -> int:
    """Return the disk space of files and folders.

    A file with several names counts once. A file that is deleted meanwhile counts as 0.
    """
    sizes: dict[tuple[int, int], int] = {}
    files = [Path(place, name) for path in paths for place, _, names in os.walk(path) for name in names]
    for file in (*files, *(path for path in paths if path.is_file())):
        with contextlib.suppress(FileNotFoundError):
            status = file.stat()
            sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())
