"""What can be no range of any object, whatever the backend. Pure."""

from __future__ import annotations

from tiered_index.errors import InvalidArgument

__all__ = ["check_range", "check_suffix"]


def check_range(start: int, length: int) -> None:
    """Raise `InvalidArgument` for a range that no object can have."""
    if start < 0 or length < 0:
        raise InvalidArgument(f"a range has no negative numbers: {start}, {length}")


def check_suffix(length: int) -> None:
    """Raise `InvalidArgument` for a suffix that no object can have."""
    if length < 0:
        raise InvalidArgument(f"a suffix's length is not negative: {length}")
