"""The contract of a connector: what a command asks of it. `tiered_index.connectors.registry` finds connectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from tiered_index.types import Explain

if TYPE_CHECKING:
    from tiered_index.config import IndexConfig
    from tiered_index.connectors.source import Archiver, Source
    from tiered_index.format.topic_documents import TopicDocument
    from tiered_index.service.index import IndexService
    from tiered_index.service.jobs.erase import EraseRequest, MakeFind
    from tiered_index.service.jobs.repair import SourceOfSegments
    from tiered_index.service.log.log import StorageLog
    from tiered_index.service.read.answers.messages import Fetched, FoundMessage, MessageSource
    from tiered_index.service.read.segments.archive import SegmentArchive
    from tiered_index.service.reader import IndexReader
    from tiered_index.storage.base import Storage
    from tiered_index.storage.probe import AbilityFinding


@dataclass(frozen=True, kw_only=True)
class SourceRun:
    """A run that reads a source.

    - `addresses`: the source, as the user wrote it; several only if `ConnectorSpec.several`.
    - `options`: the connector's options; None: it has none, or none were given.
    - `name`: the name of the source in the index; None: the connector's default.
    - `follow`: whether the run goes on at the end of the source.
    - `restart`: whether it reads the source from its start.
    - `stopped`: returns whether the run is to end.
    - `note`: called with each message for the operator.
    - `poll_s`: the seconds between rounds; None: those of the source.
    - `checked`: what `SourceConnector.check` returned for this run; None: nothing.
    """

    addresses: tuple[str, ...]
    options: Any = None
    name: str | None = None
    follow: bool = True
    restart: bool = False
    stopped: Callable[[], bool] = bool
    note: Callable[[str], None]
    poll_s: float | None = None
    checked: Any = None

    @property
    def address(self) -> str:
        """The only address."""
        (address,) = self.addresses
        return address


class OpenedSource(NamedTuple):
    """A source, what archives its messages (None: nothing), and the name by which answers and documents call it."""

    source: Source
    archiver: Archiver | None
    name: str


@dataclass(frozen=True, kw_only=True)
class MessagePlaces:
    """The places where the messages of an index can be read again.

    - `index`: the index; None: there is only `place`.
    - `config`: the settings of the index.
    - `place`: what `Connector.place` opened, beside the archive; None: nothing.
    - `documents`: returns the document of each topic of the index, as `IndexReader.topic_documents`.
    """

    index: IndexReader[Any] | IndexService[Any] | None
    config: IndexConfig
    place: Any
    documents: Callable[[], Mapping[str, TopicDocument]]

    @property
    def archives(self) -> Mapping[str | None, SegmentArchive]:
        """The archives of the index, as `IndexReader.segment_archives`."""
        return self.index.segment_archives if self.index is not None else {}


class PlacedMessage(NamedTuple):
    """A message and its place, or the reason why it can't be read."""

    queue_id: int
    queue_offset: int
    message: FoundMessage | None
    problem: str | None = None


@dataclass(frozen=True)
class BrowsedMessages:
    """A page of messages, the oldest first. `earlier` and `later` continue it; None: there is nothing more now.

    `ends` has the first offset of each queue and that after the last one.
    """

    messages: tuple[PlacedMessage, ...]
    earlier: str | None
    later: str | None
    ends: Mapping[int, tuple[int, int]]
    explain: Explain = field(default_factory=Explain)

    @property
    def status(self) -> Literal["complete", "partial"]:
        """``partial``: a message of the page can't be read."""
        return "partial" if any(message.problem for message in self.messages) else "complete"

    def __len__(self) -> int:
        return len(self.messages)


class TopicQueues(Protocol):
    """Reads the queues of topics without an index: what `ConnectorSpec.queues` makes of messages. Threads: any."""

    def __init__(self, messages: Any) -> None: ...

    def page(
        self,
        topic: str,
        queue_id: int | None,
        at_ms: int | None,
        cursor: str | None,
        max_count: int,
        claim: Callable[[int, bool], bool],
    ) -> BrowsedMessages | str:
        """Return up to `max_count` messages around `at_ms`, or those that `cursor` names; a text says why none are.

        `claim` is called before a message is read, with its size in bytes and whether it is read anyway. If it returns
        False, the page ends. Raises `InvalidArgument` for a cursor of another request.
        """

    def at(self, topic: str, queue_id: int, queue_offset: int) -> Fetched:
        """Return the message at an offset of a queue. Raises `InvalidArgument` without queue offsets."""


class Connector(Protocol):
    """Reads messages of one kind of source again, and finds those of an erasure. Threads: any.

    If `ConnectorSpec.places` has a form, `parse_place(text)` returns the topic and the further parts of such a place,
    or raises `InvalidArgument`, and the source that `messages` returns has ``at(topic, *parts)``, which returns a
    `Fetched`. If messages have ids, `check_id(text)` raises `InvalidArgument` for a text that is none.

    If it archives columns, `archived_logs(archive, takes)` returns a `ColumnLog` for each of its logs in an archive,
    also for those of which the index has only entries. `takes` returns whether the messages of a topic are asked for.
    If options of a run decide what a document says, `document_again(document, options)` returns that of a topic whose
    archived messages go into another index.
    """

    def place(self, options: Any, address: str | None = None) -> Any:
        """Open the place of messages that options or an address name; None: they name none. The caller closes it."""

    def messages(self, places: MessagePlaces) -> MessageSource:
        """Return the source of the messages of all topics that the connector put. Raises `InvalidArgument`.

        If it has a `close`, the caller calls it. If several topics share a log, let it have `seen_by(sees)`, which
        returns a source for a caller that sees only some topics. If messages have ids beside their keys, let it have
        `by_id(lookups, id, topic, cursor, allow_partial, max_message_bytes=, **limits)`, which returns a
        `MessagesResult`. Threads: any, once it is made.
        """

    def erasure(self, request: EraseRequest, document: TopicDocument | None) -> MakeFind:
        """Return a function that finds the messages of a request in archived segments of the connector.

        `document` is that of the topic; None: it has none. Spark's tasks get the function, so it can be pickled.
        """


Repairing = Callable[["Storage", "StorageLog"], "SourceOfSegments"]
"""Returns what restores the archived segments of a storage, by its log."""


class SourceConnector(Connector, Protocol):
    """A connector whose sources a `Follower` drives (`ConnectorSpec.follows`). Threads: any, each source one.

    If its archived segments are the bytes of its source, it has `repairs(run)`, which returns a `Repairing`. With a
    run, its source restores segments; None: other copies do. Raises the errors of a wrong address.
    """

    def check(self, run: SourceRun, config: IndexConfig) -> AbstractContextManager[Any] | None:
        """Raise the errors of a wrong address and of wrong options, before an index of these settings is made.

        Return what `source` can use again, as a context; None: nothing.
        """

    def source(self, run: SourceRun, index: IndexService) -> OpenedSource:
        """Open the source, whose entries go into `index`. The caller closes it."""

    def doctor(self, run: SourceRun, config: IndexConfig) -> list[AbilityFinding]:
        """Return what a source has, and what it lacks, for `tiered-index doctor --source`. Changes nothing.

        Raises the errors of a wrong address, and of a source that does not answer. If a connector lacks this method,
        `check` decides.
        """

    def watch(self, tell: Callable[[str], None]) -> AbstractContextManager[Callable[[], list[str]]]:
        """Return a context around all that reads sources; its value returns present problems of the process.

        A connector whose client may hang ends the process there, after it told the reason.
        """


@contextmanager
def checked(connector: SourceConnector, run: SourceRun, config: IndexConfig) -> Iterator[SourceRun]:
    """Yield a run that is checked, with what its check has opened. Raises as `SourceConnector.check`."""
    with connector.check(run, config) or nullcontext() as opened:
        yield replace(run, checked=opened)
