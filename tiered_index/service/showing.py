"""Making a catalog show what the log says: the one way by which stored files and window tables come to queries, and go. Threads: any."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tiered_index.service.catalog import Catalog, Handle
from tiered_index.service.cold.path import ColdPath
from tiered_index.service.compacted_file import CompactedFile, open_stored
from tiered_index.service.log_records import LogState
from tiered_index.service.window_table import WindowTable

__all__ = ["show_stored"]


def show_stored(
    catalog: Catalog,
    handles: Iterable[Handle],
    state: LogState,
    cold: ColdPath,
    dispose: Callable[[str], Callable[[], None] | None],
    keeps: Callable[[CompactedFile], bool] = lambda _: False,
) -> None:
    """Make the catalog show exactly the objects of `state` beside the local files; `dispose` names what goes with a removed file.
    `keeps` says which local copies stay although their file was merged.

    `handles` must have been taken before `state`: what was published in between is not among them and stays. What the cold path has noted
    of objects that are gone is forgotten, so that a reader that lives for years doesn't grow with those that came and went.
    """
    # tables first: what they were merged out of goes after them, so that a lookup meets an entry at least once
    for table, shards in state.tables.items():
        if catalog.get(table) is None:
            catalog.put(WindowTable(cold, shards))
    for handle in handles:
        if isinstance(handle, CompactedFile) and handle.stored is not None and handle.file_id not in state.files:
            if keeps(handle):
                continue
            catalog.remove(handle.file_id, dispose(handle.file_id) if handle.local is not None else None)
        elif isinstance(handle, WindowTable) and handle.file_id not in state.tables:
            catalog.remove(handle.file_id)
    for file_id, stored in state.files.items():
        if catalog.get(file_id) is None:
            catalog.put(open_stored(cold, stored))
    cold.forget_unnamed(state.objects)
