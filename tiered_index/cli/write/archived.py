"""`tiered-index ingest archive:URI`: indexes the archived segments, records and rows of an index, as a follower would
index the store, the topics or the files. Records and rows are archived in the new index, too.

The index stores its position with the entries: after a kill at any moment the command continues there. A segment that
can't be read is named, also in the new index, and does not stop the others.
One thread beside the index's own; memory: some chunks of 16 MiB.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from tiered_index.base.clock import SystemClock
from tiered_index.cli.exit_codes import DONE, FINDING
from tiered_index.cli.options import GeometryOptions
from tiered_index.cli.output import counted
from tiered_index.cli.session import Session, open_stored_index
from tiered_index.cli.write.options import ARCHIVE_SCHEME, IngestOptions
from tiered_index.cli.write.putting import Putting, none_indexed, show_put
from tiered_index.config import IndexConfig
from tiered_index.connectors.archiver import ColumnArchiver
from tiered_index.connectors.documents import document_of
from tiered_index.connectors.files import row_archive
from tiered_index.connectors.files.known_files import offsets_end
from tiered_index.connectors.files.row_archive import ArchivedRows, RowsOfLog
from tiered_index.connectors.kafka.archived import (
    ArchivedRecords,
    RecordCopies,
    RecordFile,
    archived_records,
    begin_of,
    rule_positions,
    source_of,
)
from tiered_index.connectors.kafka.names import Name, positions_by_store
from tiered_index.connectors.rocketmq.archive.archive import archived_batches, segments_by_store
from tiered_index.connectors.rocketmq.follow.dispatcher import names_of_keys
from tiered_index.connectors.rocketmq.log.columns import Selection, SkippedRange
from tiered_index.connectors.rocketmq.log.store import SOURCE_PREFIX
from tiered_index.connectors.source import FIRST, Loss, no_entries
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument, NotAnIndex
from tiered_index.errors import listed as listed_names
from tiered_index.format.keys.hashing import assigned_topic_id
from tiered_index.format.names import LINKED, ROWS, rows_store, topic_of_store
from tiered_index.format.segments.columnar import NUMBER
from tiered_index.format.segments.segment import LinkedSegment
from tiered_index.format.shard import entry_checksum
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.index import IndexService
from tiered_index.service.jobs.erase import take_over
from tiered_index.service.log import topic_keys
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.hidden import HIDES_NOTHING
from tiered_index.service.log.records import ArchivedSegment, IndexDescriptor, RangeKind
from tiered_index.service.read.export import entries_checksum
from tiered_index.service.reader import IndexReader
from tiered_index.service.root import Root
from tiered_index.service.write.validation import TopicTable, batch_columns
from tiered_index.storage.disk import Disk
from tiered_index.storage.opening import split_uri
from tiered_index.types import inclusive

# files that one record names
_LINKS_AT_ONCE = 10_000


@dataclass
class ArchivedMessages:
    """The messages in the archived segments of `stores`, by the options of `ingest`, and counts of what was read.

    Entries that expired or were erased in the index of the segments, `old`, are left out.
    """

    old: IndexReader
    stores: dict[str, list[ArchivedSegment]]
    selection: Selection
    skip_corrupt: bool
    skip_missing: bool
    messages: int = 0
    expired: int = 0
    # of the segments that were read
    read_bytes: int = 0
    # ranges that were skipped, each with its store
    skipped: list[tuple[str, Loss]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # archived segments may still have erased messages
        self.hidden = self.old.log_state.expired
        self.erased = Expired(tombstones=self.hidden.tombstones)
        self._documents = self.old.topic_documents()

    @property
    def size_bytes(self) -> int:
        """The bytes of the segments."""
        return sum(segment.size_bytes for segments in self.stores.values() for segment in segments)

    def source(self, store: str) -> str:
        """Return the name of the position of a store in the new index: that of the index of the segments."""
        if (rows := self.rows_of(store)) is not None:
            return rows.log
        if Name.parse(store) is None:
            return SOURCE_PREFIX + store
        return source_of(store, self.old.log_state.positions)

    def rows_of(self, store: str) -> RowsOfLog | None:
        """Return the rows of files of a store; None: it has other messages."""
        return RowsOfLog(self.old.segment_archive, store, self.selection.takes) if store.startswith(ROWS) else None

    @property
    def rule_positions(self) -> dict[str, int]:
        """The positions that say how records and rows were indexed."""
        known = self.old.log_state.positions
        positions = rule_positions([*self.stores], known)
        for rows in filter(None, map(self.rows_of, self.stores)):
            positions |= topic_keys.positions_of(known, rows.log)
        return positions

    def topic_document(self, topic: str) -> TopicDocument | None:
        """Return the document of a topic: that of the old index, and whether the new one has tags."""
        known = self._documents.get(topic)
        if known is None or known.connector != "rocketmq":
            return known
        others = {name: fact for name, fact in known.facts.items() if name != "key_names"}
        return document_of("rocketmq", others | names_of_keys(has_tags=self.selection.tags))

    @property
    def expired_records(self) -> dict[str, int]:
        """The offset before which the records of each partition's log have expired."""
        known = self.old.log_state.expired.segments
        return {store: known[store] for store in self.stores if store in known and Name.parse(store) is not None}

    def check_missing(self) -> None:
        """Raise `InvalidArgument` if rows of files are missing, unless these are skipped."""
        for rows in filter(None, map(self.rows_of, self.stores)):
            rows.missing(None, skip_missing=self.skip_missing)

    def batches(
        self,
        store: str,
        position: int | None,
        keep: Callable[[ArchivedRows | ArchivedRecords, Any], None] = lambda batch, shown: None,
    ) -> Iterator[tuple[int, Any, tuple[Loss, ...]]]:
        """Yield the columns of one store's entries that are shown, from a position on, and their ends in the store.

        The last part has the ranges before that end that were skipped. `keep` gets records and the rows of files before
        their entries.
        """
        archive, segments, before = self.old.segment_archive, self.stores[store], self.read_bytes
        skips = {"skip_corrupt": self.skip_corrupt, "skip_missing": self.skip_missing}
        size_bytes = sum(segment.size_bytes for segment in segments)
        state = self.old.log_state
        batches: Iterator[Any]
        if (rows := self.rows_of(store)) is not None:
            batches = rows.batches(segments, position, **skips)
        elif Name.parse(store) is not None:
            begin = begin_of(store, segments, state.positions, state.expired.segments)
            begin = begin if position is None else position
            batches = archived_records(archive, segments, begin, **skips)
        else:
            batches = archived_batches(archive, segments, position, self.selection, **skips)
        for batch in batches:
            shown = _shown(batch.columns, self.hidden, self.old.genesis)
            if isinstance(batch, ArchivedRows | ArchivedRecords):
                keep(batch, shown)
            self.expired += len(batch.columns) - len(shown)
            self.messages += batch.messages
            skipped = tuple(map(_loss_of, batch.skipped))
            self.skipped += [(store, loss) for loss in skipped]
            part = (batch.end - segments[0].start) / (segments[-1].end - segments[0].start) if segments else 1
            self.read_bytes = before + round(size_bytes * part)
            yield batch.end, shown, skipped

    def erased_of(self, whole: RecordFile) -> pa.Array:
        """Return which records of a file were erased: by their topic, their partition, or one of their keys."""
        name, erased = Name.parse(whole.segment.store), self.erased
        assert name is not None, "a file of records"
        of_topic = erased.hidden_of(name.topic)
        if of_topic is HIDES_NOTHING:
            return pa.array(np.zeros(len(whole.records), np.bool_))
        is_shown = _is_shown(whole.entries, erased, self.old.genesis)
        offsets = whole.entries["offset"].to_numpy()[~is_shown]
        # also records without a key
        before_s = of_topic.begin_of_queue(name.partition)
        times_ms = whole.records["timestamp"].cast(pa.int64()).fill_null(whole.segment.published_ms).to_numpy()
        return pa.array(np.isin(whole.records["offset"].to_numpy(), offsets) | (times_ms // 1000 < before_s))

    def document(self) -> dict[str, Any]:
        """Return the counts for the command's document."""
        return {
            "segments": sum(map(len, self.stores.values())),
            "messages": self.messages,
            "expired": self.expired,
            "skipped": [
                {"store": store, "begin": gap.begin, "end": gap.end, "problem": gap.problem}
                for store, gap in self.skipped
            ],
        }


def _loss_of(skipped: SkippedRange | Loss) -> Loss:
    if isinstance(skipped, Loss):
        return skipped
    kind: RangeKind = "missing" if skipped.is_missing else "corrupt"
    problem = skipped.problem if skipped.is_missing else f"{skipped.file}: {skipped.problem}"
    return Loss(kind, skipped.begin, skipped.end, None, problem)


class Copies:
    """Copies the records and the rows that are read into the archive of the new index, before their entries are put.

    One log record names many copies of records. One thread.
    """

    def __init__(self, index: IndexService, archived: ArchivedMessages) -> None:
        self._archived, self.records = archived, RecordCopies(index)
        self._archiver, self.rows = ColumnArchiver(index, row_archive.FORMAT), 0

    def add(self, store: str, batch: ArchivedRows | ArchivedRecords, shown: Any) -> None:
        """Copy what was read of a store: the records that were not erased, and the rows with entries that are `shown`.

        Raises as `IndexService.archive_columns`.
        """
        if isinstance(batch, ArchivedRecords):
            if batch.whole is not None:
                self.records.add(batch.whole, self._archived.erased_of(batch.whole))
        elif batch.begin < batch.end:
            rows = batch.rows.filter(pc.is_in(batch.rows[NUMBER], shown["offset"].cast(pa.int64())))
            if self._archiver.send(store, batch.begin, batch.end, rows):
                self.rows += self._archiver.name() and len(rows)

    @property
    def messages(self) -> int:
        """The number of records and rows that were copied."""
        return self.records.records + self.rows


def ingest_archive(session: Session, uri: str, options: IngestOptions) -> int:
    """Index the archived segments of the index at `uri`, and return the exit code.

    With --dry-run nothing is written: the entries of the segments are compared with those of the index at `uri`.
    """
    intake, of_store = options.intake, options.rocketmq.of_store
    selection = Selection(*options.rocketmq.selected.arguments)
    is_strict = options.of_rows.strict
    if is_strict and of_store.skip_corrupt:
        raise InvalidArgument("give --strict, which ends at damage, or --skip-corrupt, which skips it")
    with contextlib.ExitStack() as stack:
        config = session.config()
        old = stack.enter_context(IndexReader.open(config=config.changed(storage=uri, root=None)))
        stores = _stores(old, options.run.store_name, selection, uri)
        archived = ArchivedMessages(old, stores, selection, not is_strict, of_store.skip_missing)
        archived.check_missing()
        if options.run.store_name is None and (lacking := _without_archive(old, selection)):
            session.out.note(f"{uri} has no archived message of {listed_names(lacking, 3)}: their entries are left out")
        if options.run.dry_run:
            compared = _compare(session, archived)
            return _name_damage(session, archived, accepted=of_store.skip_corrupt) or compared
        if config.storage is None and config.root is None:
            raise ConfigError("give --storage URI, the place of the new index")
        if config.root is None:
            config = config.changed(root=Path(stack.enter_context(tempfile.TemporaryDirectory())))
            intake = replace(intake, wait=True)
        config = session.config(root=config.root, **_like(old.genesis, options.geometry))
        # before a writer opens the index, which takes its lease
        _check_apart(config, old, uri)
        putting = stack.enter_context(Putting.open(session, config, intake))
        index = putting.index
        sources = {name: archived.source(name) for name in stores}
        _check_empty(index, {*sources.values(), *archived.rule_positions})
        # before the first entry is put
        take_over(index.storage, structs.replace(archived.hidden, segments=archived.expired_records), SystemClock())
        put, entries, copies = putting.patient(document=archived.topic_document), 0, Copies(index, archived)
        waiting = list[tuple[Any, str, int]]()

        def put_waiting() -> int:
            # a record is in the archive before its entry is durable
            copies.records.archiver.name()
            batches, waiting[:] = list(waiting), []
            return sum(put(*batch) for batch in batches)

        resumed = {name: index.durable_position(source) for name, source in sources.items()}
        for position_name, at in archived.rule_positions.items():
            index.put_source_batch(no_entries(index), position_name, at)
        with putting.progress("ingesting the archive", archived.size_bytes) as progress:
            for name in stores:
                rows = archived.rows_of(name)
                if rows is not None:
                    _link(index, rows)
                for end, columns, skipped in archived.batches(name, resumed[name], partial(copies.add, name)):
                    if skipped:
                        now_ms = SystemClock().now_ms()
                        index.record_ranges([loss.recorded(sources[name], now_ms) for loss in skipped])
                    waiting.append((columns, sources[name], end))
                    if not copies.records.archiver.waits or copies.records.archiver.is_full:
                        entries += put_waiting()
                    progress.update(archived.read_bytes, f"{entries:,} entries")
            entries += put_waiting()
        putting.settle()
        document = putting.document(
            status="complete",
            index_id=index.index_id,
            source=ARCHIVE_SCHEME + uri,
            stores={
                name: {"resumed_from": resumed[name], "end": segments[-1].end if segments else None}
                for name, segments in stores.items()
            },
            entries=entries,
            copied=copies.messages,
            **archived.document(),
        )
    show_put(session.out, document)
    # all may have expired
    is_empty = archived.messages and not (entries or archived.expired)
    lacks = [f"none of {archived.messages:,} messages has a key of {selection}"] if is_empty else []
    code = none_indexed(session, intake, lacks)
    return _name_damage(session, archived, accepted=of_store.skip_corrupt) or code


def _name_damage(session: Session, archived: ArchivedMessages, *, accepted: bool) -> int:
    """Name what could not be read, unless an option has `accepted` it, and return the exit code for it."""
    damage = [(store, loss) for store, loss in archived.skipped if loss.kind == "corrupt"]
    if accepted or not damage:
        return DONE
    for store, loss in damage[:FIRST]:
        session.out.error_line(f"not indexed: offsets {inclusive(loss.begin, loss.end)} of {store}: {loss.problem}")
    more = f", of which {FIRST} are named" if len(damage) > FIRST else ""
    session.out.error_line(
        f"{counted(len(damage), 'range')} of the archive can't be read{more}. Run `tiered-index verify --deep` to list "
        "the damage, and `verify --deep --repair` to mend it. --skip-corrupt accepts it"
    )
    return FINDING if archived.messages else CorruptFile.exit_code


def _link(index: IndexService, rows: RowsOfLog) -> None:
    """Add the files of a log of rows to an index that lacks them, before their entries."""
    mine, theirs = index.segment_archive.segments(), rows.archive.segments()
    last: LinkedSegment | None = None
    finished = list[LinkedSegment]()
    for linked in mine.of_log(rows.log):
        if not isinstance(linked, LinkedSegment):
            continue
        if not linked.is_open:
            last = linked
            continue
        # it was being read when an earlier run took it over
        known = theirs.segment(rows.log, linked.start)
        if isinstance(known, LinkedSegment) and (known.start, known.uri) == (linked.start, linked.uri):
            finished += [] if known.is_open else [known]
    if last is not None:
        _check_same(index, rows, last)
    if finished:
        index.link([], finished)
    new = rows.copied_links(offsets_end(mine, rows.log))
    while chunk := list(itertools.islice(new, _LINKS_AT_ONCE)):
        index.link(chunk)


def _check_same(index: IndexService, rows: RowsOfLog, last: LinkedSegment) -> None:
    """Raise `InvalidArgument` if the last of the index's files is not one of the old index: both have gone on."""
    if last.end <= rows.archive.state().expired.segments.get(rows.log, 0):
        return
    known = rows.archive.segments().segment(rows.log, last.start)
    if not isinstance(known, LinkedSegment) or (last.end, last.blocks) != (known.end, known.blocks):
        raise InvalidArgument(
            f"{index.storage.uri} has indexed files of {rows.log} since it was made of this archive, such as "
            f"{last.uri}: only `ingest FILES` adds to them"
        )


def _stores(old: IndexReader, store: str | None, selection: Selection, uri: str) -> dict[str, list[ArchivedSegment]]:
    """Return the segments of each store of RocketMQ, and of each log of records or rows of selected topics.

    `store`: only of this one. Raises `InvalidArgument` if there are none.
    """
    known = old.segments()
    # also the files whose rows no run has copied: they are missing
    of_files = {rows_store(name) for name in known.stores if name.startswith(LINKED)}
    columnar = {
        name: list(known.of(name))
        for name in sorted({*known.stores, *of_files})
        if (queue := _queue_of(name)) is not None
        and store in (None, name)
        and (queue[0] is None or selection.takes(queue[0]))
    }
    if not any(columnar.values()):
        columnar = {}
        logs = [name for name in known.stores if _queue_of(name) is not None and any(known.of(name))]
        if logs and not known.byte_stores:
            choice = selection if store is None else f"--store-name {store}"
            raise InvalidArgument(f"{uri} has archived messages of {listed_names(logs, 3)}, which are not of {choice}")
    if columnar and (store is not None or not known.byte_stores):
        return columnar
    return segments_by_store(known, () if store is None else (store,), uri) | columnar


def _without_archive(old: IndexReader, selection: Selection) -> list[str]:
    """Return the stores of RocketMQ and the logs of Kafka whose entries the index has, but no archived message."""
    known, state = old.segments(), old.log_state
    ends = {
        name: at
        for name, at in positions_by_store(state.positions).items()
        if selection.takes(str(topic_of_store(name)))
    }
    ends |= {
        name.removeprefix(SOURCE_PREFIX): at for name, at in state.positions.items() if name.startswith(SOURCE_PREFIX)
    }
    expired = state.expired.segments
    return sorted(name for name, at in ends.items() if at > expired.get(name, 0) and name not in known.stores)


def _like(genesis: IndexDescriptor, geometry: GeometryOptions) -> dict[str, Any]:
    """Return the settings that give the new index the layout of the old one."""
    layout = genesis.layout
    return {
        "slots": layout.slots if geometry.slots is None else geometry.slots,
        "items": layout.items if geometry.items is None else geometry.items,
        "preset": layout.preset.name,
        "hash": layout.hash if layout.preset.name == "rocketmq" else None,
        "offset_space": genesis.offset_space,
    }


def _check_apart(config: IndexConfig, old: IndexReader, uri: str) -> None:
    """Raise `ConfigError` if `config` names the old index, which is at `uri`, or a place inside its prefix."""
    marker = Root(config.root, Disk()).read_marker() if config.root is not None else None
    index_id = marker.index_id if marker is not None else None
    if marker is None and config.storage is not None:
        # by the log, because two URIs may name one place
        with contextlib.suppress(NotAnIndex), open_stored_index(config.changed(root=None)) as index:
            assert index.log.state.genesis is not None
            index_id = index.log.state.genesis.index_id
    if index_id == old.genesis.index_id:
        raise ConfigError(
            "--storage is the index of these segments, where a sweep would delete them: "
            "give the new index a storage and root of its own"
        )
    if config.storage is not None and is_inside(config.storage, uri):
        raise ConfigError(
            "--storage is inside the prefix of the index of these segments, and would be deleted with it: "
            "give the new index a storage of its own"
        )


def is_inside(uri: str, prefix: str) -> bool:
    """Return whether a storage is below the prefix of another one."""
    (*place, path), (*above, outer) = _place_of(uri), _place_of(prefix)
    return place == above and outer in path.parents


def _place_of(uri: str) -> tuple[str, str, Path]:
    """Return the scheme, the host or bucket, and the path of a storage; databases are files."""
    parts = split_uri(uri)
    # a bucket's root has no path
    path = Path("/", unquote(parts.path).strip("/"))
    if parts.scheme in ("file", "sqlite"):
        return "file", "", path.resolve()
    return parts.scheme, parts.netloc, path


def _check_empty(index: IndexService, own: set[str]) -> None:
    """Raise `ConfigError` if the new index has other entries than those whose positions are `own`."""
    known = index.durable_positions()
    if known.keys() - own or (index.files() and not known):
        raise ConfigError(
            f"{index.storage.uri} holds other entries, or those of an interrupted run without --root: give an "
            f"empty prefix"
        )


def _shown(columns: Any, hidden: Expired, like: IndexDescriptor) -> Any:
    """Return the rows that are neither expired nor erased."""
    return columns if hidden.hidden is None else columns.filter(pa.array(_is_shown(columns, hidden, like)))


def _is_shown(columns: Any, hidden: Expired, like: IndexDescriptor) -> npt.NDArray[np.bool_]:
    """Return which rows (bool, n) are neither expired nor erased."""
    topics = TopicTable()
    hashed = batch_columns(columns, like.layout.schema, topics).columns
    names = {topic_id: topics.name(topic_id) for topic_id in np.unique(hashed["topic_id"]).tolist()}
    return hidden.keeps(hashed, hashed["second"], names)


def _compare(session: Session, archived: ArchivedMessages) -> int:
    """Compare the entries of the archive with those of its index, by count and checksum; return the exit code."""
    [(store, segments), *others] = archived.stores.items()
    known, of_files = archived.old.segments(), archived.rows_of(store)
    logs = {name: _queue_of(name) for name in known.stores if name in known.byte_stores or _queue_of(name) is not None}
    queue = logs[store]
    alike = logs if queue is None else [name for name in logs if logs[name] == queue]
    if others or len(alike) > 1:
        raise InvalidArgument(
            "leave --dry-run out: it can't tell the entries of several stores apart. For one partition of Kafka "
            "or for files, pass --store-name with the name of its log"
        )
    schema, rule = archived.old.genesis.layout.schema, archived.old.genesis.layout.hash
    entries = checksum = 0
    with session.out.progress("reading the archive", archived.size_bytes) as progress:
        topics = TopicTable()
        for _, columns, _ in archived.batches(store, None):
            if of_files is not None:
                # a copy has no carriage return at the end of its line
                columns = _without_sizes(columns)
            hashed = batch_columns(columns, schema, topics, rule).columns
            entries, checksum = entries + len(columns), checksum + _checksum_of(hashed, topics, schema.item)
            progress.update(archived.read_bytes, f"{entries:,} entries")
    begins, ends = (np.array([getattr(segment, name) for segment in segments], np.int64) for name in ("start", "end"))
    stored = stored_checksum = 0
    with archived.old.export() as export, session.out.progress("reading the index", export.most_entries) as progress:
        for rows in export:
            offsets = rows.column("offset").to_numpy()
            place = np.searchsorted(begins, offsets, "right") - 1
            is_inside = (place >= 0) & (offsets < ends[place])
            if queue is not None:
                is_inside &= rows.column("queue_id").to_numpy() == queue[1]
                if queue[0] is not None:
                    is_inside &= pc.equal(rows.column("topic"), queue[0]).to_numpy(zero_copy_only=False)
            inside = rows.filter(pa.array(is_inside))
            if of_files is not None:
                inside = _without_sizes(inside)
            stored, stored_checksum = stored + len(inside), stored_checksum + entries_checksum(inside, schema)
            progress.update(stored)
    of_archive = {"entries": entries, "checksum": f"{checksum % 2**64:016x}"}
    of_index = {"entries": stored, "checksum": f"{stored_checksum % 2**64:016x}"}
    same = of_archive == of_index
    document = {"status": "same" if same else "different", "archive": of_archive, "index": of_index}
    session.out.show(document | archived.document())
    return DONE if same else FINDING


def _queue_of(store: str) -> tuple[str | None, int] | None:
    """Return the topic (None: many) and the queue of a log of rows or records; None: it is that of a broker's store."""
    if store.startswith(ROWS):
        return topic_of_store(store), int(store.rpartition("/")[2])
    name = Name.parse(store)
    return None if name is None else (name.topic, name.partition)


def _without_sizes(entries: Any) -> Any:
    at, sizes = entries.schema.get_field_index("size"), pa.array(np.zeros(len(entries), np.int64))
    return entries.set_column(at, "size", sizes)


def _checksum_of(hashed: Any, topics: TopicTable, item: np.dtype[Any]) -> int:
    """Return the `entries_checksum` of checked and hashed columns, as items of dtype `item`."""
    items = np.zeros(len(hashed["second"]), item)
    for name in item.names or ():
        if name not in ("topic_id", "time_diff_s"):
            items[name] = hashed[name]
    ids, index = np.unique(hashed["topic_id"], return_inverse=True)
    items["topic_id"] = np.array([assigned_topic_id(topics.name(topic)) for topic in ids.tolist()], np.int32)[index]
    return entry_checksum(items, hashed["second"])
