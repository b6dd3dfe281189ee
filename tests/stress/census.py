"""What this process holds open of a folder: descriptors, mappings, threads of the engine. From /proc, so Linux only."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Census", "census"]


@dataclass(frozen=True)
class Census:
    """`descriptors` counts the whole process's, `below` those of files below the folder, deleted ones too."""

    descriptors: int
    below: int
    mappings: int
    threads: int


def census(folder: Path, *, collect: bool = True) -> Census:
    """Count; `collect` first frees what only reference cycles keep."""
    if collect:
        gc.collect()
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            targets.append(str(Path(f"/proc/self/fd/{name}").readlink()))
    prefix = f"{folder}/"
    mappings = sum(prefix in line for line in Path("/proc/self/maps").read_text().splitlines())
    engine = [thread for thread in threading.enumerate() if thread.name.startswith("tiered-index")]
    return Census(len(targets), sum(target.startswith(prefix) for target in targets), mappings, len(engine))
