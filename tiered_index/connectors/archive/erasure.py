"""Erasing messages out of the columnar archive, of any connector: a file is written again without them. Threads: any.

The shared columns find them. The real keys decide, not their hashes. If not all keys of a file are known, it is not
searched for keys: then only whole topics and queues are erased.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.connectors.archive.columns import ArchiveFormat, times_in
from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.format.names import queue_id_of_store, topic_of_store
from tiered_index.service.jobs.erase import EraseRequest, MakeFind
from tiered_index.service.jobs.segments.erase_segments import FoundMessages
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.segments.archive import SegmentArchive


@dataclass(frozen=True)
class ColumnsToErase:
    """Finds the messages of a request in columnar segments: a `FindMessages`.

    Messages with a time before `before_ms` are erased; the time of a message without one is that of its upload.
    `keyed`: the index has fingerprints. `rules`: those of keys, beside what the files tell (`ArchiveFormat.keys`).
    """

    form: ArchiveFormat
    request: EraseRequest
    before_ms: int
    keyed: bool = True
    rules: frozenset[str] = frozenset()

    def __call__(self, archive: SegmentArchive, segment: ArchivedSegment) -> FoundMessages:
        """Return the result for a segment. Raises as the storage."""
        if not may_have(segment.store, self.request):
            return FoundMessages()
        try:
            table = self.form.read(archive, segment)
        except (CorruptFile, ObjectNotFound) as error:
            return FoundMessages(problem=str(error))
        records = table.records
        times_ms = records["timestamp"].cast(pa.int64()).fill_null(segment.published_ms)
        is_due = pc.and_(pc.equal(records["topic"], self.request.topic), pc.less(times_ms, self._before_ms))
        gone, collisions = np.flatnonzero(is_due.to_numpy()), 0
        if self.request.keys and len(gone):
            keys = self.form.keys_of(table._replace(records=records.take(pa.array(gone))), self.rules)
            if isinstance(keys, str):
                return FoundMessages(problem=f"{segment.name} {keys}: erase the queue, or the topic")
            texts = pc.list_flatten(keys).cast(pa.large_string())
            is_sought = pc.is_in(texts, pa.array(self.request.keys, pa.large_string())).to_numpy(zero_copy_only=False)
            gone = gone[np.unique(pc.list_parent_indices(keys).to_numpy()[is_sought])]
            collisions = self.request.collisions(texts, is_sought, keyed=self.keyed) if len(gone) else 0
        if not len(gone):
            return FoundMessages()
        stays = np.ones(len(records), bool)
        stays[gone] = False
        rest = records.filter(pa.array(stays))
        file = self.form.encode(rest, table.notes)
        return FoundMessages(len(gone), file=file, collisions=collisions, rows=len(rest), times=times_in(rest))

    @property
    def _before_ms(self) -> int:
        return self.before_ms // 1000 * 1000


def columns_to_erase(form: ArchiveFormat, request: EraseRequest, rules: Collection[str] = ()) -> MakeFind:
    """Return what finds the messages of a request in the segments of a form: `Connector.erasure` of columnar archives.

    `rules` of keys are those of the index, beside what the files tell.
    """
    return partial(ColumnsToErase, form, request, rules=frozenset(rules))


def may_have(store: str, request: EraseRequest) -> bool:
    """Return whether a store of columnar segments may have messages of a request, by topic and queue in its name."""
    queues = None, queue_id_of_store(store)
    return topic_of_store(store) in (request.topic, None) and request.queue_id in queues
