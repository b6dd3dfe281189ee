"""The hash of a key as an SQL function, for joins. Pure."""

from __future__ import annotations

from typing import Literal

from tiered_index.errors import InvalidArgument
from tiered_index.format.keys.hashing import known_rule

# The appended element -1 makes the last step of the fold apply the hash rule, so that the fold is written only once
_DUCKDB = """\
CREATE OR REPLACE MACRO hash_key(topic, key) AS
  CASE WHEN topic IS NULL OR key IS NULL THEN NULL ELSE
    list_reduce(
      list_append(
        list_prepend(
          0::BIGINT,
          list_transform(regexp_extract_all(topic || '#' || key, '(?s).'), lambda c: unicode(c)::BIGINT)
        ),
        -1::BIGINT
      ),
      lambda h, c: CASE
        WHEN c < 0 THEN {rule}
        WHEN c < 65536 THEN (h * 31 + c) & 4294967295
        ELSE ((h * 31 + 55296 + ((c - 65536) >> 10)) * 31 + 56320 + ((c - 65536) & 1023)) & 4294967295
      END
    )::INTEGER
  END"""

_SPARK = """\
CREATE OR REPLACE TEMPORARY FUNCTION hash_key(topic STRING, key STRING) RETURNS INT RETURN
  aggregate(
    regexp_extract_all(hex(encode(concat(topic, '#', key), 'UTF-16BE')), '(.{4})', 1),
    0L,
    (h, u) -> (h * 31 + cast(conv(u, 16, 10) AS BIGINT)) & 4294967295,
    h -> cast({rule} AS INT)
  )"""
_TEXTS = {"duckdb": _DUCKDB, "spark": _SPARK}
_RULES = {
    "abs": "CASE WHEN h < 2147483648 THEN h WHEN h = 2147483648 THEN 0 ELSE 4294967296 - h END",
    "mask": "h & 2147483647",
}


def hash_key_sql(dialect: str, rule: Literal["abs", "mask"] = "abs") -> str:
    """Return a SQL statement that defines the function `hash_key(topic, key)` in `dialect`.

    Dialects: ``duckdb`` (1.3 or later), ``spark`` (4.0 or later). The function returns the same value as
    `tiered_index.hash_key` with `rule`, or null if an argument is null. Raises `InvalidArgument` for another dialect or
    rule.
    """
    if dialect not in _TEXTS:
        raise InvalidArgument(f"hash_key_sql supports {', '.join(sorted(_TEXTS))}, not {dialect!r}")
    return _TEXTS[dialect].replace("{rule}", _RULES[known_rule(rule)])
