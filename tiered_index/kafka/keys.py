"""Extracts the keys of records: the record's key, headers, fields of its value, or the results of a function.

Threads: any thread may call `of`; only one may call `take`, which counts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from tiered_index.errors import ConfigError, InvalidArgument, install_hint
from tiered_index.kafka.record import KafkaRecord, key_text
from tiered_index.types import MAX_KEY_UNITS

try:
    import jmespath
except ModuleNotFoundError:  # the extra is not installed
    jmespath = cast("Any", None)

KeyFunction = Callable[[KafkaRecord], Iterable[str]]
NAMED = 10
FUNCTION = "function"
"""In place of the rules of an index or a file whose keys a function gave."""


def _texts(found: Any) -> Iterator[str]:
    """Yield the keys of a JSON value: a text, a number, true or false as JSON, each element of an array."""
    # no recursion: arrays may be nested deeper than the stack of Python
    left = [found]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += reversed(each)
        elif isinstance(each, str):
            yield each
        elif each is not None and not isinstance(each, dict):
            yield json.dumps(each)


def _is_usable(key: str) -> bool:
    try:
        return 0 < len(key.encode("utf-16-le")) // 2 <= MAX_KEY_UNITS
    except UnicodeEncodeError:  # half a character, which JSON can have
        return False


@dataclass
class Keys:
    """Extracts keys from records, by `--key` (``key``, ``header:NAME``, ``json:JMESPATH``) or by a function.

    Empty keys and keys of more than 32,767 UTF-16 code units are skipped. `without_key` counts records without a key,
    `no_json` records whose value should be JSON and is not. `no_json_first` has the places of the first of these.
    """

    given: Sequence[str] = ("key",)
    function: KeyFunction | None = None
    without_key: int = 0
    no_json: int = 0
    no_json_first: list[str] = field(default_factory=list)
    # False: the rules of an index or a file, where one may find no key
    are_new: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        self._headers, self._paths = [], []
        self._by_key = False
        if self.function is not None:
            self.given = (FUNCTION,)
            return
        for text in self.given:
            kind, _, name = text.partition(":")
            if text == "key":
                self._by_key = True
            elif kind == "header" and name:
                self._headers.append(name)
            elif kind == "json" and name:
                self._paths.append(self._compiled(name, check=self.are_new))
            else:
                raise InvalidArgument(f"--key {text}: give key, header:NAME or json:PATH, such as json:order.id")

    @classmethod
    def by_rules(cls, told: Iterable[str]) -> Self:
        """Return the extraction by the rules of an index and its files, without that of a function."""
        return cls(tuple({*told} - {FUNCTION}) or ("key",), are_new=False)

    @staticmethod
    def _compiled(path: str, *, check: bool) -> Any:
        if jmespath is None:
            raise ConfigError(f"--key json: needs the extra 'kafka' (jmespath is missing): {install_hint('kafka')}")
        try:
            found = jmespath.compile(path)
            nodes = [found.parsed] if check else []
            while nodes:
                node = nodes.pop()
                nodes += [child for child in node["children"] if isinstance(child, dict)]
                if node["type"] == "function_expression":
                    # else an unknown function, or a wrong number of arguments, is an error of each record
                    with contextlib.suppress(jmespath.exceptions.JMESPathTypeError):
                        jmespath.functions.Functions().call_function(node["value"], [None] * len(node["children"]))
        except jmespath.exceptions.JMESPathError as error:
            raise InvalidArgument(
                f"--key json:{path} can't be read as JMESPath: {str(error).splitlines()[0]}"
            ) from error
        return found

    @property
    def only_key(self) -> bool:
        """Whether the record's key is its only key in the index."""
        return self._by_key and not self._headers and not self._paths

    def take(self, record: KafkaRecord) -> list[str]:
        """Return the keys of a record as `of` does, and count missing keys and invalid JSON."""
        damaged: list[str] = []
        if not (keys := self.of(record, damaged)):
            self.without_key += 1
        self.no_json += len(damaged)
        self.no_json_first += damaged[: NAMED - len(self.no_json_first)]
        return keys

    def of(self, record: KafkaRecord, damaged: list[str] | None = None) -> list[str]:
        """Return the distinct keys of a record. Adds its place to `damaged` if its value should be JSON and is not."""
        found = self.function(record) if self.function is not None else self._of_parts(record, damaged)
        return [key for key in dict.fromkeys(found) if _is_usable(key)]

    def _of_parts(self, record: KafkaRecord, damaged: list[str] | None) -> Iterator[str]:
        if self._by_key and record.key is not None:
            yield key_text(record.key)
        for name in self._headers:
            yield from (key_text(value) for header, value in record.headers if header == name and value is not None)
        if self._paths and record.value is not None:
            try:
                document = json.loads(record.value)
            except (ValueError, RecursionError):
                if damaged is not None:
                    damaged.append(f"{record.topic}/{record.partition}/{record.offset}")
                return
            for path in self._paths:
                try:
                    found = list(_texts(path.search(document)))
                except (jmespath.exceptions.JMESPathError, TypeError, ValueError, ArithmeticError, RecursionError):
                    # the path does not accept this value, in jmespath's own checks or not: the record lacks this key
                    continue
                yield from found
