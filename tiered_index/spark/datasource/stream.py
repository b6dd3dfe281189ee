"""`format("rocketmq_commitlog")`, and its stream: a commit log as it grows. docs/spark-sources.md.

An offset is ``{"position": p, "before": crc}``: where a message begins (-1: a log that has nothing yet), and the CRC-32
of up to 4 KiB before it in its segment (-1: not known), by which a log is recognised that was truncated and rewritten.
Only the last part of a micro-batch is walked on the driver, to end it at a message that is whole for certain
(`rocketmq/follow/tail.py`). The driver keeps one reader a query; one thread calls it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.rocketmq.follow.tail import EVERYTHING, LastRead, stable_end, stable_part
from tiered_index.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.rocketmq.log.layout import BLANK_BYTES
from tiered_index.rocketmq.log.segments import End, Segment, list_segments
from tiered_index.spark.datasource.entries import require_columns
from tiered_index.spark.datasource.messages import MessageReader, MessageSettings, Stretch, chunk_bytes, read_stretch
from tiered_index.spark.datasource.options import TaskPartition

_FINGERPRINT_BYTES = 4_096
_UNKNOWN = -1
_NO_BOUND = 2**63 - 1


class MessageStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One stream over one local commit log. Raises `CorruptFile`, and `MissingOffsets` where it lacks what is next."""

    def __init__(self, settings: MessageSettings, schema: StructType) -> None:
        if settings.archive is not None:
            raise InvalidArgument(
                f"a stream follows a local commit log, and {settings.path} is an archive of closed segments"
            )
        if settings.explain is not None:
            raise InvalidArgument(
                "option explain tells what a batch read asks; for a stream look at the progress of its query"
            )
        require_columns(schema, settings.columns, f"the commit log in {settings.path}")
        self._settings, self._schema, self._folder = settings, schema, settings.folder
        self._target = _NO_BOUND
        self._last_read: LastRead | None = None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return what maxBytesPerTrigger says."""
        return ReadAllAvailable() if self._settings.max_bytes is None else ReadMaxBytes(self._settings.max_bytes)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the beginning of the first segment."""
        segments = list_segments(self._folder)
        return _offset(segments, segments[0].start) if segments else {"position": -1, "before": _UNKNOWN}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the end of a micro-batch from `start`: whole messages within the limit, at least one."""
        segments = list_segments(self._folder)
        if not segments:
            if (position := start["position"]) > 0:
                raise MissingOffsets(str(self._folder), "the log has no segment any more", position, position)
            return start
        self._check(segments, start)
        position = segments[0].start if start["position"] < 0 else int(start["position"])
        bound = position + limit.max_bytes if isinstance(limit, ReadMaxBytes) else _NO_BOUND
        end = self._end(segments, position, min(bound, self._target)) if position < self._target else position
        return start if end == start["position"] else _offset(list_segments(self._folder), end)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Note where the log ends now; the query doesn't go beyond."""
        segments = list_segments(self._folder)
        written = [number for number in range(len(segments)) if _is_written(segments[number])]
        begin = segments[written[-1]].start if written else 0
        self._target = self._end(segments, begin, _NO_BOUND) if written else 0

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the ranges between two offsets, by segment. Raises as `latestOffset`."""
        segments = list_segments(self._folder)
        first, last = int(start["position"]), int(end["position"])
        if first == last:
            return []
        self._check(segments, start)
        self._check(segments, end)
        at = segments[0].start if first < 0 else first
        found: list[InputPartition] = []
        for segment in segments:
            if segment.start <= at < min(segment.end, last):
                stop = min(segment.end, last)
                found.append(TaskPartition(Stretch(at, stop, str(self._folder), is_whole=True)))
                at = stop
        if at < last:
            raise MissingOffsets(str(self._folder), "deleted or cut before they were read", at, last)
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a range's messages. Executor."""
        yield from read_stretch(partition.value, self._settings, self._schema)

    def _check(self, segments: tuple[Segment, ...], offset: dict[str, Any]) -> None:
        """Raise where the log before an offset isn't what it was, or the offset is in no segment."""
        position = int(offset["position"])
        if position < 0:
            return
        if segments and position < segments[0].start:
            raise MissingOffsets(str(self._folder), "deleted before they were read", position, segments[0].start)
        if not segments or position > segments[-1].end:
            end = segments[-1].end if segments else 0
            raise MissingOffsets(str(self._folder), "the log was cut: it ends before", end, position)
        now = _before(segments, position)
        if _UNKNOWN not in (offset["before"], now) and now != offset["before"]:
            raise CorruptFile(
                str(self._folder),
                f"the log was cut and written anew below commit log offset {position}: messages that a checkpoint has "
                "are no more, and others stand in their place; begin with a new checkpoint",
                expected=offset["before"],
                found=now,
            )

    def _end(self, segments: tuple[Segment, ...], position: int, bound: int) -> int:
        """Return the end of the last whole message up to `bound`, at least of the first behind `position`."""
        last = max((number for number, segment in enumerate(segments) if _is_written(segment)), default=-1)
        for number, segment in enumerate(segments[: last + 1]):
            if not segment.start <= position < segment.end:
                continue
            if number == last or segment.end > bound:
                return self._walk(segment, position, bound, closed=number < last)
            if segments[number + 1].start != segment.end and not self._settings.skip_corrupt:
                raise MissingOffsets(str(self._folder), "no segment has them", segment.end, segments[number + 1].start)
            position = segments[number + 1].start
        return position

    def _walk(self, segment: Segment, begin: int, bound: int, *, closed: bool) -> int:
        """Return the end of the last whole message of a segment within `bound`."""
        reader = CommitLogReader(self._folder, chunk_bytes(bound - begin), check_crc=True)
        position = begin
        stable = EVERYTHING if closed else stable_end(list_segments(self._folder), position, reader.chunk_bytes)
        try:
            for batch in reader.batches(position, skip_corrupt=self._settings.skip_corrupt):
                if batch.begin >= segment.end:  # only a blank, or damage that is skipped, was left of this one
                    return segment.end if position == begin else position
                last_read, self._last_read = self._last_read, None
                whole, self._last_read = stable_part(self._folder, batch, stable, last_read)
                ends = np.append(whole.positions[1:], whole.end - whole.begin)[: whole.messages] + whole.begin
                within = ends[ends <= bound]
                if len(within) < len(ends) or whole.state in (End.OPEN, End.TORN) or whole.end < batch.end:
                    if len(within):
                        return int(within[-1])
                    return int(ends[0]) if len(ends) and position == begin else position
                at_end = whole.state is End.SEGMENT and segment.end <= bound
                position = segment.end if at_end else max(position, whole.end)
                if position >= segment.end:
                    return position
                stable = EVERYTHING if closed else stable_end(list_segments(self._folder), position, reader.chunk_bytes)
        except CorruptFile:
            if position == begin:
                raise
        return position


def _is_written(segment: Segment) -> bool:
    return any(segment.read(BLANK_BYTES, 0))


def _before(segments: tuple[Segment, ...], position: int) -> int:
    """Return the CRC-32 of what stands before a position in its segment, `_UNKNOWN` where there is nothing."""
    for segment in segments:
        if segment.start < position <= segment.end:
            size = min(_FINGERPRINT_BYTES, position - segment.start)
            return zlib.crc32(segment.read(size, position - size - segment.start))
    return _UNKNOWN


def _offset(segments: tuple[Segment, ...], position: int) -> dict[str, Any]:
    return {"position": position, "before": _before(segments, position)}


class MessageSource(DataSource):
    """`format("rocketmq_commitlog")` for `spark.read` and `spark.readStream`: messages as rows."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "rocketmq_commitlog"

    def schema(self) -> StructType:
        """Return the columns of a message."""
        return self._settings().columns

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        return MessageReader(self._settings(), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a stream."""
        return MessageStreamReader(self._settings(), schema)

    def _settings(self) -> MessageSettings:
        return MessageSettings.of(self.name(), dict(self.options))
