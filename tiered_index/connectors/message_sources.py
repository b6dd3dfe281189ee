"""The sources of the messages of an index: those of the connectors that put its topics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tiered_index.config import IndexConfig
from tiered_index.connectors.contract import MessagePlaces
from tiered_index.connectors.registry import CONNECTORS, FILES, OF_OTHERS
from tiered_index.connectors.systems import connector_of, position_names
from tiered_index.service.read.segments.places import has_files

if TYPE_CHECKING:
    from tiered_index.service.index import IndexService
    from tiered_index.service.read.answers.messages import MessageSource
    from tiered_index.service.reader import IndexReader


class MessageSources:
    """The sources of the messages of an index (None: only of `places`). Each connector is loaded when it is needed.

    - `places`: what `Connector.place` opened, by the connector; `close` closes it.
    - `keys`: the rules of `--key` of entries that may not be durable yet, in addition to those that the index names.

    Threads: any.
    """

    def __init__(
        self,
        index: IndexReader[Any] | IndexService[Any] | None,
        config: IndexConfig,
        places: Mapping[str, Any] | None = None,
        keys: Iterable[str] = (),
    ) -> None:
        self._index, self._config, self._keys = index, config, frozenset(keys)
        self._places = {name: place for name, place in (places or {}).items() if place is not None}
        self._sources: dict[str, Any] = {}
        self._lock = threading.Lock()
        for name in self._places:
            # a wrong place is an error of the start
            self.of_connector(name)

    def _names(self) -> set[str]:
        return position_names(self._index) if self._index is not None else set()

    def of_connector(self, name: str) -> Any:
        """Return the source of all messages of a connector. Raises `InvalidArgument` if its place is not one."""
        with self._lock:
            if name not in self._sources:
                names, place = self._names, self._places.get(name)
                places = MessagePlaces(
                    index=self._index, config=self._config, place=place, names=names, keys=self._keys
                )
                self._sources[name] = CONNECTORS.connector(name).messages(places)
            return self._sources[name]

    def has_rows(self, topic: str) -> bool:
        """Return whether a topic has files. No request."""
        archives = self._index.segment_archives.values() if self._index is not None else ()
        return has_files([archive.state() for archive in archives], self._names, topic)

    def connector_of(self, topic: str) -> str | None:
        """Return the name of the connector that put a topic; None: no position shows it.

        With a broker of Kafka, topics without positions are Kafka's, unless the index follows another system.
        """
        if self.has_rows(topic):
            return FILES
        name = connector_of(self._names(), topic)
        return "kafka" if name is None and "kafka" in self._places else name

    def of(self, topic: str, sees: Callable[[str], bool] | None = None) -> MessageSource:
        """Return the source of the messages of a topic.

        With `sees` it is for a caller that may see only the topics for which that returns True: a place of a log that
        topics share shows nothing of another topic.
        """
        source = self.of_connector(self.connector_of(topic) or OF_OTHERS)
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
