"""The forms of a checkpoint: the present one, and those of earlier versions, which are only read. SPEC.md section 9.

Pure. A checkpoint has a whole state, with its objects as columns. It is compressed, and has a version of its own, so
that earlier versions refuse it by name.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Protocol, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tiered_index.errors import CorruptFile
from tiered_index.format.names import DIGEST_DIGITS
from tiered_index.kernels import compressed
from tiered_index.replaced import RangeColumns
from tiered_index.service.log.columns import COLUMNS, Columns, Table, objects_of
from tiered_index.service.log.records import (
    ArchivedSegment,
    Common,
    IndexDescriptor,
    StoredObject,
    check_slots,
    json_text,
    sealed_text,
    verified_text,
)
from tiered_index.stored import Count, Digest, Milliseconds, checks, decoded, unpacked

VERSION, _CATALOGS_VERSION, _NEWEST_VERSION = 7, 8, 9
"""The version of checkpoints, that of those with catalogs, also lost ones, and that of those with
replaced ranges or lost ranges of one key. Earlier versions wrote 1 to 6.
"""
_STORED_OTHERWISE = ("tables", "since", "hide", "ranges", "range_tables")
# most bytes of a state's document
_MOST_BYTES = 1 << 31


class _Members(Common, kw_only=True):
    """The fields of a state that all forms have."""

    number: Count
    epoch: Count
    genesis: IndexDescriptor
    roots: dict[str, tuple[Count, str]] = msgspec.field(default_factory=dict)
    put_before_ms: Milliseconds = 0
    expiry_ms: Milliseconds = 0
    digest: Digest = ""
    chain: Annotated[str, Meta(pattern=rf"\A([0-9a-f]{{{DIGEST_DIGITS}}})*\Z")] = ""


class _Checkpoint(Struct):
    state: bytes


class _State(_Members, kw_only=True):
    tables: tuple[Table, ...]
    objects: Columns
    range_tables: dict[str, RangeColumns] = msgspec.field(default_factory=dict)


if TYPE_CHECKING:
    Row = tuple[Any, ...]
else:
    # a value of each column
    # of all but the last one, `generation`
    _KINDS = list(get_type_hints(Columns, include_extras=True).values())[:-1]
    Row = tuple[tuple(get_args(kind)[0] for kind in _KINDS)]


class _Since(Struct):
    """The base of a checkpoint with changes, and the names of removed objects and segments."""

    number: Count
    digest: Digest
    removed: tuple[str, ...]


class _Earlier(_Members, kw_only=True):
    """The forms of earlier versions.

    With `tables`, the objects are rows instead of documents. With `since`, it has only the changes since another one.
    """

    objects: tuple[StoredObject | Row, ...]
    tables: tuple[Table, ...] | UnsetType = UNSET
    since: _Since | UnsetType = UNSET


class Base(Protocol):
    """The state in the checkpoint that has what `_Earlier.since` lacks."""

    @property
    def number(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def objects(self) -> Mapping[str, StoredObject]: ...
    @property
    def archive(self) -> Mapping[str, ArchivedSegment]: ...


def encode(state: dict[str, Any]) -> bytes:
    """Return the bytes of the checkpoint of a state's document."""
    try:
        text = msgspec.json.encode(state)
    except UnicodeEncodeError:
        # half a surrogate pair in a name, which earlier versions took
        text = json_text(state).encode()
    packed = b64encode(compressed(text)).decode()
    has_catalogs = state.get("catalogs") or _has_lost_catalog(state)
    version = _CATALOGS_VERSION if has_catalogs else VERSION
    has_key = any("key" in lost.get("range", ()) for lost in state.get("lost", ()))
    if has_key or state.get("ranges") or "replaced" in state.get("expired", {}):
        version = _NEWEST_VERSION
    return sealed_text(json_text({"version": version, "kind": "checkpoint", "state": packed}))


def _has_lost_catalog(state: dict[str, Any]) -> bool:
    return any((lost.get("range") or {}).get("kind") == "catalog" for lost in state.get("lost", ()))


def decode(data: bytes, file: str, base: Base | None) -> dict[str, Any]:
    """Return the fields of the state in a checkpoint of any version.

    `base` is the state of the checkpoint to which an earlier version's one has the changes. Raises `CorruptFile`.
    """
    text, version = verified_text(data, file, _NEWEST_VERSION)
    if version < VERSION:
        earlier = decoded(text, _Earlier, file, "checkpoint")
        with checks(file, "checkpoint"):
            return _earlier_fields(earlier, file, base)
    state = unpacked(decoded(text, _Checkpoint, file, "checkpoint").state, _MOST_BYTES, file, "the checkpoint's state")
    stored = decoded(state, _State, file, "checkpoint")
    with checks(file, "checkpoint"):
        fields = _fields(stored, objects_of(stored.tables, stored.objects.lists()), {}, {})
        return fields | {"range_tables": {store: table.read() for store, table in stored.range_tables.items()}}


def _earlier_fields(stored: _Earlier, file: str, base: Base | None) -> dict[str, Any]:
    if any(isinstance(stored_object, StoredObject) is (stored.tables is not UNSET) for stored_object in stored.objects):
        raise ValueError("`objects` are neither all documents nor all rows")
    objects: list[Any] = list(stored.objects)
    if stored.tables is not UNSET:
        columns = list(zip(*objects, strict=True)) or [()] * (len(COLUMNS) - 1)
        objects = objects_of(stored.tables, [*columns, [0] * len(objects)])
    if stored.since is UNSET:
        return _fields(stored, objects, {}, {})
    since = stored.since
    if base is None or (since.number, since.digest) != (base.number, base.digest):
        raise CorruptFile(file, "the checkpoint's base is another state", expected=since.number)
    before, segments = dict(base.objects), dict(base.archive)
    for name in since.removed:
        if before.pop(name, None) is None and segments.pop(name, None) is None:
            raise ValueError("`since` removes an object that was not there")
    return _fields(stored, objects, before, segments)


def _fields(
    stored: _Members, added: list[StoredObject], objects: dict[str, StoredObject], archive: dict[str, ArchivedSegment]
) -> dict[str, Any]:
    """Return the fields of a state with these `objects` and segments, and the stored ones. Raises `ValueError`."""
    last = stored.digest[:DIGEST_DIGITS]
    if stored.chain and not (last and stored.chain.endswith(last)):
        raise ValueError("`chain` does not end with the digest of the last record")
    names = len(objects) + len(added), len(archive) + len(stored.archive)
    objects.update((stored_object.name, stored_object) for stored_object in added)
    archive.update((segment.name, segment) for segment in stored.archive)
    if (len(objects), len({segment.place for segment in archive.values()})) != names:
        raise ValueError("An object or segment occurs twice")
    for stored_object in added:
        check_slots(stored_object, stored.genesis, "checkpoint")
    fields = {name: value for name, value in stored.members().items() if name not in _STORED_OTHERWISE}
    lost = {gone.name: gone for gone in stored.lost}
    catalogs, hidden = (
        {catalog.name: catalog for catalog in stored.catalogs},
        {segment.name: segment for segment in stored.hide},
    )
    if (len(catalogs), len(hidden)) != (len(stored.catalogs), len(stored.hide)):
        raise ValueError("A catalog or hidden segment occurs twice")
    if any(segment.catalog not in catalogs for segment in hidden.values()):
        raise ValueError("A hidden segment is of a catalog that is not there")
    ranges = {table.name: table for table in stored.ranges}
    if len({table.store for table in stored.ranges}) != len(stored.ranges) or len(ranges) != len(stored.ranges):
        raise ValueError("A table of ranges occurs twice")
    if any(table.store not in fields["expired"].replaced.stores for table in stored.ranges):
        raise ValueError("A table of ranges is of a store that has none")
    named = {"range_objects": ranges, "objects": objects, "archive": archive, "lost": lost}
    return {**fields, "chain": stored.chain or last, **named, "catalogs": catalogs, "hidden": hidden}
