"""A catalog's files as one call of the compiled core searches them.

A view has the local files of one moment, and never changes; a lookup keeps the one that it began with. It holds the
files' maps: a map is closed once no view has it any more. The caller searches the files that are `left`: other files,
and files that the core declines (damage, slot groups in blocks, long chains). Threads: any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tiered_index.format.schema import Schema, row_form
from tiered_index.kernels import compiled_views
from tiered_index.service.answers.rows import MOST_ROWS, PreparedLookup
from tiered_index.service.catalog.catalog import FileLabel, Handle, label_of
from tiered_index.service.files.compacted import CompactedFile
from tiered_index.service.files.unsealed import UnsealedFile

if TYPE_CHECKING:
    from tiered_index._views import View, ViewRows

# notes of `View.find`: out of range, needless because of newer answers, left to the caller
_AWAY, _SKIPPED, _LEFT = -1, -2, -3


class ViewNote(NamedTuple):
    """The number of rows that a lookup found in a file; None: it skipped the file."""

    label: FileLabel
    rows: int | None


def notes_of(found: ViewRows) -> Iterator[ViewNote]:
    """Yield a note for each file in range, except those that are `left`."""
    for label, note in zip(found.handles, found.notes, strict=True):
        if note not in (_AWAY, _LEFT):
            yield ViewNote(label, None if note == _SKIPPED else note)


class LocalView:
    """The files of a catalog, `handles`, for lookups of rows of `schema`."""

    def __init__(self, schema: Schema, handles: Sequence[Handle]) -> None:
        core = compiled_views()
        assert core is not None
        growing = [handle for handle in handles if isinstance(handle, UnsealedFile) and not handle.ended]
        rest = [handle for handle in handles if not isinstance(handle, UnsealedFile) or handle not in growing]
        rest.sort(key=lambda handle: (-handle.second_max, -handle.sequence, handle.file_id))
        self.handles: list[Handle] = [*growing, *rest]
        files = [(_in_core(handle, schema), handle.second_min, handle.second_max) for handle in self.handles]
        # labels: an answer, which may be kept for long, keeps no file open
        labels = [handle.label if isinstance(handle, UnsealedFile) else label_of(handle) for handle in self.handles]
        self.core: View = core.View(row_form(schema), files, labels)

    def find(self, lookup: PreparedLookup) -> ViewRows | None:
        """Return the rows of the files for a lookup. None: two rows may be one answer, or the core does not know the
        cursor's place: the caller has to search file by file.
        """
        after, high = lookup.page_end, lookup.second_max
        if lookup.after is not None:
            if after is None:
                return None
            high = min(high, after[0])
        hashes = lookup.key_hash, lookup.masked_hash, lookup.fingerprint
        return self.core.find(lookup.topic, *hashes, lookup.second_min, high, min(lookup.max_count, MOST_ROWS), after)

    def left(self, found: ViewRows) -> list[Handle]:
        """Return the files that the caller of `find` has to search."""
        if not found.has_left:
            return []
        return [handle for handle, note in zip(self.handles, found.notes, strict=True) if note == _LEFT]


def _in_core(handle: Handle, schema: Schema) -> object:
    """Return the core's object of a file; None: it has none."""
    if isinstance(handle, UnsealedFile) and handle.layout.schema == schema:
        return handle.in_core()
    if isinstance(handle, CompactedFile) and handle.local is not None and handle.metadata().layout.schema == schema:
        return handle.local.in_core()
    return None
