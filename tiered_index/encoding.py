"""The JSON encoder of commands, the HTTP service and files. Pure.

The output is printable ASCII, which every pipe and terminal accepts: lone surrogates and DEL are escaped.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


def plain(value: object) -> Any:
    """Return a JSON-ready form of a value that `json` can't encode.

    - an object with `to_dict` or `to_json`: the result of that method
    - a dataclass: its fields
    - a path: its text
    - bytes: hexadecimal text

    Raises `TypeError` for other values.
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
    """Return a document as JSON text: indented by `indent`, or one line without a newline. `compact` omits blanks."""
    separators = (",", ":") if compact else None
    return json.dumps(document, indent=indent, separators=separators, default=plain).replace("\x7f", "\\u007f")
