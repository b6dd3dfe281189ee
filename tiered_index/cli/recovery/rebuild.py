"""`tiered-index rebuild --from URI`: a new index from archived segments, as a follower would have written it.

The new index stores its position with the entries: after a kill at any moment the command continues there.
One thread beside the index's own; memory: some chunks of 16 MiB.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from typer import Option

from tiered_index.cli.options import GeometryOptions, IntakeOptions, SelectionOptions
from tiered_index.cli.putting import Putting, none_indexed, show_put
from tiered_index.cli.session import Session, command
from tiered_index.clock import SystemClock
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.retention import Expired
from tiered_index.rocketmq.archive.archive import archived_batches, segments_by_store
from tiered_index.rocketmq.follow.dispatcher import note_tags
from tiered_index.rocketmq.log.columns import Selection, SkippedRange
from tiered_index.rocketmq.log.layout import TAGS_SOURCE
from tiered_index.rocketmq.log.store import SOURCE_PREFIX
from tiered_index.service.answers.validation import TopicTable, batch_columns
from tiered_index.service.erasure.erase import take_over
from tiered_index.service.index import IndexService
from tiered_index.service.log.records import ArchivedSegment, IndexDescriptor
from tiered_index.service.lookup.export import entries_checksum
from tiered_index.service.reader import IndexReader

_DIFFERENT = 1


@command
def rebuild(
    session: Session,
    source: str = Option(..., "--from", metavar="URI", help="Storage of the index with the archived segments."),
    store: list[str] | None = Option(None, metavar="NAME", help="Read the segments of this store only. Repeatable."),
    skip_corrupt: bool = Option(False, "--skip-corrupt", help="Skip damage and report it."),
    skip_missing: bool = Option(False, "--skip-missing", help="Skip missing segments and report them."),
    check: bool = Option(False, "--check", help="Compare the entries with those of --from at the end."),
    *,
    selected: SelectionOptions,
    geometry: GeometryOptions,
    intake: IntakeOptions,
) -> int:
    """Build a new index from the archived segments of another index.

    The command works even if all files of the old index are lost. The new index has the entries that `ingest` would
    make of the archived messages. Slots, items and preset are those of the old index: --slots and --items change them,
    settings do not. Repeat the options of its `ingest`: --topics, --exclude-topics, --index-tags, --index-prepared.
    Entries that expired or were erased in the old index stay out.

    Run the command again to continue, and to add newer segments. Without --root it uses a temporary folder, and uploads
    everything before it ends. If it is killed, you may have to begin again in an empty prefix.

    --check reads both indexes and compares count and checksum of the entries in archived segments. Exit code 1: they
    differ. It refuses an index with segments of several stores.

    [bold]Examples[/bold]

      tiered-index rebuild --from s3://bucket/index --storage s3://bucket/index-2

      tiered-index rebuild --from s3://bucket/index --storage s3://other/index --root /data/index-2 --check --json
    """
    selection = Selection(*selected.arguments)
    with contextlib.ExitStack() as stack:
        given = session.config()
        theirs = given.changed(storage=source, root=None)
        old = stack.enter_context(IndexReader.open(config=theirs))
        if given.storage is None and given.root is None:
            raise ConfigError("give --storage URI, the place of the new index")
        stores = segments_by_store(old.log_state, store or (), source)
        if check and len(old.log_state.byte_stores) > 1:
            raise InvalidArgument("leave --check out: it can't tell the entries of several stores apart")
        if given.root is None:
            given = given.changed(root=Path(stack.enter_context(tempfile.TemporaryDirectory())))
            intake = replace(intake, wait=True)
        config = session.config(root=given.root, **_like(old.genesis, geometry))
        putting = stack.enter_context(Putting.open(session, config, intake))
        index = putting.index
        _check_target(index, old, stores)
        # before the first entry is put: archived segments may still have erased messages
        hidden = replace(old.log_state.expired, segments={})
        take_over(index.storage, hidden, SystemClock())
        note_tags(index, selection)
        put, done = putting.patient(), dict.fromkeys(("messages", "entries", "expired"), 0)
        skipped: list[SkippedRange] = []
        total = sum(segment.size_bytes for segments in stores.values() for segment in segments)
        resumed = {name: index.durable_position(SOURCE_PREFIX + name) for name in stores}
        read = 0
        archive, skips = old.segment_archive, {"skip_corrupt": skip_corrupt, "skip_missing": skip_missing}
        with putting.progress("rebuilding", total) as progress:
            for name, segments in stores.items():
                for batch in archived_batches(archive, segments, resumed[name], selection, **skips):
                    shown = _shown(batch.columns, hidden, old.genesis)
                    done["expired"] += len(batch.columns) - len(shown)
                    done["entries"] += put(shown, SOURCE_PREFIX + name, batch.end)
                    done["messages"] += batch.messages
                    skipped += batch.skipped
                    progress.update(read + batch.end - segments[0].start, f"{done['entries']:,} entries")
                read += sum(segment.size_bytes for segment in segments)
        putting.settle()
        sums = _compared(session, old, index, stores) if check else None
        document = putting.document(
            status="complete" if sums is None or sums["same"] else "different",
            index_id=index.index_id,
            **{"from": source},
            stores={name: {"resumed_from": resumed[name], "end": stores[name][-1].end} for name in stores},
            segments=sum(map(len, stores.values())),
            **done,
            skipped=[{"begin": one.begin, "end": one.end, "problem": one.problem} for one in skipped],
            check=sums,
        )
    show_put(session.out, document)
    # all may have expired
    is_empty = done["messages"] and not (done["entries"] or done["expired"])
    lacks = [f"none of {done['messages']:,} messages has a key of {selection}"] if is_empty else []
    return none_indexed(session, intake, lacks) or (0 if document["status"] == "complete" else _DIFFERENT)


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


def _check_target(index: IndexService, old: IndexReader, stores: dict[str, list[ArchivedSegment]]) -> None:
    """Raise `ConfigError` if the new index is the old one, or has other entries."""
    if index.index_id == old.genesis.index_id:
        raise ConfigError("--storage is the index at --from: give the new index a storage and root of its own")
    known = index.durable_positions()
    if known.keys() - {TAGS_SOURCE, *(SOURCE_PREFIX + name for name in stores)} or (index.files() and not known):
        raise ConfigError(
            f"{index.storage.uri} holds other entries, or those of an interrupted rebuild without --root: give an "
            f"empty prefix"
        )


def _shown(columns: Any, hidden: Expired, like: IndexDescriptor) -> Any:
    """Return the rows that are neither expired nor erased."""
    if not hidden:
        return columns
    topics = TopicTable()
    hashed, _ = batch_columns(columns, like.layout.schema, topics)
    names = {topic_id: topics.name(topic_id) for topic_id in np.unique(hashed["topic_id"]).tolist()}
    return columns.filter(pa.array(hidden.keeps(hashed, hashed["second"], names)))


def _compared(
    session: Session, old: IndexReader, index: IndexService, stores: dict[str, list[ArchivedSegment]]
) -> dict[str, Any]:
    """Return count and checksum of both indexes' entries of the archived segments."""
    [segments] = stores.values()
    begins, ends = (np.array([getattr(one, name) for one in segments], np.int64) for name in ("start", "end"))

    def sums(of: IndexReader | IndexService, title: str) -> dict[str, Any]:
        entries = checksum = 0
        with of.export() as export, session.progress(title, export.most_entries) as progress:
            for batch in export:
                offsets = batch.column("offset").to_numpy()
                place = np.searchsorted(begins, offsets, "right") - 1
                batch = batch.filter(pa.array((place >= 0) & (offsets < ends[place])))
                entries, checksum = entries + len(batch), checksum + entries_checksum(batch, export.entry_schema)
                progress.update(entries)
        return {"entries": entries, "checksum": f"{checksum % 2**64:016x}"}

    found = {"from": sums(old, "reading the old index"), "rebuilt": sums(index, "reading the new index")}
    return {"same": found["from"] == found["rebuilt"], **found}
