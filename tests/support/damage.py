"""Changed bits in bytes, files and objects, and the check that finds them."""

from pathlib import Path
from typing import Any

from tiered_index.service.jobs.verify import check_storage
from tiered_index.service.jobs.verify_report import Report
from tiered_index.storage.base import Storage
from tiered_index.types import no_progress


def flipped(data: bytes, at: int, bits: int = 1) -> bytes:
    """Return the bytes with some bits of one of them changed."""
    changed = bytearray(data)
    changed[at] ^= bits
    return bytes(changed)


def flip(path: Path, at: int) -> None:
    """Change a bit of a file."""
    path.write_bytes(flipped(path.read_bytes(), at))


def flip_object(storage: Storage, name: str, at: int) -> None:
    """Change a bit of an object."""
    storage.put(name, flipped(storage.get(name), at))


def checked(storage: Storage, *, deep: bool = True, **how: Any) -> Report:
    """Return what a check of a storage finds."""
    report = Report()
    check_storage(storage, {}, report, no_progress, deep=deep, threads=1, **how)
    return report
