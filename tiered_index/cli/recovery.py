"""`tiered-index recover`: a root after a crash, and giving up what the storage lost; `tiered-index rebuild --from URI`:
an index made anew of archived segments alone, as a follower would have made it.

The new index keeps how far it is with the entries: killed at any moment and started again, the command goes on there.
One thread beside the index's own; memory: some chunks of 16 MiB.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typer import Option

from tiered_index.cli.options import Items, Patience, Slots, Wait
from tiered_index.cli.output import counted, human_bytes, human_seconds, states
from tiered_index.cli.progress import flushed, settle, what_waits, write_what_waits
from tiered_index.cli.session import Session, command, open_stored_index
from tiered_index.cli.verify import missing_text
from tiered_index.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    InvalidArgument,
    NotAnIndex,
    RootBehind,
    StorageBehind,
    StorageUnavailable,
)
from tiered_index.follow import PatientPut
from tiered_index.format.names import COMPACTED, UPLOADED, data_prefix
from tiered_index.retention import Expired
from tiered_index.rocketmq.archive.archive import archived_batches
from tiered_index.rocketmq.log.columns import Selection, SkippedRange
from tiered_index.rocketmq.log.store import SOURCE_PREFIX
from tiered_index.service.anew import BegunAnew, begin_anew
from tiered_index.service.answers.validation import TopicTable, batch_columns
from tiered_index.service.checks.report import Missing
from tiered_index.service.erasure.erase import take_over
from tiered_index.service.files.compacted import DamagedFile
from tiered_index.service.index import IndexService
from tiered_index.service.lifecycle.orphans import give_up, named
from tiered_index.service.log.records import ArchivedSegment, IndexDescriptor, LostObject, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.lookup.export import entries_checksum
from tiered_index.service.lookup.inventory import describe_handle
from tiered_index.service.reader import IndexReader
from tiered_index.service.root import Root
from tiered_index.service.root.files import FileList
from tiered_index.service.writing.appenders import MAIN
from tiered_index.storage.disk import Disk
from tiered_index.types import MAX_TIMESTAMP_MS

_DIFFERENT = 1


@command
def recover(
    session: Session,
    lost: list[str] | None = Option(
        None, "--lost", metavar="FILE", help="Give up what storage or root lost of this file; several times."
    ),
    dry_run: bool = Option(False, "--dry-run", help="With --lost: show what would be given up; change nothing."),
    takes_over: bool = Option(
        False, "--take-over", help="Do not wait for the lease of another host's writer, which you know to be gone."
    ),
) -> int:
    """Recover a root after a crash: drop half-made work, move files to the state they reached, rebuild hash chains.

    Every command that writes does this when it starts; here it is done alone and reported. A root that is gone is begun
    anew where --storage names an index.

    A storage or a root that went back in time is refused by all other commands: a bucket or a root from a backup, a
    clone. This one begins the root anew. It takes over the storage's source positions, and puts the local entries that
    the storage lacks into the root again; the next `ingest` uploads them, and takes from the source what is missing.
    Exit code 4: a file is damaged and kept as it is; 3: the storage did not
    answer.

    With --take-over the index is claimed at once, though another writer's lease stands. If that writer is alive after
    all, it is fenced: it publishes nothing more and keeps its files.

    With --lost nothing of that is done. The storage has lost an object (`verify` names it): FILE is its file's id, its
    own name, or a window table's id. With --root FILE may also be a file that somebody deleted from the root before it
    was uploaded. A log record gives up what is gone of it, for good; from then on answers are complete except for what
    that held, and say so for ever. First put back what you can: with --root a file of which the root has a copy is
    refused, without it a writer drops its copy.

    [bold]Examples[/bold]

      tiered-index recover --storage s3://bucket/index --lost 001700000000000-0123456789ab --dry-run

      tiered-index recover --storage s3://bucket/index --lost 001700000000000-0123456789ab

      tiered-index recover --root /data/index

      tiered-index recover --root /data/new --storage s3://bucket/index --json

      tiered-index recover --root /data/new --storage s3://bucket/index --take-over
    """
    config = session.config(background=False)
    if lost:
        if takes_over:
            raise InvalidArgument("--take-over is for a root: --lost needs no lease")
        return _give_up(session, config, lost, dry_run=dry_run)
    if dry_run:
        raise InvalidArgument("--dry-run is for --lost: a recovery without it loses nothing")
    if config.root is None:
        raise ConfigError("root is not set: give --root")
    if Root(config.root, Disk()).read_marker() is None:
        if config.storage is None:
            raise NotAnIndex(f"{config.root} holds no tiered index; to begin it anew give --storage too")
        # raises where the storage holds no index either: recovery creates none
        IndexReader.open(config=config.model_copy(update={"root": None})).close()
    begun: BegunAnew | None = None
    try:
        opened = IndexService(config, takes_over=takes_over)
    except (StorageBehind, RootBehind):
        begun = begin_anew(config, takes_over=takes_over)
        opened = IndexService.open(config)
    with opened as index:
        handles = index.files()
        damaged = [handle for handle in handles if isinstance(handle, DamagedFile)]
        health = index.health()
        document: dict[str, Any] = {
            "index_id": index.index_id,
            "status": "damaged" if damaged or (begun and begun.kept) else "recovered",
            "begun_anew": _told(begun),
            "storage": "reached" if health["writer_epoch"] else "not reached",
            "notes": [*_notes(begun), *index.recovery_notes],
            "files": health["files"],
            "sources": index.durable_positions(),
            "problems": [*(str(handle.error) for handle in damaged), *health["problems"]],
            "damaged": [describe_handle(handle) for handle in damaged],
        }
    session.out.answer(document)
    for note in document["notes"]:
        session.out.line(f"recovered: {note}")
    for problem in document["problems"]:
        session.out.line(f"problem: {problem}")
    session.out.fields(
        {
            "index": document["index_id"],
            "status": document["status"],
            "storage": document["storage"],
            "files": states(document["files"]) or "none",
            **{f"position of {source}": position for source, position in document["sources"].items()},
        }
    )
    if document["status"] == "damaged":
        return CorruptFile.exit_code
    return 0 if document["storage"] == "reached" else StorageUnavailable.exit_code


def _told(begun: BegunAnew | None) -> dict[str, Any] | None:
    return None if begun is None else {**asdict(begun), "left": None if begun.left is None else str(begun.left)}


def _notes(begun: BegunAnew | None) -> list[str]:
    if begun is None:
        return []
    notes = [
        f"the root was begun anew: {counted(begun.entries, 'entry', 'entries')} of {counted(begun.sent, 'file')} were "
        f"put in again, {counted(begun.stored, 'file')} were in the storage"
    ]
    return notes + [
        f"{file_id}: not put in again, {begun.left} keeps what was set aside: {why}"
        for file_id, why in begun.kept.items()
    ]


def _give_up(session: Session, config: IndexConfig, files: list[str], *, dry_run: bool) -> int:
    with open_stored_index(config) as index:
        for file in files:
            for stored in named(index.log.state, file):
                _check_copy(config, file, stored)
        gone = _gone(config, files, index.log.state)
        given_up = [Missing.of(one) for one in give_up(index.storage, index.log, files, gone, dry_run=dry_run)]
        log_number = index.log.state.number
    status = "planned" if dry_run else "given up"
    session.out.answer({"status": status, "lost": [asdict(one) for one in given_up], "log_number": log_number})
    for one in given_up:
        what, misses = ("would be given up", "would miss") if dry_run else ("given up", "miss")
        session.out.line(f"{what} {one.object}: answers {misses} {missing_text(one)}, and say so")
    if dry_run:
        session.out.remark("nothing was changed: without --dry-run it is given up")
    return 0


def _gone(config: IndexConfig, files: list[str], state: LogState) -> dict[str, LostObject]:
    """Return those of `files` that the root lists, and neither its folders nor the log have, by file id."""
    if config.root is None:
        return {}
    gone = {}
    for file_id, file in FileList(Root(config.root, Disk())).gone().items():
        if file_id in files and state.object_of(file_id) is None:
            # of a file that took entries when it was listed: what a writer takes, or any time
            until_ms = SystemClock().now_ms() + round(config.max_early_s * 1000)
            anything = (0, (until_ms if file.lane == MAIN else MAX_TIMESTAMP_MS) // 1000)
            name = f"{data_prefix(file_id)}unpublished"
            gone[file_id] = LostObject(name, file_id, *(file.seconds or anything), max(1, file.count))
    return gone


def _check_copy(config: IndexConfig, file: str, stored: StoredObject) -> None:
    """Raise `InvalidArgument` where the root has a copy of an object's file."""
    if config.root is not None:
        root = Root(config.root, Disk())
        for path in (root.index_path(state, stored.file_id) for state in (COMPACTED, UPLOADED)):
            if path.exists():
                raise InvalidArgument(f"--lost {file}: {path} is a copy of it; put that back as {stored.name}")


@command
def rebuild(
    session: Session,
    source: str = Option(
        ..., "--from", metavar="URI", help="Storage of the index that has archived segments.", show_default=False
    ),
    store: list[str] | None = Option(None, metavar="NAME", help="Of these stores only; several times."),
    topics: list[str] | None = Option(
        None, metavar="PATTERN", help="Only these topics, as 'order*'; several times. None: all but RocketMQ's own."
    ),
    exclude_topics: list[str] | None = Option(None, metavar="PATTERN", help="Not these topics; several times."),
    index_tags: bool = Option(False, "--index-tags", help="Index messages under their tags, too, for query --tag."),
    index_prepared: bool = Option(False, "--index-prepared", help="Index prepared messages of transactions, too."),
    skip_corrupt: bool = Option(False, "--skip-corrupt", help="Report damage and go on behind it."),
    skip_missing: bool = Option(False, "--skip-missing", help="Report segments that are missing in between and go on."),
    check: bool = Option(False, "--check", help="At the end compare the entries with those of the index at --from."),
    slots: Slots = None,
    items: Items = None,
    wait: Wait = False,
    patience: Patience = 60.0,
) -> int:
    """Make an index anew of the archived segments of another one, whose files may all be gone.

    The entries are those that `ingest` put: keys, unique keys, topics, queues and commit log offsets; slots, items and
    file family are the other index's. Give what it was made with: --topics, --exclude-topics, --index-tags,
    --index-prepared. What has expired or was erased there is left out, and stays so in the new index. Without --root a
    temporary folder is used, and everything is uploaded before exit. The same command again goes on where it stopped,
    and takes what was archived since; without --root it may have to begin anew, in an empty prefix. The segments
    themselves stay where they are.

    --check reads both indexes whole, and compares count and checksum of the entries that lie in the archived segments;
    exit code 1: they differ.

    [bold]Examples[/bold]

      tiered-index rebuild --from s3://bucket/index --storage s3://bucket/index-2

      tiered-index rebuild --from s3://bucket/index --storage s3://other/index --root /data/index-2 --check --json
    """
    started_s = time.monotonic()
    selection = Selection(tuple(topics or ()), tuple(exclude_topics or ()), index_tags, index_prepared)
    with contextlib.ExitStack() as stack:
        given = session.config()
        theirs = given.model_copy(update={"storage": source, "root": None})
        old = stack.enter_context(IndexReader.open(config=theirs))
        if given.storage is None and given.root is None:
            raise ConfigError("no storage is given: --storage URI is where the new index is made")
        stores = _segments(old, store, source)
        if given.root is None:
            given = given.model_copy(update={"root": Path(stack.enter_context(tempfile.TemporaryDirectory()))})
            wait = True
        config = session.config(root=given.root, **_like(old.genesis, slots, items))
        index = stack.enter_context(IndexService.open(config))
        _check_target(index, old, stores)
        # before there is any entry of them: archived segments may still have what was erased
        hidden = replace(old.log_state.expired, segments={})
        take_over(index.storage, hidden, SystemClock())
        put, done = PatientPut(index, patience), dict.fromkeys(("messages", "entries", "expired"), 0)
        skipped: list[SkippedRange] = []
        total = sum(segment.size_bytes for segments in stores.values() for segment in segments)
        resumed = {name: index.durable_position(SOURCE_PREFIX + name) for name in stores}
        read = 0
        archive, skips = old.segment_archive, {"skip_corrupt": skip_corrupt, "skip_missing": skip_missing}
        with flushed(index), session.progress("rebuilding", total) as progress:
            for name, segments in stores.items():
                for batch in archived_batches(archive, segments, resumed[name], selection, **skips):
                    shown = _shown(batch.columns, hidden, old.genesis)
                    done["expired"] += len(batch.columns) - len(shown)
                    done["entries"] += put(shown, SOURCE_PREFIX + name, batch.end)
                    done["messages"] += batch.messages
                    skipped += batch.skipped
                    progress.update(read + batch.end - segments[0].start, f"{done['entries']:,} entries")
                read += sum(segment.size_bytes for segment in segments)
        if wait:
            settle(index, patience, session.progress)
        sums = _compared(session, old, index, stores) if check else None
        document: dict[str, Any] = {
            "status": "complete" if sums is None or sums["same"] else "different",
            "index_id": index.index_id,
            "from": source,
            "stores": {name: {"resumed_from": resumed[name], "end": stores[name][-1].end} for name in stores},
            "segments": sum(map(len, stores.values())),
            **done,
            "skipped": [{"begin": one.begin, "end": one.end, "problem": one.problem} for one in skipped],
            "check": sums,
            "quarantined": index.health()["quarantined_entries"],
            "elapsed_s": round(time.monotonic() - started_s, 3),
            **what_waits(index),
        }
    session.out.answer(document)
    for one in skipped:
        session.out.remark(f"skipped: offsets {one.begin} to {one.end}: {one.problem}")
    session.out.fields(
        {
            "from": f"{counted(document['segments'], 'archived segment')}, {human_bytes(total)}",
            "messages": document["messages"],
            "entries": document["entries"],
            **({"left out": f"{document['expired']:,} expired or erased"} if document["expired"] else {}),
            "time": human_seconds(document["elapsed_s"]),
            "files": states(document["files"]) or "none",
        }
    )
    if sums is not None:
        old_sums, new_sums = sums["from"], sums["rebuilt"]
        session.out.line(
            f"{'the same' if sums['same'] else 'NOT the same'}: {old_sums['entries']:,} entries of checksum "
            f"{old_sums['checksum']}, rebuilt {new_sums['entries']:,} of {new_sums['checksum']}"
        )
    write_what_waits(session.out, document)
    return 0 if document["status"] == "complete" else _DIFFERENT


def _segments(old: IndexReader, wanted: list[str] | None, where: str) -> dict[str, list[ArchivedSegment]]:
    """Return the archived segments by store. Raises `InvalidArgument` for none."""
    state = old.log_state
    if unknown := [name for name in wanted or () if name not in state.stores]:
        known = ", ".join(map(repr, state.stores)) or "none"
        raise InvalidArgument(f"{where} has no archived segments of store {unknown[0]!r}; stores with some: {known}")
    if not state.stores:
        raise InvalidArgument(f"{where} has no archived segments: `ingest --archive-segments` makes them")
    return {name: state.segments_of(name) for name in (wanted or state.stores)}


def _like(genesis: IndexDescriptor, slots: int | None, items: int | None) -> dict[str, Any]:
    """Return the settings of an index like the old one."""
    layout = genesis.layout
    return {
        "slots": layout.slots if slots is None else slots,
        "items": layout.items if items is None else items,
        "preset": layout.preset.name,
        "hash": layout.hash if layout.preset.name == "rocketmq" else None,
        "offset_space": genesis.offset_space,
    }


def _check_target(index: IndexService, old: IndexReader, stores: dict[str, list[ArchivedSegment]]) -> None:
    """Raise `ConfigError` where the new index is the old one, or holds something else."""
    if index.index_id == old.genesis.index_id:
        raise ConfigError("--storage is the index at --from: a rebuilt one needs a storage and a root of its own")
    known = index.durable_positions()
    if known.keys() - {SOURCE_PREFIX + name for name in stores} or (index.files() and not known):
        raise ConfigError(
            f"{index.storage.uri} holds entries of something else, or of a rebuild without --root that was stopped "
            f"before it knew how far it was: an empty prefix is needed"
        )


def _shown(columns: Any, hidden: Expired, like: IndexDescriptor) -> Any:
    """Return the rows that have neither expired nor been erased."""
    if not hidden:
        return columns
    topics = TopicTable()
    hashed, _ = batch_columns(columns, like.layout.schema, topics)
    names = {topic_id: topics.name(topic_id) for topic_id in np.unique(hashed["topic_id"]).tolist()}
    return columns.filter(pa.array(hidden.keeps(hashed, hashed["second"], names)))


def _compared(
    session: Session, old: IndexReader, index: IndexService, stores: dict[str, list[ArchivedSegment]]
) -> dict[str, Any]:
    """Return count and checksum of what both indexes have of the archived segments."""
    if len(stores) > 1:
        raise InvalidArgument("--check compares one store: offsets of several can't be told apart; --store NAME")
    [segments] = stores.values()

    def sums(of: IndexReader | IndexService, title: str) -> dict[str, Any]:
        entries = checksum = 0
        with of.export() as export, session.progress(title, export.most_entries) as progress:
            for batch in export:
                offsets = batch.column("offset")
                inside = pc.and_(pc.greater_equal(offsets, segments[0].start), pc.less(offsets, segments[-1].end))
                batch = batch.filter(inside)
                entries, checksum = entries + len(batch), checksum + entries_checksum(batch, export.entry_schema)
                progress.update(entries)
        return {"entries": entries, "checksum": f"{checksum % 2**64:016x}"}

    found = {"from": sums(old, "reading the old index"), "rebuilt": sums(index, "reading the new index")}
    return {"same": found["from"] == found["rebuilt"], **found}
