"""Rules for the parts of a multipart upload that hold in every backend. Pure functions, any thread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tiered_index.errors import InvalidArgument
from tiered_index.storage.base import PartInfo

__all__ = ["MAX_PARTS", "check_part_number", "check_parts"]

MAX_PARTS = 10_000
"""Part numbers run from 1 to this; Amazon S3's bound, kept everywhere so that code moves between backends."""


def check_part_number(number: int) -> int:
    """Return `number` if it may number a part, else raise `InvalidArgument`."""
    if not 1 <= number <= MAX_PARTS:
        raise InvalidArgument(f"a part's number is from 1 to {MAX_PARTS:,}, not {number}")
    return number


def check_parts(name: str, parts: Sequence[PartInfo], min_part_bytes: int) -> list[PartInfo]:
    """Return `parts` in order of number; raise `InvalidArgument` for none, a repeated number, or one too small."""
    if not parts:
        raise InvalidArgument(f"an upload of {name!r} can't be completed with no parts")
    ordered = sorted(parts, key=lambda part: part.number)
    for part, following in pairwise(ordered):
        if part.number == following.number:
            raise InvalidArgument(f"part {part.number} of {name!r} is named twice")
        if part.size_bytes < min_part_bytes:
            raise InvalidArgument(
                f"part {part.number} of {name!r} has {part.size_bytes} bytes; all but the last need {min_part_bytes}"
            )
    for part in ordered:
        check_part_number(part.number)
    return ordered
