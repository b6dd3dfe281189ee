"""Reads the answers of one command page by page, within the command's limits.

The limits apply to the whole command; each page gets the rest. Requests and bytes count from the first lookup, the time
from opening the index.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from tiered_index.base.call import deadline_at
from tiered_index.base.units import format_time
from tiered_index.cli.explaining import lost_text, print_explained, print_failed
from tiered_index.cli.options import RangeOptions
from tiered_index.cli.output import Output, counted, error_document, unknown_topic
from tiered_index.connectors.documents import words_of, words_of_connector
from tiered_index.connectors.registry import OTHER, Words
from tiered_index.errors import BudgetExceeded, TieredIndexError
from tiered_index.format.keys.spelling import similar_keys
from tiered_index.format.topic_documents import names_of_keys
from tiered_index.service.log.session import WriterStatus
from tiered_index.service.read.answers.budget import Limits, LookupLimits
from tiered_index.service.read.answers.messages import MessagesResult
from tiered_index.service.read.answers.results import PageTotals
from tiered_index.service.read.answers.rows import once
from tiered_index.service.read.files.compacted import DamagedFile
from tiered_index.service.reader import IndexReader
from tiered_index.types import Explain, FileReport, Freshness, Lookup, QueryResult, TopicsResult

# Time for a page after the command's time has ended: it only names the files that it would have read
_MOMENT_S = 1e-6

# Most unknown topics that are named
_MOST_TOPICS = 5
# bounds of the lookup of similar keys, and most of them that are named
_REQUESTS_OF_HINTS, _HINTS_S, _MOST_SIMILAR = 64, 5.0, 5

R = TypeVar("R", QueryResult, MessagesResult, TopicsResult)


def similar_with_entries(index: Any, topic: str, key: str, within: RangeOptions = RangeOptions()) -> list[str]:
    """Return keys like `key` that have entries in a range, by the names of the topic's keys. It costs few requests.

    `index` is an index or the client of a service, which tells the names of keys of the topics that a token sees.
    """
    bounds: dict[str, Any] = {"allow_partial": True, "max_requests": _REQUESTS_OF_HINTS, "timeout_s": _HINTS_S}
    similar = similar_keys(key, key_names_of(index, topic))
    lookups = [Lookup(topic, other, within.begin, within.end, 1) for other in similar]
    try:
        answers = index.query_many(lookups, **bounds)
    except BudgetExceeded as error:
        answers = error.result if isinstance(error.result, Sequence) else ()
    return [other for other, answer in zip(similar, answers, strict=False) if len(answer)][:_MOST_SIMILAR]


def key_names_of(index: Any, topic: str) -> Sequence[str]:
    """Return the names with which keys of a topic start; from a service, those that its token may see."""
    if isinstance(index, IndexReader):
        return names_of_keys(index.documents_of_topic(topic).values())
    topics = index.topics(allow_partial=True, max_requests=_REQUESTS_OF_HINTS, timeout_s=_HINTS_S)
    return next((known.key_names for known in topics if known.topic == topic), ())


def connectors_of(client: Any) -> dict[str, str | None]:
    """Return the connector of each topic that the client of a service sees."""
    topics = client.topics(allow_partial=True, max_requests=_REQUESTS_OF_HINTS, timeout_s=_HINTS_S)
    return {topic.topic: topic.connector for topic in topics}


class CommandBudget:
    """The remaining limits of a command. Its time runs from the construction."""

    def __init__(self, limits: LookupLimits) -> None:
        self._limits = limits
        self._deadline_s = limits.deadline_s()

    def left(self) -> Limits:
        """Return the limits of the next lookup, as keyword arguments."""
        left_s = max(_MOMENT_S, self._deadline_s - time.monotonic()) if self._deadline_s is not None else None
        return {"max_requests": self._limits.max_requests, "max_bytes": self._limits.max_bytes, "timeout_s": left_s}

    def spend(self, explain: Explain) -> None:
        """Subtract the cost of a lookup."""
        self._limits = self._limits.less(explain.requests, explain.bytes)

    def clock(self) -> contextlib.AbstractContextManager[None]:
        """Return a block that ends at the command's deadline."""
        return deadline_at(self._deadline_s)


@dataclass
class Pages(Generic[R]):
    """The answers of a command: iterate over the pages (all with `every`). It adds up the pages that were read.

    `open` opens the index, or the client of a service, and returns the index (None for a service) and the questions:
    functions of one page, by ``cursor`` and limits. The caller closes both. `nothing` is an empty answer. One thread.

    If the budget is exceeded, the last page has the entries found so far, and `exceeded` is the error; `settle` raises
    it after the output. With `prices_as_of` the cost is printed. `within` is the time range of the command, if it has
    one. If nothing was found, `similar` returns similar keys that have entries, and `connectors` the connector of each
    topic that a service tells.
    """

    open: Callable[[], tuple[IndexReader | None, Iterable[Callable[..., R]]]]
    nothing: R
    cursor: str | None
    budget: CommandBudget
    every: bool = field(kw_only=True)
    prices_as_of: str | None = field(default=None, kw_only=True)
    within: RangeOptions = field(default=RangeOptions(), kw_only=True)
    similar: Callable[[IndexReader | None], Sequence[str]] = field(default=lambda reader: (), kw_only=True)
    connectors: Callable[[], Mapping[str, str | None]] = field(default=dict, kw_only=True)
    # the index, once it is open; None for a service
    reader: IndexReader | None = field(default=None, init=False)
    exceeded: BudgetExceeded | None = field(default=None, init=False)
    # whether the last page is the first one of its question
    is_first_page: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.more_hints = list[str]()
        """Further hints of the command."""
        self.last: R = self.nothing
        self._words: dict[str, Words] = {}
        # the identities of entries on earlier pages
        self._shown: set[tuple[object, ...]] = set()
        self._totals = PageTotals()
        self._explains: list[Explain] = []

    def __iter__(self) -> Iterator[R]:
        try:
            with self.budget.clock():
                self.reader, questions = self.open()
            for look_up in questions:
                cursor, self.is_first_page = self.cursor, True
                while self.is_first_page or (self.every and cursor is not None):
                    answer = look_up(**({} if cursor is None else {"cursor": cursor}), **self.budget.left())
                    self.budget.spend(answer.explain)
                    yield self._added(answer)
                    cursor, self.is_first_page = answer.cursor, False
        except BudgetExceeded as error:
            self.exceeded = error
            yield self._added(error.result if isinstance(error.result, type(self.nothing)) else self.nothing)

    def _added(self, answer: R) -> R:
        page: Any = answer
        if isinstance(page, QueryResult):
            page = once(page, self._shown)
        answer = page
        with_all = self._totals.add(answer)
        self.last = answer if answer is self.nothing else with_all
        if self.prices_as_of is not None:
            # otherwise thousands of pages would keep their file reports in memory
            self._explains.append(answer.explain)
        return answer

    def words(self, topic: str) -> Words:
        """Return the words of the connector that wrote a topic, as the index or the service shows it."""
        if topic not in self._words:
            self._words[topic] = OTHER
            if self.reader is not None:
                self._words[topic] = words_of(self.reader.topic_document(topic))
            else:
                # the answer is there: words that can't be asked for are general ones
                with contextlib.suppress(TieredIndexError):
                    self._words[topic] = words_of_connector(self.connectors().get(topic))
        return self._words[topic]

    @property
    def _not_asked(self) -> Freshness | None:
        """The index whose root was read without its storage."""
        return next((index for index in self.last.freshness if index.not_asked is not None), None)

    @cached_property
    def _seen(self) -> Mapping[str, WriterStatus | None]:
        """The writer of each index that was read from its storage alone; empty if it can't be read in time."""
        if self._not_asked is not None:
            return {}
        with contextlib.suppress(TieredIndexError), self.budget.clock():
            return self.reader.writers() if self.last.freshness and self.reader is not None else {}
        return {}

    def seen(self) -> dict[str, Any]:
        """Return the fields about the answers' provenance, the writers of the indexes, and hints."""
        rows = [index.to_dict() | {"writer": self._seen.get(index.source)} for index in self.last.freshness]
        return self.last.provenance() | {"freshness": rows, "hints": self.hints}

    def as_of(self) -> str:
        """Return a text with the time up to which the answers are complete; empty if partial, or if they have all."""
        if not self.last.freshness or self.status == "partial":
            return ""
        if self._not_asked is not None:
            published_ms = self._not_asked.as_of_ms
            known = "the storage: nothing" if not published_ms else f"the storage as of {format_time(published_ms)}"
            return f" as far as the root knows ({known})"
        oldest = min(self.last.freshness, key=lambda index: (index.as_of_ms is None, index.as_of_ms or 0))
        several = (
            f" ({oldest.source}, the oldest of {len(self.last.freshness)})" if len(self.last.freshness) > 1 else ""
        )
        until = (
            "so far: its source was never read to its end"
            if oldest.as_of_ms == 0
            else f"as of {format_time(oldest.as_of_ms)}"
            if oldest.as_of_ms is not None
            else "so far: nothing is published yet"
            if self.last.expired_before_ms is None
            else "so far: nothing else is published"
        )
        if oldest.as_of_ms is not None and (empty := sum(index.as_of_ms is None for index in self.last.freshness)):
            several = f"{several[:-1]}; of {empty:,} nothing is published yet)"
        writer = self._seen.get(oldest.source)
        if writer is None:
            return f" {until}{several}"
        seen = format_time(writer.seen_ms // 1000 * 1000)
        states = {"alive": "is alive", "closed": f"ended at {seen}", "gone": f"was last seen at {seen}"}
        return f" {until}{several}; the writer {states[writer.state]}"

    @cached_property
    def hints(self) -> list[str]:
        """Hints: why nothing was found, and which entries were left out."""
        unknown = self.last.unknown_topics
        begin_ms, end_ms = self.within.begin, self.within.end
        general: list[str] = [*self.more_hints]
        if folded := self.costs["folded_entries"]:
            general.append(f"{counted(folded, 'entry', 'entries')} left out: topic, queue and offset of a newer answer")
        if replaced := self.last.replaced:
            general.append(f"{counted(replaced, 'row')} left out: a newer reading of the file replaced them")
        count = self.count
        if (count and not unknown) or self.cursor is not None or self.exceeded is not None:
            return general
        if not count and not unknown:
            general = [f"keys are exact: {similar!r} has entries" for similar in self._similar()] + general
        if self.reader is None:
            return general
        files = [file for file in self.reader.files() if not isinstance(file, DamagedFile)]
        if not files:
            # it may have had files that are lost or expired
            gone = self.last.lost or self.last.expired_before_ms is not None
            return general if gone or self.last.as_of_ms is not None else ["the index has no entries yet", *general]
        topics = {topic for file in files for topic in file.known_topics or ()}
        hints = [unknown_topic(topic, topics) for topic in unknown[:_MOST_TOPICS]]
        if len(unknown) > _MOST_TOPICS:
            hints.append(f"nor any of {len(unknown) - _MOST_TOPICS:,} more topics")
        if count:
            return hints + general
        first, last = (min(file.second_min for file in files) * 1000, max(file.second_max for file in files) * 1000)
        if (begin_ms or 0) // 1000 * 1000 > last or (end_ms is not None and end_ms < first):
            hints.append(f"the index has entries from {format_time(first)} to {format_time(last)} only")
        return hints + general

    def _similar(self) -> Sequence[str]:
        """Return similar keys that have entries. A lookup that fails, or takes long, finds none."""
        with contextlib.suppress(TieredIndexError), self.budget.clock():
            return self.similar(self.reader)
        return ()

    @property
    def status(self) -> str:
        """The status of all pages together."""
        return self._totals.status_of(self.last)

    def conclude(self, out: Output, text: str) -> None:
        """Write the summary of the answers, with --quiet only if they may lack something."""
        (out.summary if self.status == "complete" and not self.last.lost else out.line)(text)

    @property
    def conclusion(self) -> str:
        """The status for people; with lost files ``complete except T to T (...)``."""
        status = self.status
        if self.last.lost:
            joint = " except" if status == "complete" else "; lost permanently:"
            status = f"{status}{joint} {lost_text(self.last.lost)}"
        return status

    @property
    def expired(self) -> str:
        """A text about expired entries in the range; empty if there are none."""
        expired_ms = self.last.expired_before_ms
        if expired_ms is None:
            return ""
        # others may expire later
        some = ", of some topics at least" if isinstance(self.last, TopicsResult) else ""
        return f"; entries before {format_time(expired_ms)} have expired{some}"

    @property
    def count(self) -> int:
        """The entries or messages of all pages so far."""
        return self._totals.count

    @property
    def costs(self) -> Mapping[str, Any]:
        """The costs of all pages so far, by the names of `Explain`."""
        return self._totals.costs

    def totals(self, **more: Any) -> dict[str, Any]:
        """Return the last line of NDJSON, with `more` fields."""
        return self._totals.document(self.last, **more) | self.seen() | self.error()

    @property
    def failed(self) -> list[FileReport]:
        """The files of all pages that could not be read."""
        return [*self._totals.failed.values()]

    def error(self) -> dict[str, Any]:
        """Return the field about an exceeded budget; empty if it was not exceeded."""
        return error_document(self.exceeded) if self.exceeded is not None else {}

    def finish(self, out: Output, more: str = "") -> int:
        """Print the lines after the answers, with `more` before the cost, and return the exit code as `settle`."""
        if self._not_asked is not None:
            out.line(f"the storage could not be read: {self._not_asked.not_asked}")
        for hint in self.hints:
            out.summary(hint)
        if self.last.cursor is not None:
            out.line(f"more with --cursor {self.last.cursor}")
        if self.exceeded is None:
            print_failed(out, self.failed)
        if self.prices_as_of is not None:
            print_explained(out, self.prices_as_of, self._explains, self.costs, more)
        return self.settle()

    def settle(self) -> int:
        """Return the exit code, after the output. Raises `BudgetExceeded` if the budget was exceeded."""
        if self.exceeded is not None:
            raise self.exceeded
        return BudgetExceeded.exit_code if self._totals.is_partial else 0
