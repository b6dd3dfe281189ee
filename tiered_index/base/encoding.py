"""The JSON encoder of commands, the HTTP service and files. Pure.

The output is printable ASCII, which every pipe and terminal accepts: lone surrogates and DEL are escaped.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

JSON, NDJSON, ARROW = "application/json", "application/x-ndjson", "application/vnd.apache.arrow.stream"
STATUS = b"tiered_index.status"
"""Key of the status document in the metadata of the last batch of an Arrow stream over HTTP."""
COLUMNS = "tiered-index-columns"
"""Header of HTTP answers with entries: JSON of their class's name, and of its columns beside those of `IndexItem`."""
# Bound of a decompressed body unless the caller says otherwise: 128 MiB, 32 times the broker's default bound of a
# message.
MAX_BODY_BYTES = 1 << 27
BodyFormat = Literal["text", "json", "hex", "excerpt", "none"]
# Most levels of a body that is shown as JSON: an encoder needs a part of Python's stack for each
_MOST_LEVELS = 500
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
# Characters of an excerpt, and bytes of one in hexadecimal digits.
_EXCERPT, _EXCERPT_BYTES = 200, 32
# Bytes of a body that an excerpt needs
EXCERPT_OF_BYTES = 4 * _EXCERPT


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


def json_text(document: object, indent: int | None = None, *, compact: bool = False, allow_nan: bool = False) -> str:
    """Return a document as JSON text: indented by `indent`, or one line without a newline. `compact` omits blanks.

    NaN and infinite numbers become null, as over HTTP. With `allow_nan` they stay; only some readers accept that.
    """
    how: Any = {"indent": indent, "separators": (",", ":") if compact else None}
    try:
        text = json.dumps(document, default=plain, allow_nan=allow_nan, **how)
    except ValueError:
        # only here, because a search for such numbers takes longer than encoding
        text = json.dumps(json.loads(json.dumps(document, default=plain), parse_constant=lambda _: None), **how)
    return text.replace("\x7f", "\\u007f")


def json_line(text: str) -> str:
    """Return a text as one line of JSON: a JSON document with its numbers as they are written, or a JSON string."""
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json_text(text)
    # outside of its strings, a document has no control character but tabs and line ends
    return _UNPRINTABLE.sub(lambda c: " " if c[0] in "\t\r\n" else json_text(c[0])[1:-1], text.strip())


def show_bytes(data: bytes, wanted: BodyFormat) -> dict[str, Any]:
    """Return the bytes of a message as ``body`` and ``body_format``.

    Bytes that are no JSON, or JSON of more than 500 levels, are shown as text, and bytes that are no text as
    hexadecimal digits. "excerpt" gives the beginning alone, "none" neither.
    """
    if wanted == "none":
        return {}
    if wanted == "json":
        # otherwise, shown as text
        with contextlib.suppress(ValueError, RecursionError):
            body = json.loads(data, parse_constant=_no_constant, parse_float=_finite)
            if data.count(b"[") + data.count(b"{") <= _MOST_LEVELS or not _is_deep(body):
                return {"body": body, "body_format": "json"}
    if wanted == "excerpt":
        begin = data[:EXCERPT_OF_BYTES]
        if b"\0" not in begin:
            with contextlib.suppress(UnicodeDecodeError):
                # a character may be cut at the end
                text = codecs.getincrementaldecoder("utf-8")().decode(begin)
                return {"body": text[:_EXCERPT], "body_format": "text"}
        data = data[:_EXCERPT_BYTES]
    if wanted != "hex" and b"\0" not in data:
        try:
            return {"body": data.decode(), "body_format": "text"}
        except UnicodeDecodeError:
            pass  # shown as digits
    return {"body": data.hex(), "body_format": "hex"}


def _is_deep(body: Any) -> bool:
    level = [body]
    for _ in range(_MOST_LEVELS):
        inner = (
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        )
        level = list(itertools.chain.from_iterable(inner))
    return any(isinstance(value, dict | list) for value in level)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError("a number is too large for a double")
    return value
