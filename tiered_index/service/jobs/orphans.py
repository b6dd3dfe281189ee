"""Finds and deletes orphans: objects that the log does not name, left by crashes or replaced by merges. Threads: any.

A new object may be published soon, and a reader may still use an object that was just merged. So nothing younger than
`older_than_s` is an orphan, and no object that was removed since (see `publication.MAX_AGE_S`). Foreign objects are
reported and kept.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from tiered_index.errors import DiskFull, InvalidArgument, ObjectNotFound, StorageError
from tiered_index.format.names import (
    CATALOG_PREFIX,
    CHECKPOINT_PREFIX,
    DATA_PREFIX,
    EPOCH_PREFIX,
    LEASE_PREFIX,
    LOG_PREFIX,
    RANGES_PREFIX,
    SEGMENTS_PREFIX,
)
from tiered_index.service.jobs.segments.catalogs import names_removed_by
from tiered_index.service.log.log import StorageLog, own_objects
from tiered_index.service.log.publication import MAX_AGE_S
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.segments import names_object
from tiered_index.storage.base import PROBE_PREFIX, ObjectInfo, Storage

Item = TypeVar("Item")
_AT_ONCE = 1000
_log = logging.getLogger(__name__)
_LISTED = (DATA_PREFIX, SEGMENTS_PREFIX, CATALOG_PREFIX, RANGES_PREFIX, PROBE_PREFIX)
_KEPT = (LOG_PREFIX, CHECKPOINT_PREFIX, EPOCH_PREFIX, LEASE_PREFIX)
MIN_AGE_S = 3600.0
"""The least `older_than_s`: an upload takes less time."""
UNNAMED_S = MAX_AGE_S + 3600.0
"""The time after which no job or writer publishes an object that no record names."""


@dataclass(frozen=True, slots=True)
class Orphans:
    """Objects that may be deleted, and `foreign` objects of any age, which are kept."""

    objects: tuple[ObjectInfo, ...]
    log: StorageLog
    foreign: tuple[ObjectInfo, ...] = ()
    # half-made uploads of killed processes that are older are dropped with them, by the storage's clock
    before_ms: int = 0

    @property
    def size_bytes(self) -> int:
        """The bytes of the objects."""
        return sum(info.size_bytes for info in self.objects)


def find_orphans(
    storage: Storage,
    log: StorageLog,
    *,
    older_than_s: float = 86400.0,
    removed_s: float | None = None,
    beat: Callable[[], object] = lambda: None,
) -> Orphans:
    """Return objects that the log does not name and that are older than `older_than_s`.

    Objects that records removed `removed_s` ago are included (None: `older_than_s` ago). Ages are by the storage's
    clock, because hosts' clocks differ. `beat` is called again and again meanwhile. Raises `InvalidArgument`, the
    errors of the storage, and `StorageBehind` if two histories are mixed.
    """
    if not older_than_s >= MIN_AGE_S:
        raise InvalidArgument(
            f"older_than_s must be at least 1h ({MIN_AGE_S:.0f} s), not {older_than_s!r} s: an upload may still run"
        )
    now_ms = storage.now_ms()
    before_ms = now_ms - round(older_than_s * 1000)
    foreign: list[ObjectInfo] = []

    def own(prefix: str) -> Iterator[ObjectInfo]:
        return _beating(own_objects(storage, prefix, foreign=foreign.append), beat)

    for prefix in _KEPT:
        deque(own(prefix), 0)
    # a writer goes on beside another history, but deletes nothing of it
    before = log.refresh()
    log.check_unmixed(again=True)
    listed = unnamed(log, (own(prefix) for prefix in _LISTED), before)
    state, is_named = log.state, names_object(storage)
    recent = _beating(log.numbers_since(state.number, before_ms), beat)
    removed = {number: names_removed_by(log, log.record(number)) for number in recent}
    over: set[str] = set()
    if removed_s is not None and removed_s < older_than_s:
        since_ms = now_ms - round(removed_s * 1000)
        young = set(log.numbers_since(state.number, since_ms)) if removed_s else set()
        over = {name for number in removed.keys() - young for name in removed.pop(number)}
    listed += _infos(storage, _beating([name for name in sorted(over) if is_named(before, name)], beat))
    listed = [info for info in listed if info.modified_ms < before_ms or info.name in over]
    young_removed = {name for names in removed.values() for name in names}
    orphaned, strange = (
        tuple(i for i in infos if i.name not in young_removed and not is_named(state, i.name))
        for infos in (listed, foreign)
    )
    return Orphans(orphaned, log, strange, before_ms)


def unnamed(
    log: StorageLog, listings: Iterable[Iterable[ObjectInfo]], earlier: LogState | None = None
) -> list[ObjectInfo]:
    """Return the objects of `listings` that the log does not name when they have been read: `log.state` is its state.

    What the state `earlier` names is dropped at once, so that memory does not grow with it. Raises the errors of the
    storage, and `CorruptFile` for a damaged catalog, which may name any segment.
    """
    is_named = names_object(log.storage)
    infos = [info for infos in listings for info in infos if earlier is None or not is_named(earlier, info.name)]
    # the log after the listing, so that objects that are published meanwhile are known
    state = log.refresh()
    return [info for info in infos if not is_named(state, info.name)]


def delete_orphans(storage: Storage, orphans: Orphans, beat: Callable[[], object] = lambda: None) -> Orphans:
    """Delete the orphans that still no record names. Return them. Raises the errors of the storage.

    `beat` is called again and again meanwhile.
    """
    deleted: list[ObjectInfo] = []
    for start in _beating(range(0, len(orphans.objects), _AT_ONCE), beat):
        batch = orphans.objects[start : start + _AT_ONCE]
        orphans.log.refresh()
        # a server may end a listing early: what an unlisted record names must not be deleted
        state, is_named = orphans.log.refresh(by_number=True), names_object(storage)
        gone = [info for info in batch if not is_named(state, info.name)]
        storage.delete_many([info.name for info in gone])
        deleted += gone
    # no listing shows half-made uploads and bytes of deleted objects
    try:
        storage.purge(orphans.before_ms)
    except (StorageError, DiskFull) as error:
        _log.warning("half-made uploads of killed processes stay; the next sweep tries again: %s", error)
    return replace(orphans, objects=tuple(deleted))


def sweep(
    storage: Storage, log: StorageLog, grace_s: float, *, delete: bool = True, beat: Callable[[], object] = lambda: None
) -> Orphans:
    """Find objects removed `grace_s` ago, and orphans older than a day and `grace_s`. `delete`: delete them.

    `beat` is called again and again meanwhile.
    """
    # even with a short grace, a job may publish an object that it uploaded hours ago
    orphans = find_orphans(storage, log, older_than_s=max(grace_s, UNNAMED_S), removed_s=grace_s, beat=beat)
    return delete_orphans(storage, orphans, beat) if delete else orphans


def _beating(items: Iterable[Item], beat: Callable[[], object]) -> Iterator[Item]:
    """Yield the items. Call `beat` before each, and at the end."""
    for item in items:
        beat()
        yield item
    beat()


def _infos(storage: Storage, names: Iterable[str]) -> list[ObjectInfo]:
    """Return the descriptions of the objects that the storage has: a request each."""
    infos = []
    for name in names:
        with contextlib.suppress(ObjectNotFound):
            infos.append(storage.head(name))
    return infos
