"""Results as JSON documents, by one encoder for commands, service and files. Pure.

The text is printable ASCII, so that any text passes any pipe: lone surrogates and ASCII's DEL are escaped.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


def plain(value: object) -> Any:
    """Return a value that JSON has no form for as one that it has: `to_dict` or `to_json` of an object that has them,
    the fields of a dataclass, the text of a path, the hexadecimal text of bytes. Raises `TypeError` for others.
    """
    for name in ("to_dict", "to_json"):
        if (make := getattr(value, name, None)) is not None:
            return make()
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def json_text(document: object, indent: int | None = None, *, compact: bool = False) -> str:
    """Return a document as text; without `indent` it is one line, without its end; `compact`: without blanks."""
    separators = (",", ":") if compact else None
    return json.dumps(document, indent=indent, separators=separators, default=plain).replace("\x7f", "\\u007f")
