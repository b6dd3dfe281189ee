"""The descriptors, mappings and engine threads that this process has open for a folder. It reads /proc, so it needs
Linux.
"""

import contextlib
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

_others: set[threading.Thread] = set()


def begin_census() -> None:
    """From here on, leave out the threads of earlier tests, which those tests check."""
    _others.clear()
    _others.update(_threads())


def engine_threads() -> list[threading.Thread]:
    """Return the engine's running threads that began after `begin_census`."""
    return [thread for thread in _threads() if thread not in _others and thread.is_alive()]


def _threads() -> list[threading.Thread]:
    names = ((thread, thread.name) for thread in threading.enumerate())
    # one thread of the process makes listings that have a deadline, for all storages
    return [thread for thread, name in names if name.startswith("tiered-index") and name != "tiered-index-lists"]


@dataclass(frozen=True)
class Census:
    """`descriptors` counts those of the whole process, `below` those of files below the folder, deleted ones too."""

    descriptors: int
    below: int
    mappings: int
    threads: int


def census(folder: Path, *, collect: bool = True) -> Census:
    """Count; `collect` first frees objects that only reference cycles keep."""
    if collect:
        gc.collect()
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            targets.append(str(Path(f"/proc/self/fd/{name}").readlink()))
    prefix = f"{folder}/"
    mappings = sum(prefix in line for line in Path("/proc/self/maps").read_text().splitlines())
    below = sum(target.startswith(prefix) for target in targets)
    return Census(len(targets), below, mappings, len(engine_threads()))
