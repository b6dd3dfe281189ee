"""Erases entries of an index, and their archived messages, which the connector of each segment finds.

Threads: any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.connectors.archive.erasure import may_have
from tiered_index.connectors.contract import Connector
from tiered_index.connectors.documents import lacking
from tiered_index.connectors.registry import CONNECTORS, OF_OTHERS
from tiered_index.errors import ConfigError
from tiered_index.format.topic_documents import TopicDocument, newest_of
from tiered_index.service.jobs.erase import GRACE_S, EraseRequest, Erasure, MakeFind, Progress, erase
from tiered_index.service.jobs.segments.erase_segments import FoundMessages
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.storage.base import StorageOptions
from tiered_index.storage.opening import open_storage
from tiered_index.types import no_progress


@dataclass(frozen=True)
class _Find:
    """Finds the messages of a request in archived segments of any connector: a `FindMessages`."""

    request: EraseRequest
    # that of the topic
    document: TopicDocument | None
    before_ms: int
    keyed: bool

    def __call__(self, archive: SegmentArchive, segment: ArchivedSegment) -> FoundMessages:
        # the bytes of a log may have messages of every topic and queue
        if segment.columns is not None and not may_have(segment.store, self.request):
            return FoundMessages()
        name = OF_OTHERS if segment.columns is None else CONNECTORS.of_store(segment.store)
        try:
            connector: Connector = CONNECTORS.connector(name)
            problem = None
        except ConfigError as error:
            problem = str(error)
        if self.document is not None and self.document.connector == name:
            # it may name the package, or have a newer version
            problem = lacking(self.document) or problem
        if problem is not None:
            return FoundMessages(problem=f"{segment.name}: {problem}")
        return connector.erasure(self.request, self.document)(self.before_ms, self.keyed)(archive, segment)


def messages_to_erase(request: EraseRequest, state: LogState) -> MakeFind:
    """Return a function that finds the messages of a request in archived segments. `state` is that of the log."""
    return partial(_Find, request, newest_of(request.topic, [state.documents]))


def erase_index(
    storage: str,
    topic: str,
    *,
    keys: str | Sequence[str] | None = None,
    queue_id: int | None = None,
    before_ms: int | None = None,
    yes: bool = False,
    now: bool = False,
    grace_s: float = GRACE_S,
    threads: int = 2,
    s3: StorageOptions | None = None,
    clock: Clock | None = None,
    progress: Progress = no_progress,
) -> Erasure:
    """Erase entries of a topic that are older than `before_ms`; without `yes` only return the plan.

    `before_ms` is in epoch milliseconds (None: now). The entries are those of `keys`, of a queue, or of the whole topic
    (`keys` None; an empty list is refused). One log record hides them permanently, also those that arrive later. The
    next merges leave their bytes out. With `now` the objects that hold them are rewritten at once, and objects that
    records removed `grace_s` seconds ago are deleted. A key is identified by hash and fingerprint, in an index without
    fingerprints by its hash. `progress` is called with the present step, the steps done and their number. `threads`
    tasks run at once. `s3` has the options of S3. `clock` replaces the clock in tests.

    Returns the certificate. You may repeat the call, also beside writers, readers and merges. Raises `InvalidArgument`,
    `NotAnIndex`, `CorruptFile`, `StorageUnavailable`, `StorageMisconfigured`.
    """
    request, present = EraseRequest.of(topic, keys, queue_id, before_ms), clock or SystemClock()
    with contextlib.closing(open_storage(storage, options=s3)) as opened:
        log = StorageLog(opened, present)
        log.open()
        find = messages_to_erase(request, log.state)
        chosen: dict[str, Any] = {"yes": yes, "now": now, "grace_s": grace_s, "threads": threads}
        return erase(opened, log, request, present, **chosen, messages=find, progress=progress)
