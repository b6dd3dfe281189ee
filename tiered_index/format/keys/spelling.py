"""The form of keys: of byte strings, as their text or ``0x`` and hexadecimal digits; and of keys with a name. Pure.

A source makes the form of its bytes once, when it reads them. A text that a caller gives is a key as it is: lookups and
erasures search no other form of it.

A `--key` may have a name, as in ``order=order_id``. Its keys are ``order=`` and the text, such as ``order=136``.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence

# a name, which a comparison of JMESPath (a==b) does not have
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*=(?!=)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def key_text(data: bytes) -> str:
    """Return the form of bytes as a key: their text in UTF-8, or ``0x`` and hexadecimal digits.

    Digits stand for bytes that are not UTF-8, and for text with a control character (U+0000 to U+001F, U+007F), which
    nobody can type. Different bytes have different keys, except the text of such digits.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"0x{data.hex()}"
    return f"0x{data.hex()}" if _CONTROL.search(text) else text


def split_name(key_option: str) -> tuple[str, str]:
    """Return the name of a `--key` as its keys begin with it, ``NAME=``, and the rest; no name is an empty text."""
    match = _NAME.match(key_option)
    end = 0 if match is None else match.end()
    return key_option[:end], key_option[end:]


def named_key(name: str, text: str) -> str:
    """Return the key of a text, after a name as of `split_name`. An empty text is no key, so it stays empty."""
    return name + text if text else text


# texts of UUIDs: with hyphens or without, perhaps in braces or as a URN
_UUID = re.compile(
    r"(?:urn:uuid:)?\{?([0-9a-f]{8}(-?)[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{12})\}?", re.IGNORECASE
)
_HEX = re.compile(r"(?:0x)?((?:[0-9a-f]{2})+)", re.IGNORECASE)
_MOST_SIMILAR = 64
# such a text has no more UTF-16 code units than a key may have
_LONGEST = (1 << 14) - 1


def similar_keys(key: str, names: Sequence[str] = ()) -> list[str]:
    """Return other keys that may be meant by a key which nothing has, the most likely ones first.

    They are the digits of its text or the text of its digits, and other forms of the value: another case, a UUID with
    or without hyphens, bytes as digits after ``0x``, numbers as serializers of logs write them, without zeros at the
    begin; each also with one of `names`, as of `split_name`, and without its own name.
    """
    bare = key.strip().strip("\"'").strip()
    name, value = split_name(bare)
    values = list(_forms(bare))
    if name:
        values += [f"{name}{form}" for form in _forms(value)] + list(_forms(value))
    named = [f"{other}{text}" for text in (value, *_forms(value)) for other in names]
    similar = dict.fromkeys([bare, *_of_bytes(key), *named[: len(names)], *values, *named[len(names) :]])
    return [text for text in similar if 0 < len(text) <= _LONGEST and text != key][:_MOST_SIMILAR]


def _of_bytes(key: str) -> Iterator[str]:
    """Yield the keys that other sources make of a key's bytes: of text its digits, of digits their text."""
    name, value = split_name(key)
    yield f"{name}0x{value.encode().hex()}"
    if value.startswith("0x") and (digits := _HEX.fullmatch(value)) is not None:
        # RocketMQ's keys are text, whatever their bytes are
        yield name + bytes.fromhex(digits[1]).decode(errors="replace")


def _forms(value: str) -> Iterator[str]:
    """Yield other forms of a value."""
    yield from (value, value.lower(), value.upper(), "".join(value.split()), value.lstrip("0"))
    if (match := _UUID.fullmatch(value)) is not None:
        known = uuid.UUID(match[1])
        yield from (str(known), known.hex, str(known).upper(), known.hex.upper(), key_text(known.bytes))
    # Python makes no numbers of thousands of digits
    if len(value) < 64 and value.isascii() and value.isdecimal() and int(value) < 1 << 63:
        yield from (f"0x{int(value):0{digits}x}" for digits in (16, 8) if int(value) < 1 << (4 * digits - 1))
    if (digits := _HEX.fullmatch(value)) is not None:
        data = bytes.fromhex(digits[1])
        lower, upper = data.hex(), data.hex().upper()
        yield from (f"0x{lower}", lower, upper, key_text(data))
        if value[1] in "xX":
            yield f"0x{upper}"
        if len(data) == 16:
            yield str(uuid.UUID(bytes=data))
        if len(data) in (4, 8):
            yield str(int.from_bytes(data, signed=True))
