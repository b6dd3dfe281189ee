"""The contract of sources: what a `tiered_index.connectors.follow.Follower` drives, and what a source gives it.

docs/embedding.md has the steps. docs/api.md lists all public names.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tiered_index.errors import StorageUnavailable, TieredIndexError
from tiered_index.service.log.reads import read_name
from tiered_index.service.log.records import LostObject, LostRange, RangeKind

if TYPE_CHECKING:
    from tiered_index.service.index import IndexService

__all__ = ["Archiver", "Batch", "Lag", "Loss", "Source", "Torn", "patiently"]

FIRST = 10
"""The most messages of one kind that a run names, such as those with an implausible time."""
# An index says at least once in this time that a source was read whole, also if nothing came
_TELL_MS = 60_000


Put = Callable[[Any, str | None, int | None], int]
"""Puts columns, the name of a source and its position; returns the number of entries. As `Follower.put`."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A range [begin, end) of a source that was skipped, or whose messages changed after they were put.

    - `kind`: ``corrupt``, ``missing`` or ``rewritten``.
    - `begin`, `end`: the positions in the source; `end` is exclusive.
    - `messages`: the number of messages; None: not known.
    - `problem`: the reason.
    - `begin_ms`, `end_ms`: bounds of the messages' times (epoch ms): the range may touch every lookup of these times.
      `end_ms` None: the present.
    - `topic`: the only topic that has messages there; None: any topic.
    - `is_least`: there may be more than `messages`.
    """

    kind: RangeKind
    begin: int
    end: int
    messages: int | None
    problem: str
    begin_ms: int = 0
    end_ms: int | None = None
    topic: str | None = None
    is_least: bool = False

    def recorded(self, source: str, now_ms: int) -> LostObject:
        """Return the loss as a record of the storage's log has it."""
        lost = LostRange(source, self.kind, self.begin, self.end, self.messages, self.topic)
        return lost.lost(self.begin_ms, now_ms if self.end_ms is None else self.end_ms)


@dataclass(frozen=True, slots=True)
class Lag:
    """The distance from the index to the end of a source: in the source's unit, and in seconds (None if unknown).

    - `end_offset`: the position of the source's end.
    - `bytes`: the distance in the unit of positions.
    - `seconds`: the distance in seconds; None: not known.
    """

    end_offset: int
    bytes: int
    seconds: float | None

    @property
    def is_unknown(self) -> bool:
        """Whether nothing is known: what can be seen is read, and not all can be seen."""
        return self.bytes == 0 and self.seconds is None


@dataclass(frozen=True, slots=True)
class Torn:
    """Bytes [begin, end) at the end of a source that are not a whole message, their kind, and the reason.

    - `begin`, `end`: the positions in the source; `end` is exclusive.
    - `what`: the kind of the bytes.
    - `why`: the reason.
    """

    begin: int
    end: int
    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Messages of a source up to a position. Counts are those of this batch.

    - `source`: the name under which the index keeps the position.
    - `position`: the position after the messages.
    - `columns`: the entries, as `IndexService.put_source_batch` takes them; None: nothing is put.
    - `messages`: the number of messages.
    - `entries`: the number of entries that the source has put itself; see `Source`.
    - `hidden`: prepared or rolled back messages, which have no entries.
    - `left_out`: messages without entries that the source leaves out.
    - `replaced_keys`: keys that were not UTF-8; the entries have the text that the broker makes of them.
    - `losses`: ranges that were skipped or have changed.

    The further fields count only in the last batch of a round:

    - `state`: the kind of bytes that follow.
    - `torn`: the range that follows and is not a whole message.
    - `caught_up`: whether the source has no more messages for now.
    - `pause`: the wait before the next round, as a share of the poll interval.
    """

    source: str
    position: int
    columns: Any = None
    messages: int = 0
    entries: int = 0
    hidden: int = 0
    left_out: int = 0
    replaced_keys: int = 0
    losses: tuple[Loss, ...] = ()
    state: str | None = None
    torn: Torn | None = None
    caught_up: bool = True
    pause: float = 1.0


class Source(Protocol):
    """Messages in order, which can be read again from a position.

    One thread uses a source. Any thread may call `lag` and `positions`. A source may also have:

    - `trouble` (str | None): the reason that it is not read now. Any thread.
    - `poll_s` (float): the seconds between rounds, unless the user gives others. Default: 0.2.
    - `attach(put, stop)`: called by the follower before the first round. Such a source puts by `put` within a round,
      and its batches only count. It raises `Stopped` once `stop` is set.
    - `lacks(messages, hidden, left_out)`: returns reasons, as a list of texts, if a run that read so many messages put
      no entry; see `Batch`.
    - `last_batches()`: yields what a run that is stopped puts in the end, without reading the source.
    - `document(topic)`: returns the `TopicDocument` of a topic that it puts: the connector and its facts. Let it return
      the same object as long as nothing changes. Without it the follower's document counts, which has the name of the
      connector.
    - `counts()`, `gauges()`: return further fields of a command's document, and metrics as `Follower.gauges`.
    """

    # For people: the place of the source, the unit of its positions, and their name in reports.
    place: str
    unit: str
    offsets: str

    def positions(self) -> Mapping[str, int]:
        """Return the positions after the last put messages, by the names under which the index keeps them.

        Start at the durable positions of the index.
        """

    def batches(self) -> Generator[Batch, None, None]:
        """Yield new messages, for about half a second at most. A batch counts as put once you ask for the next one.

        A round that is closed early is repeated from the last put batch. If the source can't be read any more, its
        error is raised once all earlier messages are put.
        """

    def lag(self) -> Lag:
        """Return the distance to the end of the source."""

    def close(self) -> None:
        """Release connections and files."""


class Archiver(Protocol):
    """Archives the closed segments of a source.

    `losses` has all segments that were skipped so far, `passed_over` those that are still skipped. An archiver may have
    `ends_whole`: whether all that is put must be archived before the command ends.
    """

    losses: list[Loss]

    @property
    def archived(self) -> int:
        """The number of archived segments."""
        ...

    @property
    def passed_over(self) -> Sequence[Loss]:
        """The segments that are skipped now."""
        ...

    def run_once(self) -> int:
        """Archive closed segments, and return their number."""

    def finish(self) -> int:
        """Archive all that can be, and return its number of segments."""

    def stop(self) -> None:
        """End the round soon. Any thread."""


class Stopped(TieredIndexError):
    """The follower was stopped before a put. Nothing of the batch was put."""


def no_entries(index: IndexService) -> dict[str, Any]:
    """Return the columns of a batch that has only a position."""
    names = ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")
    own = (column.name for column in index.schema.caller_columns)
    return {name: [] for name in (*names, *own)}


class ReadTime:
    """The position that says how much of a source, or of one of its topics, is put: all before a time.

    Make it before the first record is put: then nothing is known to be whole. One thread.
    """

    def __init__(
        self, index: IndexService, source: str, topic: str = "", *, put: Callable[[Any, str, int], object] | None = None
    ) -> None:
        self._index, self._name, self._columns = index, read_name(source, topic), no_entries(index)
        told_ms = index.durable_position(self._name)
        if told_ms is None:
            (put or index.put_source_batch)(self._columns, self._name, 0)
        self.told_ms = self._read_ms = told_ms or 0

    def told(self, read_ms: int = 0, *, is_due: bool) -> Generator[Batch, None, bool]:
        """Note that all before `read_ms` (epoch ms) is put. Yield the position if it is to move; return whether it is.

        Let it be due after records, and at the end of a run. Otherwise it moves once a minute, so that a source without
        new records writes little.
        """
        # the position only grows: no clock that has jumped ahead may set it
        if read_ms <= self._index.clock.now_ms():
            self._read_ms = max(self._read_ms, read_ms)
        if self._read_ms == self.told_ms or not (is_due or self._read_ms - self.told_ms >= _TELL_MS):
            return False
        yield Batch(source=self._name, position=self._read_ms, columns=self._columns)
        self.told_ms = self._read_ms
        return True


class _Following(Protocol):
    """What `patiently` needs of a source: whether it follows, and its present trouble."""

    follow: bool
    trouble: str | None

    def positions(self) -> Mapping[str, int]: ...


def patiently(source: _Following, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches of a round. While it follows, `StorageUnavailable` is the source's `trouble`.

    Then an empty batch ends the round, and a later round reads on. `trouble` is None after a whole round.
    """
    try:
        yield from batches
        source.trouble = None
    except StorageUnavailable as error:
        source.trouble = str(error)
        if not source.follow:
            raise
        name, position = next(iter(source.positions().items()))
        yield Batch(source=name, position=position)
