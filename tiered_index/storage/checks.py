"""What holds of names, ranges and parts in every backend. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from tiered_index.errors import InvalidArgument
from tiered_index.storage.base import MAX_NAME_BYTES, MAX_PARTS, NAME, PartInfo

_NAME = re.compile(NAME)
_PREFIX = re.compile(r"[A-Za-z0-9._=+@/-]*")


def check_name(name: str) -> str:
    """Return `name` if it is a valid object name, else raise `InvalidArgument`."""
    if len(name) > MAX_NAME_BYTES or not _NAME.fullmatch(name):
        raise InvalidArgument(f"not a valid object name: {name[:80]!r}")
    return name


def check_prefix(*prefixes: str) -> None:
    """Raise `InvalidArgument` unless object names can start with each of `prefixes`."""
    for prefix in prefixes:
        if len(prefix) > MAX_NAME_BYTES or not _PREFIX.fullmatch(prefix) or ".." in prefix.split("/"):
            raise InvalidArgument(f"not a valid prefix: {prefix[:80]!r}")


def check_part(number: int) -> int:
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
        check_part(part.number)
    return ordered


def check_range(start: int, length: int) -> None:
    """Raise `InvalidArgument` for a range that no object can have."""
    if start < 0 or length < 0:
        raise InvalidArgument(f"a range has no negative numbers: {start}, {length}")


def check_suffix(length: int) -> None:
    """Raise `InvalidArgument` for a suffix that no object can have."""
    if length < 0:
        raise InvalidArgument(f"a suffix's length is not negative: {length}")
