"""JSON whose numbers keep the text that they were written with. Pure.

Parsers make doubles of decimals: 12345678901234567.25 and ….75 become one number, 10.50 becomes 10.5. A key must keep
them apart.
"""

from __future__ import annotations

import json
from typing import Any


class WrittenFloat(float):
    """A decimal number and its text."""

    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        number = super().__new__(cls, text)
        number.text = text
        return number


class WrittenZero(int):
    """The integer -0 and its text."""

    text = "-0"


# JMESPath knows the types of numbers by their names
WrittenFloat.__name__, WrittenZero.__name__ = "float", "int"


def _integer(text: str) -> int:
    return WrittenZero() if text == "-0" else int(text)


def loads(data: bytes | str) -> Any:
    """Return a JSON document; decimals are `WrittenFloat`, and -0 is `WrittenZero`. Raises as `json.loads`."""
    return json.loads(data, parse_float=WrittenFloat, parse_int=_integer)


def number_text(number: float) -> str:
    """Return a number, true or false of JSON as it was written; one of no document as `json.dumps` does."""
    return number.text if isinstance(number, WrittenFloat | WrittenZero) else json.dumps(number)
