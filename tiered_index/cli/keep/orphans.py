"""`tiered-index orphans`: objects that the log does not name; a dry run unless --yes."""

from __future__ import annotations

from typing import Any

from tiered_index.cli.session import Session, open_stored_index
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.storage.base import ObjectInfo


def orphans(session: Session, *, older_than: int, yes: bool) -> int:
    """Find objects that the log does not name."""
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
