"""`tiered-index ingest archive:URI`: indexes the archived segments, records and rows of an index, as a follower would
index the store, the topics or the files. Records and rows are archived in the new index, too.

The index stores its position with the entries: after a kill at any moment the command continues there. A segment that
can't be read is named, also in the new index, and does not stop the others.
One thread beside the index's own; memory: some chunks of 16 MiB.
"""

from __future__ import annotations

import contextlib
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
from tiered_index.cli.others import options_of
from tiered_index.cli.output import counted
from tiered_index.cli.session import Session, open_stored_index
from tiered_index.cli.write.options import ARCHIVE_SCHEME, IngestOptions
from tiered_index.cli.write.putting import Putting, none_indexed, show_put
from tiered_index.config import IndexConfig
from tiered_index.connectors.archive.log import ArchivedFile, ColumnCopies, ColumnLog, logs_of_index
from tiered_index.connectors.documents import lacking
from tiered_index.connectors.registry import CONNECTORS
from tiered_index.connectors.rocketmq.archive.archive import StoreLog, segments_by_store, stores_of_entries
from tiered_index.connectors.rocketmq.log.columns import Selection
from tiered_index.connectors.source import FIRST, Loss, no_entries
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument, NotAnIndex
from tiered_index.errors import listed as listed_names
from tiered_index.format.keys.hashing import assigned_topic_id
from tiered_index.format.segments.columnar import NUMBER
from tiered_index.format.shard import entry_checksum
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.index import IndexService
from tiered_index.service.jobs.erase import take_over
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.hidden import HIDES_NOTHING
from tiered_index.service.log.records import IndexDescriptor
from tiered_index.service.read.export import entries_checksum
from tiered_index.service.reader import IndexReader
from tiered_index.service.root import Root
from tiered_index.service.write.validation import TopicTable, batch_columns
from tiered_index.storage.disk import Disk
from tiered_index.storage.opening import split_uri
from tiered_index.types import inclusive

Log = ColumnLog | StoreLog


@dataclass
class ArchivedMessages:
    """The messages in the archived segments of `logs`, by the options of `ingest`, and counts of what was read.

    Entries that expired or were erased in the index of the segments, `old`, are left out. `logs` are by their stores.
    """

    old: IndexReader
    logs: dict[str, Log]
    selection: Selection
    skip_corrupt: bool
    skip_missing: bool
    # those of each connector
    options: tuple[Any, ...] = ()
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
        return sum(segment.size_bytes for log in self.logs.values() for segment in log.segments)

    @property
    def positions(self) -> dict[str, int]:
        """The positions that say how the messages were indexed."""
        return {name: at for log in self.logs.values() for name, at in log.positions.items()}

    def topic_document(self, topic: str) -> TopicDocument | None:
        """Return the document of a topic: that of the old index, with what the options change."""
        known = self._documents.get(topic)
        if known is None or not CONNECTORS.has(known.connector):
            return known
        if (problem := lacking(known)) is not None:
            raise ConfigError(problem)
        again: Callable[[TopicDocument, Any], TopicDocument] | None
        again = getattr(CONNECTORS.connector(known.connector), "document_again", None)
        return (
            known if again is None else again(known, options_of(CONNECTORS.spec(known.connector), self.options, None))
        )

    @property
    def expired_records(self) -> dict[str, int]:
        """The offset of each log before which its messages have expired."""
        return {log.store: log.expired for log in self.logs.values() if log.expired is not None}

    def batches(
        self, log: Log, position: int | None, keep: Callable[[ArchivedFile], None] = lambda whole: None
    ) -> Iterator[tuple[int, Any, tuple[Loss, ...]]]:
        """Yield the columns of one log's entries that are shown, from a position on, and their ends in the log.

        The last part has the ranges before that end that were skipped. `keep` gets each columnar file before its
        entries.
        """
        segments, before = log.segments, self.read_bytes
        size_bytes = sum(segment.size_bytes for segment in segments)
        for batch in log.batches(position, skip_corrupt=self.skip_corrupt, skip_missing=self.skip_missing):
            shown = _shown(batch.columns, self.hidden, self.old.genesis)
            if batch.whole is not None:
                keep(batch.whole)
            self.expired += len(batch.columns) - len(shown)
            self.messages += batch.messages
            self.skipped += [(log.store, loss) for loss in batch.skipped]
            part = (batch.end - segments[0].start) / (segments[-1].end - segments[0].start) if segments else 1
            self.read_bytes = before + round(size_bytes * part)
            yield batch.end, shown, batch.skipped

    def copy(self, copies: ColumnCopies, log: Log, whole: ArchivedFile) -> None:
        """Copy a file of a log without the messages that were erased: by their topic, queue, or one of their keys.

        Raises as `ColumnCopies.add`.
        """
        assert isinstance(log, ColumnLog), "bytes are not copied"
        records, erased = whole.table.records, np.zeros(len(whole.table.records), np.bool_)
        hidden = {topic: self.erased.hidden_of(topic) for topic in records["topic"].unique().to_pylist()}
        hidden = {topic: of_topic for topic, of_topic in hidden.items() if of_topic is not HIDES_NOTHING}
        if hidden:
            is_shown = _is_shown(whole.entries, self.erased, self.old.genesis)
            erased = np.isin(records[NUMBER].to_numpy(), whole.entries["offset"].to_numpy()[~is_shown])
            seconds = records["timestamp"].cast(pa.int64()).fill_null(whole.segment.published_ms).to_numpy() // 1000
        for topic, of_topic in hidden.items():
            # also messages without a key
            is_topic = pc.equal(records["topic"], topic).to_numpy()
            erased |= is_topic & (seconds < of_topic.begin_of_queue(log.place[1]))
        copies.add(log.form, whole, erased)

    def document(self) -> dict[str, Any]:
        """Return the counts for the command's document."""
        return {
            "segments": sum(len(log.segments) for log in self.logs.values()),
            "messages": self.messages,
            "expired": self.expired,
            "skipped": [
                {"store": store, "begin": gap.begin, "end": gap.end, "problem": gap.problem}
                for store, gap in self.skipped
            ],
        }


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
        known_logs = _logs(old, selection)
        logs = _chosen(known_logs, old, options.run.store_name, selection, uri)
        archived = ArchivedMessages(old, logs, selection, not is_strict, of_store.skip_missing, options.of_connectors)
        for log in logs.values():
            log.check(skip_missing=archived.skip_missing)
        if options.run.store_name is None and (lacking := _without_archive(old, known_logs, selection)):
            session.out.note(f"{uri} has no archived message of {listed_names(lacking, 3)}: their entries are left out")
        if options.run.dry_run:
            compared = _compare(session, archived, known_logs)
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
        sources = {name: log.source for name, log in logs.items()}
        _check_empty(index, {*sources.values(), *archived.positions})
        # before the first entry is put
        take_over(index.storage, structs.replace(archived.hidden, segments=archived.expired_records), SystemClock())
        put, entries, copies = putting.patient(document=archived.topic_document), 0, ColumnCopies(index)
        waiting = list[tuple[Any, str, int]]()

        def put_waiting() -> int:
            # a record is in the archive before its entry is durable
            copies.name()
            batches, waiting[:] = list(waiting), []
            return sum(put(*batch) for batch in batches)

        resumed = {name: index.durable_position(source) for name, source in sources.items()}
        for position_name, at in archived.positions.items():
            index.put_source_batch(no_entries(index), position_name, at)
        with putting.progress("ingesting the archive", archived.size_bytes) as progress:
            for name, log in logs.items():
                log.link(index)
                keep = partial(archived.copy, copies, log)
                for end, columns, skipped in archived.batches(log, resumed[name], keep):
                    if skipped:
                        now_ms = SystemClock().now_ms()
                        index.record_ranges([loss.recorded(sources[name], now_ms) for loss in skipped])
                    waiting.append((columns, sources[name], end))
                    if not copies.can_wait:
                        entries += put_waiting()
                    progress.update(archived.read_bytes, f"{entries:,} entries")
            entries += put_waiting()
        putting.settle()
        document = putting.document(
            status="complete",
            index_id=index.index_id,
            source=ARCHIVE_SCHEME + uri,
            stores={
                name: {"resumed_from": resumed[name], "end": log.segments[-1].end if log.segments else None}
                for name, log in logs.items()
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


def _logs(old: IndexReader, selection: Selection) -> dict[str, Log]:
    """Return all logs of an index that have archived messages, or only entries, by their stores."""
    known = old.segments()
    logs: dict[str, Log] = {**logs_of_index(old, selection.takes)}
    for store in known.byte_stores:
        logs[store] = StoreLog(old.segment_archive, store, list(known.of(store)), selection)
    return logs


def _chosen(
    logs: dict[str, Log], old: IndexReader, store: str | None, selection: Selection, uri: str
) -> dict[str, Log]:
    """Return the logs of stores of RocketMQ, and those of selected topics. `store`: only this one.

    Raises `InvalidArgument` if there are none.
    """
    known = old.segments()
    archived = {name: log for name, log in logs.items() if isinstance(log, ColumnLog) and not log.is_left_out}
    columnar: dict[str, Log] = {
        name: log
        for name, log in archived.items()
        if store in (None, name) and (log.place[0] is None or selection.takes(log.place[0]))
    }
    if not any(log.segments for log in columnar.values()):
        columnar = {}
        names = [name for name, log in archived.items() if log.segments]
        if names and not known.byte_stores:
            choice = selection if store is None else f"--store-name {store}"
            raise InvalidArgument(f"{uri} has archived messages of {listed_names(names, 3)}, which are not of {choice}")
    if columnar and (store is not None or not known.byte_stores):
        return columnar
    stores = segments_by_store(known, () if store is None else (store,), uri)
    return {name: logs[name] for name in stores} | columnar


def _without_archive(old: IndexReader, logs: dict[str, Log], selection: Selection) -> list[str]:
    """Return the stores of RocketMQ and the logs whose entries the index has, but no archived message."""
    lacking = stores_of_entries(old.log_state) - logs.keys()
    columnar = (log for log in logs.values() if isinstance(log, ColumnLog) and log.is_left_out)
    return sorted({*lacking, *(log.store for log in columnar if selection.takes(str(log.place[0])))})


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


def _compare(session: Session, archived: ArchivedMessages, known_logs: dict[str, Log]) -> int:
    """Compare the entries of the archive with those of its index, by count and checksum; return the exit code."""
    [log, *others] = archived.logs.values()
    with_entries = [
        known for known in known_logs.values() if known.segments or known.store in archived.old.segments().stores
    ]
    alike = with_entries if log.place is None else [known for known in with_entries if known.place == log.place]
    if others or len(alike) > 1:
        raise InvalidArgument(
            "leave --dry-run out: it can't tell the entries of several stores apart. For one partition of Kafka "
            "or for files, pass --store-name with the name of its log"
        )
    schema, rule = archived.old.genesis.layout.schema, archived.old.genesis.layout.hash
    entries = checksum = 0
    with session.out.progress("reading the archive", archived.size_bytes) as progress:
        topics = TopicTable()
        for _, columns, _ in archived.batches(log, None):
            if not log.has_sizes:
                columns = _without_sizes(columns)
            hashed = batch_columns(columns, schema, topics, rule).columns
            entries, checksum = entries + len(columns), checksum + _checksum_of(hashed, topics, schema.item)
            progress.update(archived.read_bytes, f"{entries:,} entries")
    begins, ends = np.array([(segment.start, segment.end) for segment in log.segments], np.int64).reshape(-1, 2).T
    stored = stored_checksum = 0
    with archived.old.export() as export, session.out.progress("reading the index", export.most_entries) as progress:
        for rows in export:
            offsets = rows.column("offset").to_numpy()
            place = np.searchsorted(begins, offsets, "right") - 1
            is_inside = (place >= 0) & (offsets < ends[place])
            if log.place is not None:
                topic, queue_id = log.place
                is_inside &= rows.column("queue_id").to_numpy() == queue_id
                if topic is not None:
                    is_inside &= pc.equal(rows.column("topic"), topic).to_numpy(zero_copy_only=False)
            inside = rows.filter(pa.array(is_inside))
            if not log.has_sizes:
                inside = _without_sizes(inside)
            stored, stored_checksum = stored + len(inside), stored_checksum + entries_checksum(inside, schema)
            progress.update(stored)
    of_archive = {"entries": entries, "checksum": f"{checksum % 2**64:016x}"}
    of_index = {"entries": stored, "checksum": f"{stored_checksum % 2**64:016x}"}
    same = of_archive == of_index
    document = {"status": "same" if same else "different", "archive": of_archive, "index": of_index}
    session.out.show(document | archived.document())
    return DONE if same else FINDING


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
