"""`tiered-index orphans`: objects that the log does not name; a dry run unless --yes."""

from __future__ import annotations

from typing import Any

from typer import Option

from tiered_index.cli.options import duration_option
from tiered_index.cli.output import counted, human_bytes
from tiered_index.cli.session import Session, command, open_stored_index
from tiered_index.service.lifecycle.orphans import delete_orphans, find_orphans
from tiered_index.storage.base import ObjectInfo
from tiered_index.types import format_time


@command
def orphans(
    session: Session,
    older_than: int = Option(
        86400,
        parser=duration_option,
        metavar="1d",
        help="Only what is older; below a day, see above.",
        show_default="1d",
    ),
    yes: bool = Option(False, "--yes", help="Delete them; without it they are only listed."),
) -> int:
    """Find objects that the log does not name: what crashes left, and what merges have replaced.

    Unfinished uploads, too.

    Nothing younger than --older-than is touched, nor what a merge removed since: an upload may be under way, and a
    reader may still stand at the log position before the merge.

    Neither jobs nor writers publish what they began to upload 23 hours ago, so a day is safe beside any. Take less only
    where no merge, build, write or compaction runs, and no writer waits for the storage, for that long: it would fail,
    or lose what it publishes.

    Objects in the index's folders (log/, data/ ...) that no index makes, such as log/note.txt, are listed as foreign,
    whatever their age. The index ignores them, and --yes leaves them to whoever put them there. What no object's name
    can be (a blank, a % sign) is not seen at all.

    [bold]Examples[/bold]

      tiered-index orphans --storage s3://bucket/index

      tiered-index orphans --storage s3://bucket/index --older-than 7d --yes --json
    """
    with open_stored_index(session.config()) as index:
        found = find_orphans(index.storage, index.log, older_than_s=older_than)
        if yes:
            found = delete_orphans(index.storage, found)
        costs = index.costs
    document: dict[str, Any] = {
        "status": "deleted" if yes else "found",
        "objects": [_described(info) for info in found.objects],
        "uploads": [handle.name for handle in found.uploads],
        "foreign": [_described(info) for info in found.foreign],
        "bytes": found.size_bytes,
        **costs,
    }
    session.out.answer(document)
    for info in found.objects:
        session.out.line(_bytes_line(info))
    for info in found.foreign:
        session.out.line(f"{_bytes_line(info)}  foreign")
    for handle in found.uploads:
        session.out.line(f"{handle.name}  unfinished upload")
    what = (
        f"{counted(len(found.objects), 'object')} ({human_bytes(found.size_bytes)}), "
        f"{counted(len(found.uploads), 'unfinished upload')}"
    )
    session.out.line(f"{what} {'deleted' if yes else 'found'}")
    if found.foreign:
        session.out.line(f"{counted(len(found.foreign), 'foreign object')} left alone")
    if not yes and (found.objects or found.uploads):
        session.out.remark("nothing was deleted: --yes does that")
    return 0


def _described(info: ObjectInfo) -> dict[str, Any]:
    return {"object": info.name, "bytes": info.size_bytes, "modified_ms": info.modified_ms}


def _bytes_line(info: ObjectInfo) -> str:
    return f"{info.name}  {human_bytes(info.size_bytes)}  {format_time(info.modified_ms)}"
