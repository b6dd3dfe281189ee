"""Erasing records of Kafka out of the archive: a file is written again without them. Threads: any.

The real keys decide, not their hashes. A file that lacks keys which a function gave is not searched for keys: then only
whole topics and partitions are erased.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tiered_index.connectors.archive import times_in
from tiered_index.connectors.kafka.columns import FORMAT, keys_of_file, keys_of_rows, lacks_function, records_of
from tiered_index.connectors.kafka.names import Name
from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.service.jobs.erase import EraseRequest
from tiered_index.service.jobs.segments.erase_segments import FoundMessages
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.segments.archive import SegmentArchive


@dataclass(frozen=True)
class RecordsToErase:
    """Finds the records of a request in columnar segments: a `FindMessages`.

    Records with a time before `before_ms` are erased; the time of a record without one is that of its upload. `keyed`:
    the index has fingerprints. `keys` is what `--key` gave, beside what the files tell.
    """

    request: EraseRequest
    before_ms: int
    keyed: bool = True
    keys: frozenset[str] = frozenset()

    def __call__(self, archive: SegmentArchive, segment: ArchivedSegment) -> FoundMessages:
        """Return the result for a segment. Raises as the storage."""
        name, request = Name.parse(segment.store), self.request
        if name is None or name.topic != request.topic or request.queue_id not in (None, name.partition):
            return FoundMessages()
        try:
            file = archive.verified(segment, 0, segment.size_bytes)
            table, notes = FORMAT.decode(file, segment.name)
        except (CorruptFile, ObjectNotFound) as error:
            return FoundMessages(problem=str(error))
        rules = keys_of_file(file)
        if request.keys and lacks_function(rules, self.keys):
            lack = f"{segment.name} was archived without the keys that a function gave"
            return FoundMessages(problem=f"{lack}: erase the partition, or the topic")
        before_s, sought = self.before_ms // 1000, set(request.keys)
        records = records_of(table)
        stays, others = list[bool](), list[str]()
        for record, keys in zip(records, keys_of_rows(table, rules, self.keys), strict=True):
            time_ms = segment.published_ms if record.timestamp_ms is None else record.timestamp_ms
            of_record = set(keys) if sought and time_ms // 1000 < before_s else set()
            others += of_record - sought
            stays.append(time_ms // 1000 >= before_s or (bool(sought) and of_record.isdisjoint(sought)))
        if all(stays):
            return FoundMessages()
        array = pa.array(others, pa.large_string())
        collisions = request.collisions(array, np.zeros(len(others), np.bool_), keyed=self.keyed)
        rest = table.filter(pa.array(stays))
        file, gone = FORMAT.encode(rest, notes), len(records) - len(rest)
        return FoundMessages(gone, file=file, collisions=collisions, rows=len(rest), times=times_in(rest))
