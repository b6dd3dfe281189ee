"""The sources of the messages of an index: those of the connectors that put its topics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tiered_index.config import IndexConfig
from tiered_index.connectors.contract import MessagePlaces
from tiered_index.connectors.documents import every_document, lacking
from tiered_index.connectors.registry import CONNECTORS, OF_OTHERS
from tiered_index.service.read.answers.messages import Fetched
from tiered_index.types import IndexItem

if TYPE_CHECKING:
    from tiered_index.format.topic_documents import TopicDocument
    from tiered_index.service.index import IndexService
    from tiered_index.service.read.answers.messages import MessageSource
    from tiered_index.service.reader import IndexReader


@dataclass(frozen=True)
class NotInstalled:
    """The messages of a connector that is not installed, or can't be loaded: none, and the advice."""

    problem: str

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """As `MessageSource.fetch`."""
        return [Fetched(item=item, state="missing", problem=self.problem) for item in items]


@dataclass(frozen=True)
class OfEachIndex:
    """The messages of a topic that different connectors wrote, in several indexes. `of` returns those of a `source`."""

    of: Callable[[str | None], MessageSource]

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """As `MessageSource.fetch`."""
        fetched: dict[int, Fetched] = {}
        for source in {item.source for item in items}:
            places = [place for place, item in enumerate(items) if item.source == source]
            fetched |= zip(places, self.of(source).fetch([items[place] for place in places], topic, key), strict=True)
        return [fetched[place] for place in range(len(items))]


class MessageSources:
    """The sources of the messages of an index (None: only of `places`). Each connector is loaded when it is needed.

    - `places`: what `Connector.place` opened, by the connector; `close` closes it.

    Threads: any.
    """

    def __init__(
        self,
        index: IndexReader[Any] | IndexService[Any] | None,
        config: IndexConfig,
        places: Mapping[str, Any] | None = None,
    ) -> None:
        self._index, self._config = index, config
        self._places = {name: place for name, place in (places or {}).items() if place is not None}
        self._sources: dict[str, Any] = {}
        self._lock = threading.Lock()
        for name in self._places:
            # a wrong place is an error of the start
            self.of_connector(name)

    def _documents(self) -> Mapping[str, TopicDocument]:
        return self._index.topic_documents() if self._index is not None else {}

    def _document(self, topic: str) -> TopicDocument | None:
        return self._index.topic_document(topic) if self._index is not None else None

    def of_connector(self, name: str) -> Any:
        """Return the source of all messages of a connector. Raises `InvalidArgument` if its place is not one."""
        with self._lock:
            if name not in self._sources:
                of_index: dict[str, Any] = {"index": self._index, "documents": self._documents}
                places = MessagePlaces(config=self._config, place=self._places.get(name), **of_index)
                self._sources[name] = CONNECTORS.connector(name).messages(places)
            return self._sources[name]

    def connector_of(self, topic: str) -> str | None:
        """Return the name of the connector that wrote a topic; None: no document says it.

        If one place of messages is given, its connector has the topics of which the index knows none, unless the index
        has topics of others.
        """
        if (document := self._document(topic)) is not None:
            return document.connector
        known = {document.connector for document in every_document(self._index)} if self._index is not None else set()
        (name,) = self._places if len(self._places) == 1 else (None,)
        return name if known <= {name} else None

    def of(self, topic: str, sees: Callable[[str], bool] | None = None) -> MessageSource:
        """Return the source of the messages of a topic.

        With `sees` it is for a caller that may see only the topics for which that returns True: a place of a log that
        topics share shows nothing of another topic.
        """
        described = self._index.documents_of_topic(topic) if self._index is not None else {}
        if len({document.connector for document in described.values()}) > 1:
            return OfEachIndex(partial(self._in_index, topic, sees))
        return self._of(topic, self._document(topic), sees)

    def _in_index(self, topic: str, sees: Callable[[str], bool] | None, source: str | None) -> MessageSource:
        assert self._index is not None
        return self._of(topic, self._index.documents_of_topic(topic).get(source), sees)

    def _of(self, topic: str, document: TopicDocument | None, sees: Callable[[str], bool] | None) -> MessageSource:
        name = (self.connector_of(topic) if document is None else document.connector) or OF_OTHERS
        if document is not None and (problem := lacking(document)) is not None:
            return NotInstalled(problem)
        source = self.of_connector(name)
        narrowed: MessageSource = source.seen_by(sees) if sees is not None and hasattr(source, "seen_by") else source
        return narrowed

    def of_ids(self, sees: Callable[[str], bool] | None = None) -> Any:
        """Return the source of the messages that ids name; `sees` as of `of`."""
        source = self.of_connector(OF_OTHERS)
        return source if sees is None else source.seen_by(sees)

    def close(self) -> None:
        """Close the places, and what the sources opened."""
        for opened in (*self._sources.values(), *self._places.values()):
            if (close := getattr(opened, "close", None)) is not None:
                close()
