"""`hash_key` as SQL, for engines that read what the index's keys join with. Pure text; SPEC.md section 5 says what it computes.

All of it goes over UTF-16 code units: an astral character counts as its two surrogates.
"""

from __future__ import annotations

from tiered_index.errors import InvalidArgument

__all__ = ["hash_key_sql"]

_DUCKDB = """\
CREATE OR REPLACE MACRO hash_key(topic, key) AS
  CASE WHEN topic IS NULL OR key IS NULL THEN NULL ELSE
    list_reduce(
      list_append(
        list_prepend(0::BIGINT, list_transform(regexp_extract_all(topic || '#' || key, '(?s).'), lambda c: unicode(c)::BIGINT)),
        -1::BIGINT
      ),
      lambda h, c: CASE
        WHEN c < 0 THEN CASE WHEN h < 2147483648 THEN h WHEN h = 2147483648 THEN 0 ELSE 4294967296 - h END
        WHEN c < 65536 THEN (h * 31 + c) & 4294967295
        ELSE ((h * 31 + 55296 + ((c - 65536) >> 10)) * 31 + 56320 + ((c - 65536) & 1023)) & 4294967295
      END
    )::INTEGER
  END"""
# the last element, -1, turns the sum into its absolute value, so that the fold stands in the text once

_SPARK = """\
CREATE OR REPLACE TEMPORARY FUNCTION hash_key(topic STRING, key STRING) RETURNS INT RETURN
  aggregate(
    regexp_extract_all(hex(encode(concat(topic, '#', key), 'UTF-16BE')), '(.{4})', 1),
    0L,
    (h, u) -> (h * 31 + cast(conv(u, 16, 10) AS BIGINT)) & 4294967295,
    h -> cast(CASE WHEN h < 2147483648 THEN h WHEN h = 2147483648 THEN 0 ELSE 4294967296 - h END AS INT)
  )"""
_TEXTS = {"duckdb": _DUCKDB, "spark": _SPARK}


def hash_key_sql(dialect: str) -> str:
    """Return a statement that makes `hash_key(topic, key)` a function of ``duckdb`` (1.3 or later) or ``spark`` (4.0 or later).

    Its value is that of `tiered_index.hash_key`; null where either is null. Raises `InvalidArgument` for another dialect.
    """
    if dialect not in _TEXTS:
        raise InvalidArgument(f"hash_key is written for {', '.join(sorted(_TEXTS))}, not for {dialect!r}")
    return _TEXTS[dialect]
