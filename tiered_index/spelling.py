"""The spelling of byte strings as keys: their text, or ``0x`` and hexadecimal digits. Pure."""

from __future__ import annotations

import re

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
