"""The state after the log's records, and their replay. Pure. SPEC.md section 9."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from msgspec import structs

from tiered_index.errors import CorruptFile
from tiered_index.format.names import DIGEST_DIGITS
from tiered_index.format.segments.catalog import LogRows
from tiered_index.format.topic_documents import Documents, newest_documents
from tiered_index.service.log import checkpoint
from tiered_index.service.log.columns import columns_of
from tiered_index.service.log.expired import NOTHING, Expired
from tiered_index.service.log.identity import check_follows
from tiered_index.service.log.reads import read_before_ms, reads_in
from tiered_index.service.log.records import (
    QUARANTINE_S,
    IndexDescriptor,
    LogRecord,
    LostObject,
    LostRange,
    RetiredPlaces,
    StoredCatalog,
    StoredObject,
    StoredRanges,
    StreamBatch,
    check_slots,
    documents_member,
    expired_member,
    max_positions,
    optional_members,
    retired_member,
)
from tiered_index.service.log.replaced import NO_RANGES, RangeTable
from tiered_index.service.log.topic_keys import unread_in
from tiered_index.types import TopicBounds

# most digests of records in a state: more than there are records between the checkpoints that a storage keeps
CHAINED = 320
# most steps in a state, and most files and tables in all of them
_STEPS, _MOST_CHANGED = 64, 10_000


def _newest(
    known: tuple[int | None, int | None], more: Iterable[StoredObject | LostObject]
) -> tuple[int | None, int | None]:
    """Return the last seconds outside the quarantine and in it, of those `known` and of `more`; None: there is none."""
    seconds_by_lane: tuple[list[int], list[int]] = ([], [])
    for second, seconds in zip(known, seconds_by_lane, strict=True):
        seconds.extend([] if second is None else [second])
    for stored in more:
        if isinstance(stored, LostObject) and stored.range is not None:
            continue  # nothing of it was published
        in_window = stored.shard is not None and stored.shard.window_s >= QUARANTINE_S
        # the lane of a lost file is not known
        in_lane = stored.lane == "quarantine" if isinstance(stored, StoredObject) else stored.shard is None
        seconds_by_lane[in_window or in_lane].append(stored.second_max)
    main, quarantine = seconds_by_lane
    return max(main, default=None), max(quarantine, default=None)


class Step(NamedTuple):
    """One replay of records: number and digest of the state before, and the ids of changed files and tables."""

    number: int
    digest: str
    changed: frozenset[str]


@dataclass(frozen=True)
class LogState:
    """The state at one position of the log. Immutable, so a reader can keep using an earlier one."""

    number: int = 0
    epoch: int = 0
    genesis: IndexDescriptor | None = None
    objects: dict[str, StoredObject] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    documents: Documents = field(default_factory=dict)
    """The newest document of each topic that a connector wrote."""
    batches: dict[str, StreamBatch] = field(default_factory=dict)
    lost: dict[str, LostObject] = field(default_factory=dict)
    expired: Expired = NOTHING
    roots: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Number and attempt of the newest record of each root's writer, by the root's id."""
    put_before_ms: int = 0
    """The greatest `put_before_ms` of the records; 0: none says it."""
    expiry_ms: int = 0
    """The latest present time of the expiries, epoch milliseconds; 0: there was none."""
    catalogs: dict[str, StoredCatalog] = field(default_factory=dict)
    """The catalogs, by name, in the order of their records. Ask `read/segments.py` for segments."""
    retired: RetiredPlaces = field(default_factory=dict)
    """The segments in catalogs that are replaced or given up."""
    range_objects: dict[str, StoredRanges] = field(default_factory=dict)
    """The objects that have the retired ranges of a store, by name. They also are in `expired`."""
    range_tables: dict[str, RangeTable] = field(default_factory=dict, compare=False, repr=False)
    """The tables in them, by store. A state of a checkpoint lacks them until `range_objects.py` has read them."""
    digest: str = field(default="", compare=False)
    """The digest of record `number`; empty without a record."""
    chain: str = field(default="", compare=False)
    """The first `DIGEST_DIGITS` of the digests of up to `CHAINED` newest records, the newest last."""
    steps: tuple[Step, ...] = field(default=(), compare=False, repr=False)
    """The steps from earlier states to this one, the last step last."""

    def changed_since(self, earlier: LogState) -> frozenset[str] | None:
        """Return the ids of the files and tables that changed since an earlier state.

        None: not known, for example for a state of another history.
        """
        if not earlier.digest:
            return None
        begins = [(step.number, step.digest) for step in self.steps]
        begin = earlier.number, earlier.digest
        if begin not in begins:
            return frozenset() if begin == (self.number, self.digest) else None
        return frozenset().union(*(step.changed for step in self.steps[begins.index(begin) :]))

    def digest_at(self, number: int) -> str:
        """Return the first digits of record `number`'s digest; empty: not in this state."""
        at = len(self.chain) - DIGEST_DIGITS * (self.number - number + 1)
        return self.chain[at : at + DIGEST_DIGITS] if at >= 0 else ""

    def apply(self, record: LogRecord, file: str) -> LogState:
        """Return the state after the next record. Raises `CorruptFile` if the record contradicts this state."""
        return self.replayed([(record, file)])

    def replayed(self, records: Iterable[tuple[LogRecord, str]]) -> LogState:
        """Return the state after `records`, each with its name. Raises the errors of `apply`."""
        replay = LogReplay(self)
        for added, file in records:
            replay.add(added, file)
        return replay.state()

    def names(self, name: str) -> bool:
        """Return whether the log itself names object `name`, so that nobody may delete it.

        Catalogs name others: ask `read/segments.py`.
        """
        named = self.objects, self.catalogs, self.range_objects
        return any(name in objects for objects in named)

    def object_of(self, file_id: str) -> StoredObject | None:
        """Return the object of file `file_id`; None: there is none."""
        return self.files.get(file_id)

    @cached_property
    def generation(self) -> int:
        """The greatest generation of catalogs and retired segments."""
        retired = [max(of.values(), default=0) for of in self.retired.values()]
        return max(retired + [stored.generation or 0 for stored in self.catalogs.values()], default=0)

    @property
    def inline(self) -> list[StoredCatalog]:
        """The catalogs that are no objects, in the order of their records."""
        return [stored for stored in self.catalogs.values() if stored.data is not None]

    def retired_in(self, stored: StoredCatalog) -> Iterator[tuple[str, int]]:
        """Yield the places of retired segments that a catalog may list, and then does not show."""
        for log in stored.rows.logs:
            for start, generation in self.retired.get(log.store, {}).items():
                if log.start <= start < log.end and stored.is_before(generation):
                    yield log.store, start

    @property
    def newest_ms(self) -> int | None:
        """The time of the newest published entry; None: there is none.

        In epoch milliseconds, by whole seconds. Quarantine and lost files count only if there is nothing else: one
        wrong clock would otherwise hide for years that nothing is published.
        """
        main, quarantine = self._newest_s
        second = quarantine if main is None else main
        return None if second is None else second * 1000

    @property
    def as_of_ms(self) -> int | None:
        """The time up to which answers are complete: `newest_ms`, but no later than `put_before_ms`.

        Producers choose the times of entries. One fast clock does not make answers complete up to the future. The time
        is in whole seconds.
        """
        newest_ms = self.newest_ms
        if newest_ms is None or not self.put_before_ms:
            return newest_ms
        return min(newest_ms, self.put_before_ms // 1000 * 1000)

    @cached_property
    def reads(self) -> dict[str, int]:
        """The positions that say how much of topics was read."""
        return reads_in(self.positions)

    @cached_property
    def lacking(self) -> dict[str, LostObject]:
        """What answers lack, by name: `lost`, and the messages that are not read yet for a new key."""
        return self.lacking_with({})

    def lacking_with(self, reads: dict[str, int]) -> dict[str, LostObject]:
        """Return `lacking` for an answer that has all entries up to further positions, a result of `reads_in`."""
        unread = unread_in(max_positions(self.reads, reads))
        return self.lost | unread if unread else self.lost

    @cached_property
    def bounds(self) -> TopicBounds | None:
        """The bounds of `as_of_ms` by topic; None: there are none."""
        times = read_before_ms(self.reads)
        return TopicBounds(times, self.as_of_ms) if times else None

    @cached_property
    def _newest_s(self) -> tuple[int | None, int | None]:
        """The last second of files and tables outside the quarantine, and in it; None: there are none."""
        return _newest((None, None), [*self.objects.values(), *self.lost.values()])

    @cached_property
    def files(self) -> dict[str, StoredObject]:
        """The objects that are files of their own, by file id."""
        return {o.file_id: o for o in self.objects.values() if o.shard is None}

    @cached_property
    def tables(self) -> dict[str, list[StoredObject]]:
        """The shards of each window table, by the table's id."""
        tables: dict[str, list[StoredObject]] = {}
        for stored in self.objects.values():
            if stored.shard is not None:
                tables.setdefault(stored.shard.table, []).append(stored)
        return tables

    @cached_property
    def listed_logs(self) -> dict[str, list[tuple[StoredCatalog, LogRows]]]:
        """The catalogs that have segments of each store, by their first offset, with what they say of it."""
        logs: dict[str, list[tuple[StoredCatalog, LogRows]]] = {}
        for stored in self.catalogs.values():
            for log in stored.rows.logs:
                logs.setdefault(log.store, []).append((stored, log))
        for parts in logs.values():
            parts.sort(key=lambda part: part[1].start)
        return logs

    @cached_property
    def given_up(self) -> dict[str, list[LostRange]]:
        """The ranges of catalogs that were given up, by store, in order of the records."""
        ranges: dict[str, list[LostRange]] = {}
        for lost in self.lost.values():
            if lost.range is not None and lost.is_of_catalog:
                ranges.setdefault(lost.range.source, []).append(lost.range)
        return ranges

    def encode(self, *, whole: bool = False) -> bytes:
        """Return the bytes of this state's checkpoint. `whole`: with the tables in `range_objects`, too."""
        tables = {store: table.to_json() for store, table in self.range_tables.items()} if whole else {}
        return checkpoint.encode(
            {
                "number": self.number,
                "epoch": self.epoch,
                "genesis": self.genesis.to_json() if self.genesis else None,
                **columns_of(self.objects.values()),
                "positions": self.positions,
                **optional_members(
                    self.batches, self.lost.values(), self.catalogs.values(), self.range_objects.values()
                ),
                **documents_member(self.documents),
                **retired_member(self.retired),
                **expired_member(self.expired, self.range_tables),
                **({"range_tables": tables} if tables else {}),
                **({"roots": {root: list(mark) for root, mark in self.roots.items()}} if self.roots else {}),
                **({"put_before_ms": self.put_before_ms} if self.put_before_ms else {}),
                **({"expiry_ms": self.expiry_ms} if self.expiry_ms else {}),
                "digest": self.digest,
                "chain": self.chain,
            }
        )

    @classmethod
    def decode(cls, data: bytes, file: str) -> LogState:
        """Return the state in a checkpoint. Raises `CorruptFile` and `UnsupportedVersion`.

        It may lack replaced ranges that are in objects (`range_objects.py`).
        """
        return cls(**checkpoint.decode(data, file)).completed()

    def completed(self) -> LogState:
        """Return this state with the ranges of `range_tables` among all others."""
        if not self.range_tables:
            return self
        replaced = self.expired.replaced.completed(self.range_tables)
        return replace(self, expired=structs.replace(self.expired, replaced=replaced))


def _with_catalogs(before: LogState, record: LogRecord, file: str) -> tuple[dict[str, StoredCatalog], RetiredPlaces]:
    """Return catalogs and retired segments of a state after a record. Raises `CorruptFile`, also for an overlap."""
    if not (record.catalogs or record.retire or record.copied or before.catalogs.keys() & set(record.remove)):
        return before.catalogs, before.retired
    gone = before.catalogs.keys() & set(record.remove)
    catalogs = {name: stored for name, stored in before.catalogs.items() if name not in gone}
    generation = before.generation + bool(record.retire)
    retired = {store: dict(of) for store, of in (record if record.copied else before).retired.items()}
    for segment in () if record.copied else record.retire:
        if not any(stored.has(*segment.place) for stored in before.catalogs.values()):
            raise CorruptFile(file, f"retires {segment.name!r}, which no catalog lists")
        retired.setdefault(segment.store, {})[segment.start] = generation
    for added in record.catalogs:
        if added.name in catalogs:
            raise CorruptFile(file, f"adds {added.name!r}, which exists already")
        if (store := overlapped(catalogs.values(), added)) is not None:
            raise CorruptFile(
                file, f"adds {added.name!r}, whose segments of {store!r} overlap those of another catalog"
            )
        if added.data is not None:
            shown = (stored.places - {*before.retired_in(stored)} for stored in catalogs.values() if stored.data)
            if twice := added.places & set().union(*shown) - {segment.place for segment in record.retire}:
                raise CorruptFile(file, f"archives {min(twice)}, which is archived already")
        catalogs[added.name] = structs.replace(added, generation=generation) if added.generation is None else added
    if not record.copied:
        checked = [before.catalogs[name] for name in gone]
        for store, start in [segment.place for segment in record.retire] + [
            place for stored in checked for place in before.retired_in(stored)
        ]:
            after = retired.get(store, {}).get(start, 0)
            if not any(stored.has(store, start) and stored.is_before(after) for stored in catalogs.values()):
                retired.get(store, {}).pop(start, None)
        retired = {store: of for store, of in retired.items() if of}
    return catalogs, retired


def _with_ranges(
    before: LogState, record: LogRecord, positions: dict[str, int], file: str
) -> tuple[Expired, dict[str, StoredRanges], dict[str, RangeTable]]:
    """Return hidden entries, objects of ranges and their tables after a record. Raises `CorruptFile`."""
    expired, objects, tables = before.expired, before.range_objects, before.range_tables
    if record.expired != NOTHING:
        expired = expired.joined(record.expired)
    replaced = expired.replaced
    if record.copied:
        # a copy has what its source has
        replaced, objects, tables = record.expired.replaced, {}, dict(record.range_tables)
    elif gone := {name: stored for name in record.remove if (stored := objects.get(name)) is not None}:
        objects = {name: stored for name, stored in objects.items() if name not in gone}
        tables = {stored.store: tables[stored.store] for stored in objects.values()}
    replaced = replaced.replayed(record.replaced, positions)
    if record.dropped:
        try:
            replaced = replaced.dropped(record.dropped)
        except ValueError as error:
            raise CorruptFile(file, f"drops replaced ranges that do not exist: {error}") from error
    for stored in record.ranges:
        table = record.range_tables.get(stored.store, NO_RANGES) if record.copied else replaced.retired(stored.store)
        stored.check(file, table)
        if before.names(stored.name) and not record.copied:
            raise CorruptFile(file, f"adds {stored.name!r}, which exists already")
        objects, tables = {**objects, stored.name: stored}, {**tables, stored.store: table}
    if len(tables) != len(objects) or any(store in record.dropped for store in tables):
        raise CorruptFile(file, "names two tables of the replaced ranges of a store, or one that is out of date")
    if replaced is not expired.replaced:
        expired = structs.replace(expired, replaced=replaced)
    return expired, objects, tables


def overlapped(catalogs: Iterable[StoredCatalog], added: StoredCatalog) -> str | None:
    """Return a store of whose log `added` and one of `catalogs`, both objects, have a common range; None: none.

    So a segment is found by at most one read. Catalogs that are no objects may lie between the segments of others.
    """
    if added.data is not None:
        return None
    for catalog in catalogs:
        if catalog.data is not None:
            continue
        numbers = catalog.rows.numbers
        for log in added.rows.logs:
            if (number := numbers.get(log.store)) is not None:
                other = catalog.rows.logs[number]
                if log.start < other.end and other.start < log.end:
                    return log.store
    return None


class LogReplay:
    """Adds records to a copy of a state, whose objects change in place."""

    def __init__(self, begun: LogState) -> None:
        self._begun = self._now = begun
        self._added: list[StoredObject] = []
        self._removed: list[StoredObject] = []

    @property
    def number(self) -> int:
        """The number of the newest record that was added."""
        return self._now.number

    def add(self, record: LogRecord, file: str) -> None:
        """Add the next record.

        Raises `CorruptFile` if the record contradicts the state; add no more then. Raises `StorageBehind` if its
        `previous` is another record: two histories are mixed.
        """
        now = self._now
        CorruptFile.unless_equal(file, "log record has another number than its name", now.number + 1, record.number)
        check_follows(file, now.number, now.digest, record.previous)
        if (record.number == 1) != (record.genesis is not None):
            raise CorruptFile(file, "only record 1 creates an index")
        if now is self._begun:
            now = replace(now, objects=dict(now.objects))
        objects, genesis = now.objects, now.genesis or record.genesis
        for name in record.remove:
            if (gone := objects.pop(name, None)) is not None:
                self._removed.append(gone)
            elif name not in now.catalogs and name not in now.range_objects:
                raise CorruptFile(file, f"removes {name!r}, which does not exist")
        for added in record.add:
            if added.name in objects:
                raise CorruptFile(file, f"adds {added.name!r}, which exists already")
            check_slots(added, genesis, file)
            objects[added.name] = added
            self._added.append(added)
        catalogs, retired = _with_catalogs(now, record, file)
        known, held = now.chain + record.digest[:DIGEST_DIGITS], now.batches
        later = {s: batch for s, batch in record.batches.items() if s not in held or batch.number > held[s].number}
        root = {record.root: (record.number, record.attempt)} if record.root else {}
        positions = max_positions(now.positions, record.positions)
        expired, range_objects, range_tables = _with_ranges(now, record, positions, file)
        self._now = replace(
            now,
            number=record.number,
            epoch=max(now.epoch, record.epoch),
            genesis=genesis,
            positions=positions,
            documents=newest_documents(now.documents, record.documents),
            catalogs=catalogs,
            retired=retired,
            batches={**held, **later},
            lost=now.lost | {lost.name: lost for lost in record.lost},
            expired=expired,
            range_objects=range_objects,
            range_tables=range_tables,
            roots=now.roots | root,
            put_before_ms=max(now.put_before_ms, record.put_before_ms),
            expiry_ms=max(now.expiry_ms, record.expiry_ms),
            digest=record.digest,
            chain=known[-CHAINED * DIGEST_DIGITS :],
        )

    def state(self) -> LogState:
        """Return the state after all added records. Cached properties of the state before are updated, if possible."""
        begun, now = self._begun, self._now
        if now is begun:
            return begun
        changed = frozenset([stored.file for stored in (*self._added, *self._removed)])
        steps = (*begun.steps, Step(begun.number, begun.digest, changed))[-_STEPS:]
        state = replace(now, steps=steps if sum(len(step.changed) for step in steps) <= _MOST_CHANGED else ())
        self._update_cached(begun.__dict__, state.__dict__)
        return state

    def _update_cached(self, known: dict[str, Any], into: dict[str, Any]) -> None:
        """Update cached properties of the state before, because computing them takes time for each object."""
        if (logs := known.get("listed_logs")) is not None and self._now.catalogs is self._begun.catalogs:
            into["listed_logs"] = logs
        added = [stored for stored in self._added if self._now.objects.get(stored.name) is stored]
        files, tables = known.get("files"), known.get("tables")
        if files is not None and tables is not None:
            # otherwise a file has two objects
            if len(files) + sum(map(len, tables.values())) != len(self._begun.objects):
                return
            into["files"], into["tables"] = self._files(files, added), self._tables(tables, added)
        newest_s = known.get("_newest_s")
        if newest_s is not None and not self._removed and self._now.lost == self._begun.lost:
            into["_newest_s"] = _newest(newest_s, added)

    def _files(self, known: dict[str, StoredObject], added: list[StoredObject]) -> dict[str, StoredObject]:
        files = dict(known)
        for stored in self._removed:
            # only if `known` has this object, and not another one of the file
            if files.get(stored.file_id) is stored:
                del files[stored.file_id]
        files.update((stored.file_id, stored) for stored in added if stored.shard is None)
        return files

    def _tables(self, known: dict[str, list[StoredObject]], added: list[StoredObject]) -> dict[str, list[StoredObject]]:
        tables, gone = dict(known), {stored.name for stored in self._removed}
        for table in dict.fromkeys(stored.file for stored in (*self._removed, *added) if stored.shard is not None):
            shards = [stored for stored in tables.get(table, ()) if stored.name not in gone]
            shards += [stored for stored in added if stored.shard is not None and stored.file == table]
            if shards:
                tables[table] = shards
            else:
                tables.pop(table, None)
        return tables
