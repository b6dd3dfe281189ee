"""`tiered-index orphans`: objects that the log does not name; a dry run unless --yes."""

from __future__ import annotations

from typing import Any

from typer import Option

from tiered_index.cli.options import duration
from tiered_index.cli.session import Session, command, open_stored_index
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.storage.base import ObjectInfo


@command
def orphans(
    session: Session,
    older_than: int = Option(
        **duration("1d"), help="List objects older than this, at least 1h. Less than a day may be unsafe."
    ),
    yes: bool = Option(False, "--yes", help="Delete them."),
) -> int:
    """Find objects that the log does not name.

    [bold]Examples[/bold]

      tiered-index orphans --storage s3://bucket/index

      tiered-index orphans --storage s3://bucket/index --older-than 7d --yes --json

    Crashes and merges leave such orphans. A running writer deletes them once a day, so you need this command only for
    an index without one. The command prints them. Pass --yes to delete them. It leaves out objects younger than
    --older-than: their upload may still run. It also leaves out objects that the log removed in that time: readers may
    still use them.

    The default of a day is always safe: jobs and writers publish nothing that they began to upload more than 23 hours
    ago. A shorter time is safe only if every merge, build and upload ends within it. Otherwise a job fails, or the
    index loses objects.

    The command also lists foreign objects in the index's folders (such as log/note.txt), whatever their age. The index
    ignores them, and --yes does not delete them. --yes also drops half-made uploads that are older than --older-than.
    """
    with open_stored_index(session.config()) as index:
        orphans_found = find_orphans(index.storage, index.log, older_than_s=older_than)
        if yes:
            orphans_found = delete_orphans(index.storage, orphans_found)
        costs = index.costs
    document = {
        "status": "deleted" if yes else "found",
        "objects": [_described(info) for info in orphans_found.objects],
        "foreign": [_described(info) for info in orphans_found.foreign],
        "bytes": orphans_found.size_bytes,
        **costs,
    }
    session.out.show(document, most=len(orphans_found.objects) + len(orphans_found.foreign))
    if not yes and orphans_found.objects:
        session.out.remark("nothing was deleted: pass --yes to delete")
    return 0


def _described(info: ObjectInfo) -> dict[str, Any]:
    return {"object": info.name, "bytes": info.size_bytes, "modified_ms": info.modified_ms}
