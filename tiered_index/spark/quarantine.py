"""Quarantined entries that are in the index already: what tells a source that is built again from another one. Driver only.

Quarantine windows span 68 years and are every build's, so a table in one says nothing about the next. A build's entries there are known
again by their number, first and last second, and the checksum of all their columns, whatever tables and shards they lie in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

from tiered_index.errors import InvalidArgument
from tiered_index.service.cold.path import ColdPath, ColdSettings
from tiered_index.service.log.records import LogState, StoredObject
from tiered_index.service.merge.writing import FinishedShard
from tiered_index.spark.windows import QUARANTINE_S
from tiered_index.storage.base import Storage

__all__ = ["repeated"]


def repeated(state: LogState, shards: Sequence[FinishedShard], mode: str, storage: Storage) -> tuple[str, ...]:
    """Return the names of the objects that have just the entries of a quarantine window of `shards`: `replace` removes them.

    Where an earlier build may be the same, the metadata of its objects are read. Raises `InvalidArgument` where there are such and `mode`
    is ``error``, what reading raises.
    """
    if mode == "append" or not (written := _by_build(shard.stored for shard in shards)):
        return ()
    checksums = {shard.stored.name: shard.checksum for shard in shards}
    names: list[str] = []
    earlier = _by_build(state.objects.values())
    with contextlib.closing(_cold_path(state, storage)) as cold:
        for (begin_s, _), mine in written.items():
            for (other_s, _), theirs in earlier.items():
                if other_s != begin_s or _outline(theirs) != _outline(mine) or _stored_sum(theirs, cold) != _sum(mine, checksums):
                    continue
                if mode == "error":
                    raise InvalidArgument(
                        f"the {_outline(mine)[0]:,} entries whose times can't be right, from {begin_s} (epoch seconds) on, are in the "
                        f"index already, in {theirs[0].name}: take mode append or replace"
                    )
                names += [stored.name for stored in theirs]
    return tuple(names)


def _by_build(objects: Iterable[StoredObject]) -> dict[tuple[int, int], list[StoredObject]]:
    """Return the objects of quarantine windows by (begin, time of the build)."""
    found: dict[tuple[int, int], list[StoredObject]] = {}
    for stored in objects:
        if stored.shard is not None and stored.shard.window_s == QUARANTINE_S:
            found.setdefault((stored.shard.begin_s, stored.published_ms), []).append(stored)
    return found


def _outline(objects: Sequence[StoredObject]) -> tuple[int, int, int]:
    return sum(o.count for o in objects), min(o.second_min for o in objects), max(o.second_max for o in objects)


def _sum(objects: Sequence[StoredObject], checksums: Mapping[str, int]) -> int:
    return sum(checksums[stored.name] for stored in objects) % 2**64


def _stored_sum(objects: Sequence[StoredObject], cold: ColdPath) -> int:
    return _sum(objects, {stored.name: int(cold.trailer(stored).metadata.more["checksum"], 16) for stored in objects})


def _cold_path(state: LogState, storage: Storage) -> ColdPath:
    assert state.genesis is not None
    return ColdPath(storage, keyed=state.genesis.layout.schema.keyed, settings=ColdSettings(query_threads=1, block_cache_bytes=0))
