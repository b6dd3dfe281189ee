"""`tiered-index recover`: open a root as its writer, which repairs what a crash left, and say what was found."""

from __future__ import annotations

from typing import Any

from tiered_index.cli.files import describe_handle
from tiered_index.cli.output import states
from tiered_index.cli.session import Session, command
from tiered_index.errors import ConfigError, CorruptFile, NotAnIndex, StorageUnavailable
from tiered_index.service.files.compacted import DamagedFile
from tiered_index.service.index import IndexService
from tiered_index.service.reader import IndexReader
from tiered_index.service.root.root import Root
from tiered_index.storage.disk import Disk


@command
def recover(session: Session) -> int:
    """Recover a root after a crash: drop half-made work, move files to the state they reached, rebuild hash chains.

    Every command that writes does this when it starts; here it is done alone and reported. A root that is gone is begun
    anew where --storage names an index. Exit code 4: a file is damaged and kept as it is; 3: the storage did not
    answer.

    [bold]Examples[/bold]

      tiered-index recover --root /data/index

      tiered-index recover --root /data/new --storage s3://bucket/index --json
    """
    config = session.config(background=False)
    if config.root is None:
        raise ConfigError("root is not set: give --root")
    if Root(config.root, Disk()).read_marker() is None:
        if config.storage is None:
            raise NotAnIndex(f"{config.root} holds no tiered index; to begin it anew give --storage too")
        # raises where the storage holds no index either: recovery creates none
        IndexReader.open(config=config.model_copy(update={"root": None})).close()
    with IndexService.open(config) as index:
        handles = index.files()
        damaged = [handle for handle in handles if isinstance(handle, DamagedFile)]
        health = index.health()
        document: dict[str, Any] = {
            "index_id": index.index_id,
            "status": "damaged" if damaged else "recovered",
            "storage": "reached" if health["writer_epoch"] else "not reached",
            "notes": list(index.recovery_notes),
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
    if damaged:
        return CorruptFile.exit_code
    return 0 if document["storage"] == "reached" else StorageUnavailable.exit_code
