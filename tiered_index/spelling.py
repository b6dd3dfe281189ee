"""The spelling of keys: of byte strings, as their text or ``0x`` and hexadecimal digits; and of keys with a name. Pure.

A `--key` may have a name, as in ``order=order_id``. Its keys are ``order=`` and the text, such as ``order=136``.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence

# a name, which a comparison of JMESPath (a==b) does not have
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*=(?!=)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DIGITS = re.compile(r"0x((?:[0-9A-Fa-f]{2})+)")


def key_text(data: bytes) -> str:
    """Return the spelling of bytes as a key: their text in UTF-8, or ``0x`` and hexadecimal digits.

    Digits spell bytes that are not UTF-8, and text with a control character (U+0000 to U+001F, U+007F), which nobody
    can type.
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


def is_plain(key: object) -> bool:
    """Return whether a key surely has no other spelling: a quick check for the common keys."""
    if not isinstance(key, str) or key.startswith("0x"):
        return False
    return key.isprintable() or _CONTROL.search(key) is None


def other_spellings(key: str) -> tuple[str, ...]:
    """Return up to two further keys that may stand for the bytes of `key` in an index.

    ``0x`` and digits also stand for those bytes as text, and text with a control character for its bytes in digits.
    Indexes of earlier versions have such text as keys.
    """
    spellings: list[str] = []
    if (digits := _DIGITS.fullmatch(key)) is not None:
        data = bytes.fromhex(digits[1])
        spellings = [key_text(data), data.decode(errors="replace")]
        if "\ufffd" in spellings[1] and spellings[1].encode() != data:
            spellings.pop()
    elif _CONTROL.search(key):
        spellings = [f"0x{key.encode().hex()}"]
    return tuple([spelling for spelling in dict.fromkeys(spellings) if spelling != key])


# texts of UUIDs: with hyphens or without, perhaps in braces or as a URN
_UUID = re.compile(
    r"(?:urn:uuid:)?\{?([0-9a-f]{8}(-?)[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{12})\}?", re.IGNORECASE
)
_HEX = re.compile(r"(?:0x)?((?:[0-9a-f]{2})+)", re.IGNORECASE)
_MOST_SIMILAR = 64


def similar_keys(key: str, names: Sequence[str] = ()) -> list[str]:
    """Return other keys that may be meant by a key which nothing has, the most likely ones first.

    They are other spellings of the value: another case, a UUID with or without hyphens, bytes as digits after ``0x``,
    numbers as Kafka's serializers write them, without zeros at the begin; each also with one of `names`, as of
    `split_name`, and without its own name.
    """
    bare = key.strip().strip("\"'").strip()
    name, value = split_name(bare)
    values = list(_spellings(bare))
    if name:
        values += [f"{name}{spelled}" for spelled in _spellings(value)] + list(_spellings(value))
    named = [f"{other}{text}" for text in (value, *_spellings(value)) for other in names]
    similar = dict.fromkeys([bare, *named[: len(names)], *values, *named[len(names) :]])
    return [text for text in similar if text and text != key][:_MOST_SIMILAR]


def _spellings(value: str) -> Iterator[str]:
    """Yield other spellings of a value."""
    yield from (value, value.lower(), value.upper(), "".join(value.split()), value.lstrip("0"))
    if (match := _UUID.fullmatch(value)) is not None:
        known = uuid.UUID(match[1])
        yield from (str(known), known.hex, str(known).upper(), known.hex.upper(), f"0x{known.hex}")
    if value.isascii() and value.isdecimal() and int(value) < 1 << 63:
        yield from (f"0x{int(value):0{digits}x}" for digits in (16, 8) if int(value) < 1 << (4 * digits - 1))
    if (digits := _HEX.fullmatch(value)) is not None:
        data = bytes.fromhex(digits[1])
        lower, upper = data.hex(), data.hex().upper()
        yield from (f"0x{lower}", lower, upper, key_text(data))
        if value[1] in "xX":
            yield f"0x{upper}"
        if len(data) in (4, 8):
            yield str(int.from_bytes(data, signed=True))
