"""Checks of stored JSON documents: the type and the range of each field, before the field is used.

A `Check` is a function that takes a JSON value and returns the parsed value, or raises `Malformed`. `record` builds
the check of a document from the checks of its fields, and `fields_of` finds these in the annotations of a dataclass. A
number must be an integer, not a boolean or a float. Unknown fields are ignored. Pure; any thread. (pydantic can't
replace this: it refuses lone surrogates, which topics and sources may have.)
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn, TypeVar, get_type_hints

from tiered_index.errors import ConfigError, CorruptFile

T = TypeVar("T")
Check = Callable[[Any], T]
_SHOWN = 80
_DEPTH = 32


class Malformed(ValueError):
    """A value of the wrong kind; `place` is its path from the document's top."""

    def __init__(self, expected: str, value: object, place: str = "") -> None:
        super().__init__(f"{place or 'document'} is {shown(value)}, not {expected}")
        self.expected, self.value, self.place = expected, value, place

    def below(self, step: str) -> Malformed:
        """Return the same error with `step` in front of its path."""
        return Malformed(self.expected, self.value, step + self.place)


@dataclass(frozen=True, slots=True)
class Optional:
    """A field that may be missing; it then has the value `default`."""

    check: Check[Any]
    default: Any


def shown(value: object) -> str:
    """Return a short text of any value, for a message. It never raises."""
    if isinstance(value, str):
        return repr(value[:_SHOWN])
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'document'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:_SHOWN]


def load(data: bytes | memoryview, file: str, what: str) -> Any:
    """Parse the JSON document in `data`. Raises `CorruptFile` if it is not JSON."""
    try:
        return json.loads(bytes(data))
    # ValueError also for bytes that are not UTF-8 and for numbers of thousands of digits
    except (ValueError, RecursionError) as error:
        raise CorruptFile(file, f"{what} is not a valid document: {error}") from error


def checked(check: Check[T], document: Any, file: str, what: str, *, offset: int | None = None) -> T:
    """Return the result of `check` for a document.

    Raises `CorruptFile` naming the file and the field, if this version can't have written the document.
    """
    try:
        return check(document)
    except Malformed as error:
        raise CorruptFile(
            file,
            f"{what} is invalid: {error.place or 'the document'}",
            offset=offset,
            expected=error.expected,
            found=shown(error.value),
        ) from error
    # an impossible layout, schema or slot map
    except ConfigError as error:
        raise CorruptFile(file, f"{what} is invalid: {error}", offset=offset) from error


def integer(low: int, high: int) -> Check[int]:
    """Return the check of an integer from `low` to `high`, inclusive."""

    def check(value: Any) -> int:
        if value.__class__ is int and low <= value <= high:
            return value
        raise Malformed(f"an integer from {low} to {high}", value)

    return check


# Counts, sequences, epochs, log numbers, positions
COUNT = integer(0, 2**63 - 1)
# Bytes of a file or object, or a position in it: at most 16 TiB, more than the largest object of any storage
SIZE = integer(0, 2**44)
CRC32 = integer(0, 2**32 - 1)
# Epoch seconds, or a number of seconds: sums and products with these fit 63 bits
SECONDS = integer(-(2**42), 2**42)
MILLISECONDS = integer(-(2**52), 2**52)


def text(pattern: str | None = None) -> Check[str]:
    """Return the check of text. If a `pattern` is given, the whole text must match it."""
    matches = re.compile(pattern).fullmatch if pattern is not None else None

    def check(value: Any) -> str:
        if value.__class__ is str and (matches is None or matches(value)):
            return value
        raise Malformed(f"text like {pattern}" if pattern else "text", value)

    return check


def flag(value: Any) -> bool:
    """Check that a value is true or false."""
    if value.__class__ is bool:
        return value
    raise Malformed("true or false", value)


def nullable(check: Check[T]) -> Check[T | None]:
    """Return the check of a value that is null or passes `check`."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check[T]) -> Check[tuple[T, ...]]:
    """Return the check of a list whose members pass `check`; it returns a tuple."""

    def checks(value: Any) -> tuple[T, ...]:
        if value.__class__ is not list:
            raise Malformed("a list", value)
        try:
            return tuple(map(check, value))
        except (Malformed, ConfigError):
            _find(((f"[{at}]", check, member) for at, member in enumerate(value)))

    return checks


def tuple_of(*checks: Check[Any]) -> Check[tuple[Any, ...]]:
    """Return the check of a list of exactly these members, each with its own check."""

    def check(value: Any) -> tuple[Any, ...]:
        if value.__class__ is not list or len(value) != len(checks):
            raise Malformed(f"a list of {len(checks)}", value)
        return tuple(one(member) for one, member in zip(checks, value, strict=True))

    return check


def rows_of(*members: Check[Any]) -> Check[tuple[tuple[Any, ...], ...]]:
    """Return the check of a list of lists of exactly these members, fast for long lists.

    A member's check must accept all values between two accepted ones, as `integer` and `text` without pattern do.
    """
    one_by_one = list_of(tuple_of(*members))

    def check(value: Any) -> tuple[tuple[Any, ...], ...]:
        if value.__class__ is list and set(map(type, value)) == {list} and set(map(len, value)) == {len(members)}:
            columns = list(zip(*value, strict=True))
            if all(len(set(map(type, column))) == 1 for column in columns):
                with contextlib.suppress(Malformed):
                    for one, column in zip(members, columns, strict=True):
                        one(column[0])
                        one(min(column))
                        one(max(column))
                    return tuple(map(tuple, value))
        return one_by_one(value)

    return check


def map_of(check: Check[T]) -> Check[dict[str, T]]:
    """Return the check of a document with any keys, whose values pass `check`."""

    def checks(value: Any) -> dict[str, T]:
        if value.__class__ is not dict:
            raise Malformed("a document", value)
        try:
            return {key: check(member) for key, member in value.items()}
        except (Malformed, ConfigError):
            _find(((f".{shown(key)}", check, member) for key, member in value.items()))

    return checks


def record(make: Callable[..., T], /, **fields: Check[Any] | Optional) -> Check[T]:
    """Return the check of a document. The check calls `make` with the checked `fields` by name, and returns its result.

    `make` may raise `Malformed` and `ConfigError`.
    """
    required = tuple((name, check) for name, check in fields.items() if not isinstance(check, Optional))
    optional = tuple((name, check) for name, check in fields.items() if isinstance(check, Optional))

    def check(value: Any) -> T:
        if value.__class__ is not dict:
            raise Malformed("a document", value)
        try:
            values = {name: one(value[name]) for name, one in required}
            for name, one in optional:
                values[name] = one.check(value[name]) if name in value else one.default
        except (KeyError, Malformed, ConfigError):
            for name, _ in required:
                if name not in value:
                    raise Malformed(f"a document with {name}", value) from None
            _find(
                (f".{n}", c.check if isinstance(c, Optional) else c, value[n]) for n, c in fields.items() if n in value
            )
        return make(**values)

    return check


def fields_of(cls: Any) -> dict[str, Any]:
    """Return the checks of the fields of a dataclass that are `Annotated` with a check. Defaults make them optional."""
    hints = get_type_hints(cls, include_extras=True)
    found: dict[str, Any] = {}
    for one in fields(cls):
        for check in getattr(hints[one.name], "__metadata__", ()):
            default = one.default if one.default_factory is MISSING else one.default_factory()
            found[one.name] = check if default is MISSING else Optional(check, default)
    return found


def shallow(value: Any, depth: int = _DEPTH) -> Any:
    """Check that a value of any kind is nested at most `depth` times, so that it can be encoded again."""
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if members and not depth:
        raise Malformed(f"nested at most {_DEPTH} times", value)
    for member in members:
        shallow(member, depth - 1)
    return value


def _find(members: Any) -> NoReturn:
    """Raise the error of the first of (step, check, value) that fails, with its path.

    Called only after a check failed, so that valid documents need no paths.
    """
    for step, check, value in members:
        try:
            check(value)
        except Malformed as error:
            raise error.below(step) from None
    raise AssertionError("a check accepted a value that it had refused")
