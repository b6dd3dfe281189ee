"""Changed bits in bytes, files and objects."""

from __future__ import annotations

from pathlib import Path

from tiered_index.storage.base import Storage


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
