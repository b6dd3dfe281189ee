"""The options of a data source, checked: names in any case, one value each, an unknown one is an error that names those there are. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tiered_index.errors import InvalidArgument

__all__ = ["Options"]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_BYTES = re.compile(r"([0-9]{1,15})\s*([kmg]?)i?b?")


class Options:
    """What a user gave to the source `name`. Raises `InvalidArgument` for an unknown option, `path` missing or given twice."""

    def __init__(self, name: str, given: Mapping[str, str], known: Sequence[str]) -> None:
        self._name = name
        self._given = {option.lower(): value for option, value in given.items()}
        places = {option.lower(): option for option in known}
        if "paths" in self._given:
            raise InvalidArgument(f"{name}: one path is read at a time; load each and take the union")
        if unknown := [option for option in self._given if option not in places and option != "path"]:
            raise InvalidArgument(f"{name}: unknown option {unknown[0]!r}; the options are {', '.join(['path', *known])}")
        if not self._given.get("path", "").strip():
            raise InvalidArgument(f"{name}: no path is given: load(URI), or the option path")
        self.path = self._given["path"].strip()

    def text(self, option: str) -> str | None:
        """Return an option as it was given, None where it wasn't."""
        return self._given.get(option.lower())

    def number(self, option: str) -> int | None:
        """Return an integer, None where it wasn't given."""
        value = self.text(option)
        try:
            return None if value is None else int(value)
        except ValueError as error:
            raise InvalidArgument(f"{self._name}: option {option} is an integer, not {value!r}") from error

    def size(self, option: str) -> int | None:
        """Return bytes, at least 1, given as a number or like ``64m``; None where it wasn't given."""
        value = self.text(option)
        if value is None:
            return None
        found = _BYTES.fullmatch(value.strip().lower())
        if found is None or not int(found[1]):
            raise InvalidArgument(f"{self._name}: option {option} is a number of bytes like 67108864 or 64m, not {value!r}")
        return int(found[1]) * _UNITS[found[2]]

    def choice(self, option: str, choices: Sequence[str]) -> str:
        """Return one of `choices`, the first where it wasn't given."""
        value = (self.text(option) or choices[0]).strip().lower()
        if value not in choices:
            raise InvalidArgument(f"{self._name}: option {option} is {' or '.join(choices)}, not {value!r}")
        return value
