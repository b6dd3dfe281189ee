"""Declares options: the fields of a dataclass, from which commands make their flags. Imports no library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiered_index.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Declared:
    """An option of a command line.

    - `default`: the value if it is not given.
    - `param_decls`: its flags; none: one flag, made from the name of the field.
    - `rules`: its help and bounds, such as `help`, `metavar` and `min`.
    """

    default: Any
    param_decls: tuple[str, ...]
    rules: Mapping[str, Any]


def declare(default: Any = None, *flags: str, **rules: Any) -> Any:
    """Declare an option as a field of a group: a dataclass of options."""
    return field(default=default, metadata={"option": Declared(default, flags, rules)})


def pairs(flag: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Return ``name=value`` options as a dict. Raises `InvalidArgument`, which names the flag."""
    values: dict[str, str] = {}
    for text in texts or ():
        name, mark, value = text.partition("=")
        # without the value, which may be a secret
        if not mark or not name or not value:
            raise InvalidArgument(f"{flag} {name!r}: write {flag} NAME=VALUE")
        if name in values:
            raise InvalidArgument(f"{flag} gives {name!r} twice: give it once")
        values[name] = value
    return values
