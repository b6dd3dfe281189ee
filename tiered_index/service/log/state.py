"""The state after the log's records, and their replay. Pure. SPEC.md section 9."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from tiered_index.documents import (
    COUNT,
    MILLISECONDS,
    Malformed,
    Optional,
    checked,
    list_of,
    map_of,
    record,
    text,
    tuple_of,
)
from tiered_index.errors import CorruptFile, StorageBehind
from tiered_index.format.names import DIGEST_DIGITS
from tiered_index.retention import NOTHING, Expired
from tiered_index.service.log.layered import Entries, layered
from tiered_index.service.log.reads import read_before_ms, reads_in
from tiered_index.service.log.records import (
    COMMON,
    DESCRIPTOR,
    DIGEST,
    OBJECT,
    OF_ROWS,
    QUARANTINE_S,
    ArchivedSegment,
    IndexDescriptor,
    LogRecord,
    LostObject,
    StoredObject,
    StreamBatch,
    check_slots,
    decode_document,
    document_version,
    json_text,
    max_positions,
    optional_members,
    sealed_text,
)
from tiered_index.service.log.rows import Tables, objects_of, row_of, rows_of, said_of
from tiered_index.types import TopicBounds

# most objects of a checkpoint with documents, which versions before 5 can read; larger ones have rows
MOST_DOCUMENTS = 2_000
# most digests of records in a state: more than there are records between the checkpoints that a storage keeps
CHAINED = 320
# most bytes of changes, as a share of a whole checkpoint, and most records since it: fewer than `CHAINED`
_CHANGES_SHARE, _MOST_RECORDS = 8, 256
# most steps in a state, and most files and tables in all of them
_STEPS, _MOST_CHANGED = 64, 10_000
# most bytes of objects' texts that the next state copies, and most texts that it cuts out
_MOST_TEXT, _MOST_CUT = 4 << 20, 8
_START = attrgetter("start")


def _newest(
    known: tuple[int | None, int | None], more: Iterable[StoredObject | LostObject]
) -> tuple[int | None, int | None]:
    """Return the last seconds outside the quarantine and in it, of those `known` and of `more`; None: there is none."""
    found: tuple[list[int], list[int]] = ([], [])
    for second, seconds in zip(known, found, strict=True):
        seconds.extend([] if second is None else [second])
    for one in more:
        if isinstance(one, LostObject) and one.range is not None:
            continue  # nothing of it was published
        in_window = one.shard is not None and one.shard.window_s >= QUARANTINE_S
        # the lane of a lost file is not known
        in_lane = one.lane == "quarantine" if isinstance(one, StoredObject) else one.shard is None
        found[in_window or in_lane].append(one.second_max)
    main, quarantine = found
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
    objects: Entries[StoredObject] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    archive: Entries[ArchivedSegment] = field(default_factory=dict)
    batches: dict[str, StreamBatch] = field(default_factory=dict)
    lost: dict[str, LostObject] = field(default_factory=dict)
    expired: Expired = NOTHING
    roots: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Number and attempt of the newest record of each root's writer, by the root's id."""
    put_before_ms: int = 0
    """The greatest `put_before_ms` of the records; 0: none says it."""
    digest: str = field(default="", compare=False)
    """The digest of record `number`; empty: read from a checkpoint of an older version."""
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

    def object_of(self, file_id: str) -> StoredObject | None:
        """Return the object of file `file_id`; None: there is none."""
        return self.files.get(file_id)

    def segment_at(self, store: str, start: int) -> ArchivedSegment | None:
        """Return the archived segment of `store` that begins at offset `start`; None: there is none."""
        found = self.segment_holding(store, start)
        return found if found is not None and found.start == start else None

    def segment_holding(self, store: str, offset: int) -> ArchivedSegment | None:
        """Return the archived segment of `store` that has byte `offset` of its log; None: there is none."""
        found = self.segments_of(store)
        at = bisect_right(found, offset, key=_START) - 1
        return found[at] if at >= 0 and offset < found[at].end else None

    def segments_of(self, store: str) -> list[ArchivedSegment]:
        """Return the archived segments of `store`, by their start."""
        return self._by_store.get(store, [])

    def segment_overlapping(self, store: str, start: int, end: int) -> ArchivedSegment | None:
        """Return the last archived segment of `store` with a byte of its log from `start` to before `end`."""
        found = self.segments_of(store)
        at = bisect_left(found, end, key=_START) - 1
        return found[at] if at >= 0 and start < found[at].end else None

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
    def bounds(self) -> TopicBounds | None:
        """The bounds of `as_of_ms` by topic; None: there are none."""
        times = read_before_ms(self.reads)
        return TopicBounds(times, self.as_of_ms) if times else None

    @cached_property
    def _newest_s(self) -> tuple[int | None, int | None]:
        """The last second of files and tables outside the quarantine, and in it; None: there are none."""
        return _newest((None, None), [*self.objects.values(), *self.lost.values()])

    @property
    def stores(self) -> tuple[str, ...]:
        """The stores that have archived segments."""
        return tuple(self._by_store)

    @property
    def byte_stores(self) -> tuple[str, ...]:
        """Those of them whose segments are bytes of a log, not columnar."""
        return tuple(store for store, segments in self._by_store.items() if segments[0].columns is None)

    @cached_property
    def files(self) -> Entries[StoredObject]:
        """The objects that are files of their own, by file id."""
        return {o.file_id: o for o in self.objects.values() if o.shard is None}

    @cached_property
    def tables(self) -> Entries[list[StoredObject]]:
        """The shards of each window table, by the table's id."""
        tables: dict[str, list[StoredObject]] = {}
        for stored in self.objects.values():
            if stored.shard is not None:
                tables.setdefault(stored.shard.table, []).append(stored)
        return tables

    @cached_property
    def _by_store(self) -> dict[str, list[ArchivedSegment]]:
        stores: dict[str, list[ArchivedSegment]] = {}
        for segment in sorted(self.archive.values(), key=lambda segment: (segment.store, segment.start)):
            stores.setdefault(segment.store, []).append(segment)
        return stores

    def encode(self) -> bytes:
        """Return the bytes of a whole checkpoint."""
        tables, joined = self._texts
        version = document_version(self.expired, self.archive.values(), self.digest, self.roots)
        version = version if tables is None else self._version_of_rows
        before = json_text({"version": version, "kind": "checkpoint", **self._begin()})
        if tables is not None:
            before = f'{before[:-1]},"tables":{json_text(said_of(tables))}}}'
        behind = json_text(self._end(self.archive.values()))
        return sealed_text(f'{before[:-1]},"objects":[{joined}],{behind[1:]}')

    @cached_property
    def _texts(self) -> Texts:
        """The objects as a whole checkpoint has them."""
        return Texts({} if len(self.objects) > MOST_DOCUMENTS else None, "").with_more(self.objects.values())

    def as_base(self, name: str, size_bytes: int) -> CheckpointBase:
        """Return this state's whole checkpoint as the base of checkpoints with changes."""
        objects, archive = tuple(self.objects.values()), tuple(self.archive.values())
        return CheckpointBase(name, self.number, self.digest, size_bytes, objects, archive)

    def changes_since(self, base: CheckpointBase) -> bytes:
        """Return the bytes of a checkpoint with the changes since `base`. Empty: write a whole one."""
        if self.number - base.number >= _MOST_RECORDS or not base.digest.startswith(self.digest_at(base.number) or "-"):
            return b""  # also if the base is of another history
        data = self.encode_since(base)
        return data if len(data) * _CHANGES_SHARE <= base.size_bytes else b""

    def encode_since(self, base: CheckpointBase) -> bytes:
        """Return the bytes of a checkpoint with the changes since `base`, a whole checkpoint of this history."""
        objects, gone = _changes(base.objects, self.objects)
        archive, removed = _changes(base.archive, self.archive)
        since = {"number": base.number, "digest": base.digest, "removed": [*gone, *removed]}
        document = {"version": self._version_of_rows, "kind": "changes", "since": since, **self._begin()}
        return sealed_text(json_text({**document, **rows_of(objects), **self._end(archive)}))

    @property
    def _version_of_rows(self) -> int:
        return max(OF_ROWS, document_version(self.expired, self.archive.values()))

    def _begin(self) -> dict[str, Any]:
        genesis = self.genesis.to_json() if self.genesis else None
        return {"number": self.number, "epoch": self.epoch, "genesis": genesis}

    def _end(self, archive: Iterable[ArchivedSegment]) -> dict[str, Any]:
        return {
            "positions": self.positions,
            **optional_members(archive, self.batches, self.lost.values(), self.expired),
            **({"roots": {root: list(mark) for root, mark in self.roots.items()}} if self.roots else {}),
            **({"put_before_ms": self.put_before_ms} if self.put_before_ms else {}),
            **({"digest": self.digest, "chain": self.chain} if self.digest else {}),
        }

    @classmethod
    def decode(cls, data: bytes, file: str, base: LogState | None = None) -> LogState:
        """Return the state in a checkpoint. `base` is the state of its base checkpoint. Raises `CorruptFile`."""
        document = decode_document(data, file)
        if "since" in document:
            since = checked(_SINCE, document["since"], file, "checkpoint")
            if base is None or since[:2] != (base.number, base.digest):
                raise CorruptFile(file, "the checkpoint's base is another state", expected=since[0])
            removed = since[2]
        else:
            base, removed = None, ()
        objects = partial(objects_of, document["tables"]) if "tables" in document else list_of(OBJECT)
        return checked(record(partial(_state, base, removed), objects=objects, **_FIELDS), document, file, "checkpoint")


@dataclass(frozen=True)
class CheckpointBase:
    """A stored whole checkpoint on which others are based, and the objects and segments of its state."""

    name: str
    number: int
    digest: str
    size_bytes: int
    objects: tuple[StoredObject, ...]
    archive: tuple[ArchivedSegment, ...]


class Texts(NamedTuple):
    """The joined texts of a state's objects in a checkpoint: rows with the numbers of their `tables`.

    `tables` None: documents instead of rows.
    """

    tables: Tables | None
    joined: str

    def with_more(self, added: Iterable[StoredObject]) -> Texts:
        """Return these texts and then those of the `added` objects."""
        tables = dict(self.tables) if self.tables is not None else None
        texts = [_text(one, tables) for one in added]
        return Texts(tables, ",".join([*([self.joined] if self.joined else []), *texts]))

    def without(self, gone: StoredObject) -> Texts:
        """Return them without the text of a file."""
        # no text has another one in it: each has a name of its own
        before, cut, behind = self.joined.partition(_text(gone, self.tables))
        assert cut
        return Texts(self.tables, before + behind[1:] if behind else before[:-1])


def _text(stored: StoredObject, tables: Tables | None) -> str:
    return json_text(stored.to_json() if tables is None else row_of(stored, tables))


Named = TypeVar("Named", StoredObject, ArchivedSegment)


def _changes(before: tuple[Named, ...], now: Entries[Named]) -> tuple[list[Named], list[str]]:
    """Return the objects that are in `now` but not in `before`, and the names of those that are only in `before`.

    `now` has the remaining objects of `before` in the same order, before all new ones.
    """
    last = next((one for one in reversed(before) if now.get(one.name) is one), None)
    added = list(itertools.takewhile(lambda one: one is not last, reversed(now.values())))
    if len(before) + len(added) == len(now):
        return added[::-1], []
    return added[::-1], [one.name for one in before if now.get(one.name) is not one]


class LogReplay:
    """Adds records to a copy of a state, whose objects and segments change in place."""

    def __init__(self, begun: LogState) -> None:
        self._begun = self._now = begun
        self._added: list[StoredObject] = []
        self._removed: list[StoredObject] = []
        self._placed: dict[tuple[str, int], ArchivedSegment] = {}  # the last segment added at each place
        self._thinned: set[str] = set()  # stores of removed segments
        self._is_chained = False

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
        if now.digest and (record.previous or self._is_chained) and record.previous != now.digest:
            raise StorageBehind(
                file,
                f"its previous record {now.number} differs from the one read: the storage was restored, or two "
                f"histories of this index were mixed",
                expected=now.digest,
                found=record.previous,
            )
        if (record.number == 1) != (record.genesis is not None):
            raise CorruptFile(file, "only record 1 creates an index")
        if now is self._begun:
            now = replace(now, objects=layered(now.objects), archive=layered(now.archive))
        objects, archive, genesis = now.objects, now.archive, now.genesis or record.genesis
        for name in record.remove:
            if (gone := objects.pop(name, None)) is not None:
                self._removed.append(gone)
            else:
                segment = archive.pop(name, None)
                if segment is None:
                    raise CorruptFile(file, f"removes {name!r}, which does not exist")
                self._thinned.add(segment.store)
        for added in record.add:
            if added.name in objects:
                raise CorruptFile(file, f"adds {added.name!r}, which exists already")
            check_slots(added, genesis, file)
            objects[added.name] = added
            self._added.append(added)
        for segment in record.archive:
            there = self._placed.get(segment.place) or self._begun.segment_at(*segment.place)
            if segment.name in archive or (there is not None and archive.get(there.name) is there):
                raise CorruptFile(file, f"archives {segment.name!r} of {segment.store!r}, which is archived already")
            archive[segment.name] = self._placed[segment.place] = segment
        known, held = now.chain + record.digest[:DIGEST_DIGITS] if record.digest else "", now.batches
        later = {s: batch for s, batch in record.batches.items() if s not in held or batch.number > held[s].number}
        root = {record.root: (record.number, record.attempt)} if record.root else {}
        self._is_chained = bool(record.previous)
        self._now = replace(
            now,
            number=record.number,
            epoch=max(now.epoch, record.epoch),
            genesis=genesis,
            positions=max_positions(now.positions, record.positions),
            batches={**held, **later},
            lost=now.lost | {one.name: one for one in record.lost},
            expired=now.expired.joined(record.expired) if record.expired else now.expired,
            roots=now.roots | root,
            put_before_ms=max(now.put_before_ms, record.put_before_ms),
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
        self._carry(begun.__dict__, state.__dict__)
        return state

    def _carry(self, known: dict[str, Any], into: dict[str, Any]) -> None:
        """Update cached properties of the state before, because computing them takes time for each object."""
        if (stores := known.get("_by_store")) is not None:
            into["_by_store"] = self._stores(stores)
        added = [stored for stored in self._added if self._now.objects.get(stored.name) is stored]
        if (texts := self._texts(known.get("_texts"), added)) is not None:
            into["_texts"] = texts
        files, tables = known.get("files"), known.get("tables")
        if files is not None and tables is not None:
            # otherwise a file has two objects
            if len(files) + sum(map(len, tables.values())) != len(self._begun.objects):
                return
            into["files"], into["tables"] = self._files(files, added), self._tables(tables, added)
        newest_s = known.get("_newest_s")
        if newest_s is not None and not self._removed and self._now.lost == self._begun.lost:
            into["_newest_s"] = _newest(newest_s, added)

    def _stores(self, known: dict[str, list[ArchivedSegment]]) -> dict[str, list[ArchivedSegment]]:
        stores, archive, placed = dict(known), self._now.archive, self._placed
        for store in self._thinned & stores.keys():
            stores[store] = [one for one in stores[store] if archive.get(one.name) is one and one.place not in placed]
        for segment in placed.values():
            if archive.get(segment.name) is segment:
                store = segment.store
                if stores.get(store) is known.get(store):
                    stores[store] = [*known.get(store, ())]
                insort(stores[store], segment, key=_START)
        if stores.keys() == known.keys() and all(stores.values()):
            return stores
        return {store: stores[store] for store in sorted(stores) if stores[store]}

    def _texts(self, known: Texts | None, added: list[StoredObject]) -> Texts | None:
        removed = [stored for stored in self._removed if self._begun.objects.get(stored.name) is stored]
        if known is None or len(known.joined) > _MOST_TEXT or len(removed) > _MOST_CUT:
            return None
        # the form changes, or a removed table changes the numbers of others
        if (known.tables is None) == (len(self._now.objects) > MOST_DOCUMENTS) or any(one.shard for one in removed):
            return None
        return reduce(Texts.without, removed, known).with_more(added)

    def _files(self, known: Entries[StoredObject], added: list[StoredObject]) -> Entries[StoredObject]:
        files = layered(known)
        for stored in self._removed:
            # only if `known` has this object, and not another one of the file
            if files.get(stored.file_id) is stored:
                del files[stored.file_id]
        files.update((stored.file_id, stored) for stored in added if stored.shard is None)
        return files

    def _tables(self, known: Entries[list[StoredObject]], added: list[StoredObject]) -> Entries[list[StoredObject]]:
        tables, gone = layered(known), {stored.name for stored in self._removed}
        for table in dict.fromkeys(stored.file for stored in (*self._removed, *added) if stored.shard is not None):
            shards = [stored for stored in tables.get(table, ()) if stored.name not in gone]
            shards += [stored for stored in added if stored.shard is not None and stored.file == table]
            if shards:
                tables[table] = shards
            else:
                tables.pop(table, None)
        return tables


def _state(base: LogState | None, removed: Sequence[str], **fields: Any) -> LogState:
    objects, archive, lost, chain = (fields.pop(name) for name in ("objects", "archive", "lost", "chain"))
    last = fields["digest"][:DIGEST_DIGITS]
    if chain and not (last and chain.endswith(last)):
        raise Malformed(f"digests up to {last!r}", chain[-DIGEST_DIGITS:], ".chain")
    before, segments = (dict(base.objects), dict(base.archive)) if base is not None else ({}, {})
    for name in removed:
        if before.pop(name, None) is None and segments.pop(name, None) is None:
            raise Malformed("names of objects that were there", name, ".since")
    names = len(before) + len(objects), len(segments) + len(archive)
    before.update((o.name, o) for o in objects)
    segments.update((s.name, s) for s in archive)
    state = LogState(
        **fields, chain=chain or last, objects=before, archive=segments, lost={one.name: one for one in lost}
    )
    if (len(before), len({segment.place for segment in segments.values()})) != names:
        raise Malformed("each object and each segment once", [*objects, *archive], ".objects")
    for stored in objects:
        check_slots(stored, state.genesis, "checkpoint")
    return state


_SINCE = record(
    lambda number, digest, removed: (number, digest, removed), number=COUNT, digest=DIGEST, removed=list_of(text())
)
_FIELDS: dict[str, Any] = {
    **COMMON,
    "number": COUNT,
    "epoch": COUNT,
    "genesis": DESCRIPTOR,
    "roots": Optional(map_of(tuple_of(COUNT, text())), {}),
    "put_before_ms": Optional(MILLISECONDS, 0),
    "digest": Optional(DIGEST, ""),
    "chain": Optional(text(f"([0-9a-f]{{{DIGEST_DIGITS}}})*"), ""),
}
