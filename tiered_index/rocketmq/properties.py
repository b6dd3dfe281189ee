"""A message's properties, its keys and its tags code, as RocketMQ's `MessageDecoder` and `IndexService` understand them. Pure.

Properties are `name 0x01 value 0x02 name 0x01 value 0x02 ...`; the last 0x02 may be missing. A piece without name, separator or value
is ignored; of two pieces of one name the last counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from tiered_index.format.hashing import java_string_hash

__all__ = [
    "KEYS",
    "NAME_END",
    "TAGS",
    "UNIQ_KEY",
    "VALUE_END",
    "delay_of_level_ms",
    "format_properties",
    "index_keys",
    "java_text",
    "parse_properties",
    "tags_code",
]

NAME_END = "\x01"
VALUE_END = "\x02"
KEYS = "KEYS"
UNIQ_KEY = "UNIQ_KEY"
TAGS = "TAGS"

_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")
_DELAY_LEVELS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
_SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"


def java_text(data: bytes) -> str:
    """Return `new String(data, UTF_8)`: bytes that are no UTF-8 become U+FFFD, so keys of them hash as they do in the broker."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        # Java replaces an encoded surrogate, cut short or not, as one character, Python as three
        return _SURROGATE.sub(b"\xef\xbf\xbd", data).decode(errors="replace")


def parse_properties(text: str) -> dict[str, str]:
    """Return names and values in order of first appearance (`MessageDecoder.string2messageProperties`)."""
    properties: dict[str, str] = {}
    for piece in text.split(VALUE_END):
        name, separator, value = piece.partition(NAME_END)
        if separator and name and value:
            properties[name] = value
    return properties


def format_properties(properties: Mapping[str, str]) -> str:
    """Return the stored text, each value ended (`MessageDecoder.messageProperties2String`)."""
    return "".join(f"{name}{NAME_END}{value}{VALUE_END}" for name, value in properties.items())


def index_keys(properties: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys a message is indexed under: unique key, then KEYS split on spaces; empty ones skipped, each once."""
    keys = properties.get(KEYS, "").split(" ")
    return tuple(dict.fromkeys(key for key in (properties.get(UNIQ_KEY, ""), *keys) if key))


def delay_of_level_ms(level: int) -> int:
    """Return the delay of a level of the broker's default table, which has 18 levels; higher ones count as the last, others as none."""
    return 1000 * _DELAY_LEVELS_S[min(level, len(_DELAY_LEVELS_S)) - 1] if level > 0 else 0


def tags_code(topic: str, properties: Mapping[str, str], store_ms: int) -> int:
    """Return the consume queue's tags code: the hash of the tags; for delayed messages waiting their turn, the time of delivery (ms)."""
    if topic == _SCHEDULE_TOPIC and (level := properties.get("DELAY", "")).isdecimal() and int(level) > 0:
        return store_ms + delay_of_level_ms(int(level))
    return _hash_of_tags(properties.get(TAGS, ""))


_hash_of_tags = lru_cache(maxsize=4_096)(java_string_hash)
