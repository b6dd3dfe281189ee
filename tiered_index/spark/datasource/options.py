"""The checked options of a data source."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pyspark.sql.datasource import InputPartition

from tiered_index.errors import InvalidArgument
from tiered_index.spark.versions import DRIVER_VERSION, DriverVersion

T = TypeVar("T")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_BYTES = re.compile(r"([0-9]{1,15})\s*([kmg]?)i?b?")


def _bytes_of(text: str) -> int:
    size = _BYTES.fullmatch(text.strip().lower())
    if size is None or not int(size[1]):
        raise ValueError(text)
    return int(size[1]) * _UNITS[size[2]]


class DataSourceOptions:
    """The user's options for the source `name`. Raises `InvalidArgument` for unknown options, no or several paths."""

    def __init__(
        self, name: str, texts: Mapping[str, str], known: Sequence[str], uses: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """`known` are the options that count here; `uses` all those of the source, by their use."""
        self._name = name
        self._texts = {option.lower(): value for option, value in texts.items()}
        places = {option.lower(): option for option in known}
        if "paths" in self._texts:
            raise InvalidArgument(f"{name}: one path is read at a time; load each and take the union")
        if "owner" in self._texts:
            raise InvalidArgument(
                f"{name}: CREATE TABLE ... USING {name} can't be read, since Spark's catalog gives a Python data "
                f"source no path of a table: use CREATE TEMPORARY VIEW entries USING {name} OPTIONS (path 'URI')"
            )
        if unknown := [option for option in self._texts if option not in places and option != "path"]:
            there = ", ".join(["path", *known])
            for use, names in (uses or {}).items():
                if others := [option for option in names if option not in known]:
                    there += f"; of {use} {', '.join(others)}"
            raise InvalidArgument(f"{name}: unknown option {', '.join(map(repr, unknown))}; the options are {there}")
        if not self._texts.get("path", "").strip():
            raise InvalidArgument(
                f"{name}: no path is given: use load(URI), save(URI) or the option path; CREATE TABLE ... AS and "
                "saveAsTable pass no path"
            )
        self.path = self._texts["path"].strip()

    def text(self, option: str) -> str | None:
        """Return an option's text, None if it is not set."""
        return self._texts.get(option.lower())

    def number(self, option: str) -> int | None:
        """Return an option as an integer, None if it is not set."""
        return self._parsed(option, int, "an integer")

    def numbers(self, option: str) -> tuple[int, ...] | None:
        """Return an option as integers, which are separated by commas, None if it is not set."""
        return self._parsed(option, lambda value: tuple(map(int, value.split(","))), "integers like 0,3")

    def size(self, option: str) -> int | None:
        """Return an option's number of bytes (at least 1, as a number or like ``64m``), None if it is not set."""
        return self._parsed(option, _bytes_of, "a number of bytes like 67108864 or 64m")

    def _parsed(self, option: str, parse: Callable[[str], T], like: str) -> T | None:
        value = self.text(option)
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise InvalidArgument(f"{self._name}: option {option} is {like}, not {value!r}") from error

    def choice(self, option: str, choices: Sequence[str]) -> str:
        """Return an option's value, one of `choices`, the first one if it is not set."""
        value = (self.text(option) or choices[0]).strip().lower()
        if value not in choices:
            raise InvalidArgument(f"{self._name}: option {option} is {' or '.join(choices)}, not {value!r}")
        return value


@dataclass
class TaskPartition(InputPartition):
    """The part of a read for one task, a `Stretch` or a `TaskPlan`, and the version of the driver that planned it."""

    value: Any
    version: DriverVersion = DRIVER_VERSION
