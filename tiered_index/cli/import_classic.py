"""`tiered-index import-classic DIR`: puts the entries of the broker's classic index files into an index."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_index.cli.ingest import check_apart
from tiered_index.cli.options import Items, Patience, Slots, Wait
from tiered_index.cli.output import human_count, human_seconds, states
from tiered_index.cli.progress import PatientPut, settle
from tiered_index.cli.session import Session, command
from tiered_index.errors import InvalidArgument, TieredIndexError
from tiered_index.rocketmq.classic.service import ClassicImport
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.service.index import IndexService


@command
def import_classic(
    session: Session,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the index files, STORE_DIR/index.", show_default=False)
    ],
    store: Annotated[
        Path | None, typer.Option(help="The store with their commit log; by default the folder above DIR.")
    ] = None,
    store_name: Annotated[
        str | None, typer.Option(help="What the store is called in the index; by default its path.")
    ] = None,
    slots: Slots = None,
    items: Items = None,
    wait: Wait = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Look at every entry again, also for another store.")
    ] = False,
    patience: Patience = 60.0,
) -> int:
    """Lift RocketMQ's classic index files into a tiered index.

    Their entries hold a hash and a place; topic, key, queue and size come from the messages in the commit log. Entries
    whose message is missing or has no such key are dropped and counted. What the index has already stays one answer.

    [bold]Examples[/bold]

      tiered-index import-classic /home/rocketmq/store/index --root /data/index --storage s3://bucket/index --wait
    """
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is not a folder")
    opened = StoreDirectory.open(store if store is not None else folder.resolve().parent, store_name)
    config = session.config(offset_space="commitlog", slots=slots, items=items)
    check_apart(config, opened.folder, folder)
    started_s = time.monotonic()
    with IndexService.open(config) as index:
        work = ClassicImport(index, folder, opened, PatientPut(index, patience), restart)
        start = work.position
        with session.progress("importing", work.end_offset) as progress:
            try:
                for position in work.run():
                    progress.update(position, f"{human_count(work.entries)} entries")
            except TieredIndexError:
                index.flush()
                raise
        index.flush()
        if wait:
            settle(index, patience, lambda total: session.progress("compacting and uploading", total))
        document: dict[str, Any] = {
            "status": "complete",
            "source": str(work.folder),
            "source_name": work.source,
            "store": str(work.store.folder),
            "resumed_from": start,
            "position": work.position,
            "index_files": work.files,
            "entries_read": work.read,
            "entries": work.entries,
            "missing_messages": work.missing,
            "missing_offsets": work.missing_offsets,
            "hidden_messages": work.hidden,
            "mismatched_entries": work.mismatched,
            "elapsed_s": round(time.monotonic() - started_s, 3),
            "files": index.health()["files"],
        }
    session.out.answer(document)
    session.out.fields(_fields(document))
    return 0


def _fields(document: dict[str, Any]) -> dict[str, object]:
    named = ", ".join(map(str, document["missing_offsets"][:5]))
    more = ", ..." if document["missing_messages"] > 5 else ""
    return {
        "source": document["source"],
        "store": document["store"],
        "index files": document["index_files"],
        "entries read": document["entries_read"],
        "entries": document["entries"],
        "messages missing": f"{human_count(document['missing_messages'])} (at {named}{more})"
        if document["missing_messages"]
        else None,
        "messages hidden": document["hidden_messages"] or None,
        "hashes of nobody": document["mismatched_entries"] or None,
        "time": human_seconds(document["elapsed_s"]),
        "files": states(document["files"]) or "none",
    }
