"""Columns: entries on their way into a file, hashed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from tiered_index.format.hashing import CodeUnits, hash_batch
from tiered_index.format.schema import Schema

__all__ = ["Columns", "hash_columns"]

Columns = dict[str, npt.NDArray[Any]]
"""Native-order columns of equal length: `second`, `key_hash`, `topic_id`, `queue_id`, `offset`, `size`, and the schema's extra ones."""


def hash_columns(topics: Sequence[str], topic_index: npt.NDArray[Any], keys: CodeUnits, schema: Schema) -> Columns:
    """Return `key_hash` and, for a keyed schema, `fingerprint` of n rows; arguments as `hash_batch`."""
    hashes, fingerprints = hash_batch(topics, topic_index, keys, fingerprints=schema.keyed)
    return {"key_hash": hashes, "fingerprint": fingerprints} if schema.keyed else {"key_hash": hashes}
