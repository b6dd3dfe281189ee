"""Conversion of settings and of parameters of requests to their declared types, by msgspec. Pure; any thread.

Numbers and truths may be text. An error is a sentence in plain words, without the value, which may be a secret.
"""

from __future__ import annotations

import contextlib
import functools
import re
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from tiered_index.base.documents import Hook, typed

_TRUTHS = {
    **dict.fromkeys(("true", "1", "yes", "on", "t", "y"), True),
    **dict.fromkeys(("false", "0", "no", "off", "f", "n"), False),
}
_WORDS = {
    "array": "a list",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "object": "a table",
    "str": "text",
    "<": "less than",
    "<=": "at most",
    ">": "greater than",
    ">=": "at least",
}
_EXPECTED = re.compile(r"Expected `(\w+)[^`]*`(?:(?P<length> of length)? (?P<sign>[<>]=?) (?P<bound>[^\s,]+))?")


@functools.cache
def kinds(record: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the declared type of each field of a class, with its bounds."""
    return get_type_hints(record, include_extras=True)


def members_of(kind: Any) -> list[Any]:
    """Return the types and the `Literal`s of a union, without bounds."""
    if get_origin(kind) is Annotated:
        return members_of(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [member for member_kind in get_args(kind) for member in members_of(member_kind)]
    return [kind]


def converted(value: Any, kind: Any, hook: Hook = None) -> Any:
    """Return a value with its declared type, and in its bounds. `hook` is that of `typed`.

    Raises `ValueError` with a sentence about the value.
    """
    members = members_of(kind)
    if isinstance(value, bool) and bool not in members:
        raise ValueError(f"must not be {str(value).lower()}")
    try:
        return typed(of_text(value, members), kind, hook)
    except msgspec.ValidationError as error:
        choices = [repr(choice) for member in members if get_origin(member) is Literal for choice in get_args(member)]
        if choices:
            raise ValueError(f"must be one of {', '.join(choices[:-1])} or {choices[-1]}") from error
        raise ValueError(sentence_of(str(error))) from error


def of_text(value: Any, members: list[Any]) -> Any:
    """Return the number or truth of a text, if one of `members` is its type; another value as it is."""
    if bool in members:
        return _TRUTHS.get(str(value).strip().lower(), value)
    with contextlib.suppress(ValueError, OverflowError):
        if int in members and (isinstance(value, str) or (isinstance(value, float) and value.is_integer())):
            return int(value)
        if float in members and isinstance(value, str):
            return float(value)
    return value


def sentence_of(problem: str) -> str:
    """Return a sentence in place of a message of msgspec about a value. Other messages stay."""
    if problem.startswith("Number out of range"):
        return "must be a number of 64 bits"
    expected = _EXPECTED.match(problem)
    if expected is None:
        return problem.removesuffix(".")
    if expected["length"]:
        is_empty = expected["sign"] == ">="
        return "must not be empty" if is_empty else f"must have at most {int(expected['bound']):,} characters"
    if expected["sign"]:
        return f"must be {_WORDS[expected['sign']]} {float(expected['bound']):.15g}"
    return f"must be {_WORDS.get(expected[1], expected[1])}"
