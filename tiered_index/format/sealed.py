"""A sealed file apart from its entries: everything that its compacted form says beside them, and how that form is made. Pure.

Who has this and the entries makes the same bytes, whether that is the file's writer or a job elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.documents import COUNT, MILLISECONDS, Malformed, Optional, integer, nullable, record, text
from tiered_index.format.compacted import Compaction
from tiered_index.format.layout import Layout
from tiered_index.format.trailer import FILE_ID, POSITIONS, PREDECESSOR, topic_table

__all__ = ["SealedFile"]


@dataclass(frozen=True, kw_only=True)
class SealedFile:
    """`begin_ms` and `end_ms` are the header's, `created_ms` is when the file was begun; `writer` is told in the metadata.

    `log_number` is that of a record of the storage's log before any that names the file; 0 where none is known.
    """

    file_id: str
    layout: Layout
    begin_ms: int
    end_ms: int
    count: int
    lane: str
    sequence: int
    predecessor: tuple[str, int] | None
    created_ms: int
    offset_space: str
    topics: tuple[tuple[int, str], ...]
    positions: dict[str, int]
    writer: str
    log_number: int = 0

    def compacted(self, entries: npt.NDArray[Any]) -> Iterator[bytes | memoryview]:
        """Yield the compacted file in pieces, the trailer last; `entries` as `Compaction` takes them."""
        return Compaction(entries, self.layout, self.begin_ms, self.end_ms).pieces(
            file_id=self.file_id,
            topics=self.topics,
            source_positions=self.positions,
            lane=self.lane,
            offset_space=self.offset_space,
            writer=self.writer,
            more={"sequence": self.sequence, "predecessor": list(self.predecessor) if self.predecessor else None,
                  "created_ms": self.created_ms, **self._log_number_json()},
        )  # fmt: skip

    @property
    def entry(self) -> np.dtype[Any]:
        """Type of the entries."""
        return self.layout.schema.entry

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return {
            "file_id": self.file_id, "layout": self.layout.to_json(), "begin_ms": self.begin_ms, "end_ms": self.end_ms,
            "count": self.count, "lane": self.lane, "sequence": self.sequence,
            "predecessor": list(self.predecessor) if self.predecessor else None, "created_ms": self.created_ms,
            "offset_space": self.offset_space, "topics": [list(pair) for pair in self.topics], "positions": self.positions,
            "writer": self.writer, **self._log_number_json(),
        }  # fmt: skip

    def _log_number_json(self) -> dict[str, int]:
        """Return the optional member: none where no number is known, as in files of older versions."""
        return {"log_number": self.log_number} if self.log_number else {}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> SealedFile:
        """Return what `to_json` described. Raises `Malformed`, `ConfigError`."""
        return _READ(document)


def _sealed(**fields: Any) -> SealedFile:
    sealed = SealedFile(**fields)
    if sealed.count > sealed.layout.capacity:
        raise Malformed(f"{sealed.layout.capacity} entries at most", sealed.count, ".count")
    return sealed


_READ = record(
    _sealed, file_id=FILE_ID, layout=Layout.from_json, begin_ms=MILLISECONDS, end_ms=MILLISECONDS, count=integer(1, 2**31), lane=text(),
    sequence=COUNT, predecessor=nullable(PREDECESSOR), created_ms=MILLISECONDS, offset_space=text(), topics=topic_table,
    positions=POSITIONS, writer=text(), log_number=Optional(COUNT, 0),
)  # fmt: skip
