"""Source positions: which of them the log may say once a file is published.

A position in the log promises that the storage has everything of the source before it. Pure. Threads: any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiered_index.format.journal import Journal
from tiered_index.format.names import UPLOADED
from tiered_index.service.catalog import Handle
from tiered_index.service.compacted_file import CompactedFile, DamagedFile
from tiered_index.service.lanes import QUARANTINE
from tiered_index.service.log_records import max_positions
from tiered_index.service.unsealed_file import UnsealedFile
from tiered_index.service.window_table import WindowTable

__all__ = ["durable_positions", "own_positions", "positions_of", "says_more"]


def durable_positions(file: CompactedFile | UnsealedFile | Journal, handles: Sequence[Handle]) -> dict[str, int]:
    """Return the source positions that are true once `file` is published: those before which no entry waits in another of `handles`.

    A main file's positions say nothing of quarantine and of damaged files; a quarantine file's say nothing of main files.
    """
    waiting = [h for h in handles if h.file_id != file.file_id and not _is_stored(h)]
    if any(isinstance(h, DamagedFile) or h.lane == QUARANTINE or h.sequence < file.sequence for h in waiting):
        return {}
    if waiting:
        return own_positions(file) if file.lane != QUARANTINE else {}
    return max_positions(own_positions(file), positions_of(handles))


def positions_of(handles: Iterable[Handle]) -> dict[str, int]:
    """Return the greatest position of each source that local files say."""
    positions: dict[str, int] = {}
    for handle in handles:
        if isinstance(handle, UnsealedFile) or (isinstance(handle, CompactedFile) and handle.local is not None):
            positions = max_positions(positions, own_positions(handle))
    return positions


def own_positions(file: CompactedFile | UnsealedFile | Journal) -> dict[str, int]:
    """Return the positions that a file says, or the journal that is left of one."""
    return file.metadata().source_positions if isinstance(file, CompactedFile) else file.positions


def says_more(file: CompactedFile | UnsealedFile | Journal, said: dict[str, int]) -> bool:
    """Return whether a file says a source's position that `said` doesn't reach."""
    return max_positions(said, own_positions(file)) != said


def _is_stored(handle: Handle) -> bool:
    """Return whether the storage has a file, or what it was merged into."""
    if isinstance(handle, UnsealedFile):
        return handle.published
    if isinstance(handle, CompactedFile):
        return handle.stored is not None or handle.folder == UPLOADED
    return isinstance(handle, WindowTable)
