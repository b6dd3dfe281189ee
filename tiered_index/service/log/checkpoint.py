"""The checkpoint: a whole state of the log, with its objects as columns, compressed. SPEC.md section 9. Pure."""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from tiered_index.base.documents import Count, Digest, Milliseconds, checks, decoded, encoded, unpacked
from tiered_index.base.kernels import compressed
from tiered_index.format.names import DIGEST_DIGITS
from tiered_index.format.schema import read_schema
from tiered_index.service.log.columns import Columns, Table, objects_of
from tiered_index.service.log.records import (
    Common,
    IndexDescriptor,
    StoredObject,
    check_slots,
    decode_document,
    encode_document,
)
from tiered_index.service.log.replaced import RangeColumns

CHECKPOINT_VERSION = 11
_STORED_OTHERWISE = ("tables", "ranges", "range_tables")
# most bytes of a state's document
_MOST_BYTES = 1 << 31


class _Checkpoint(Struct):
    state: bytes


class _State(Common, kw_only=True):
    number: Count
    epoch: Count
    genesis: IndexDescriptor
    tables: tuple[Table, ...]
    objects: Columns
    roots: dict[str, tuple[Count, str]] = msgspec.field(default_factory=dict)
    put_before_ms: Milliseconds = 0
    expiry_ms: Milliseconds = 0
    range_tables: dict[str, RangeColumns] = msgspec.field(default_factory=dict)
    digest: Digest
    chain: Annotated[str, Meta(pattern=rf"\A([0-9a-f]{{{DIGEST_DIGITS}}})+\Z")]


def encode(state: dict[str, Any]) -> bytes:
    """Return the bytes of the checkpoint of a state's document."""
    packed = b64encode(compressed(encoded(state))).decode()
    return encode_document({"version": CHECKPOINT_VERSION, "kind": "checkpoint", "state": packed})


def decode(data: bytes, file: str) -> dict[str, Any]:
    """Return the fields of the state in a checkpoint. Raises `CorruptFile` and `UnsupportedVersion`."""
    packed = decode_document(data, file, _Checkpoint, "checkpoint", CHECKPOINT_VERSION).state
    text = unpacked(packed, _MOST_BYTES, file, "the checkpoint's state")
    stored = decoded(text, _State, file, "checkpoint", hook=read_schema)
    with checks(file, "checkpoint"):
        fields = _fields(stored, objects_of(stored.tables, stored.objects.lists()))
        return fields | {"range_tables": {store: table.read() for store, table in stored.range_tables.items()}}


def _fields(stored: _State, objects: list[StoredObject]) -> dict[str, Any]:
    """Return the fields of a state with these `objects`, and the stored ones. Raises `ValueError`."""
    if not stored.chain.endswith(stored.digest[:DIGEST_DIGITS]):
        raise ValueError("`chain` does not end with the digest of the last record")
    by_name = {stored_object.name: stored_object for stored_object in objects}
    if len(by_name) != len(objects):
        raise ValueError("An object occurs twice")
    for stored_object in objects:
        check_slots(stored_object, stored.genesis, "checkpoint")
    fields = {name: value for name, value in stored.members().items() if name not in _STORED_OTHERWISE}
    lost = {gone.name: gone for gone in stored.lost}
    catalogs = {catalog.name: catalog for catalog in stored.catalogs}
    if len(catalogs) != len(stored.catalogs):
        raise ValueError("A catalog occurs twice")
    ranges = {table.name: table for table in stored.ranges}
    if len({table.store for table in stored.ranges}) != len(stored.ranges) or len(ranges) != len(stored.ranges):
        raise ValueError("A table of ranges occurs twice")
    if any(table.store not in fields["expired"].replaced.stores for table in stored.ranges):
        raise ValueError("A table of ranges is of a store that has none")
    return {**fields, "range_objects": ranges, "objects": by_name, "lost": lost, "catalogs": catalogs}
