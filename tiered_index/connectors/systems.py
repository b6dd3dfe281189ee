"""The connector that entries come from: the names of an index's positions show it. Threads: any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from tiered_index.connectors.registry import CONNECTORS, OTHER, Words
from tiered_index.format.keys.spelling import split_name
from tiered_index.format.names import POINTS, ROWS, TOPICS_QUEUE, linked_store
from tiered_index.service.log import topic_keys
from tiered_index.service.log.reads import READ_PREFIX
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.files.compacted import CompactedFile
from tiered_index.service.read.files.root_view import UnsealedView
from tiered_index.service.read.segments.places import FILES_QUEUE, files_topic
from tiered_index.service.reader import IndexReader

if TYPE_CHECKING:
    from tiered_index.service.index import IndexService


UNKNOWN = OTHER._replace(no_queues=CONNECTORS.spec("rocketmq").words.no_queues)
"""Words for an index without positions: its entries may be of any system, or there are none yet."""


_TIME_UNIT, _TIME_ZONE = "files-unit:", "files-zone:"


def key_names_of(positions: Iterable[str], topic: str) -> list[str]:
    """Return the names of a topic's keys, as of `split_name`, by the names of an index's positions."""
    positions = list(positions)
    scopes = {linked_store(topic, FILES_QUEUE), linked_store("", TOPICS_QUEUE)}
    scopes |= {name.rpartition("/")[0] for name in positions if name.startswith("kafka:") and f"/{topic}/" in name}
    rules = [rule for scope in scopes for rule in topic_keys.rules_in(positions, scope)]
    return sorted({name for name, _ in map(split_name, rules) if name})


def time_unit_of(positions: Mapping[str, int], store: str, path: str) -> str | None:
    """Return the unit of the times at a path of a log of files that are numbers, by the positions of an index.

    None: no run has read such a time.
    """
    return _newest(_recorded(positions, _TIME_UNIT, store, path))


def time_unit_position(positions: Mapping[str, int], store: str, path: str, unit: str) -> tuple[str, int]:
    """Return the position that says the unit of the times at a path, from now on. The greatest number counts."""
    return _next_position(positions, _TIME_UNIT, store, path, unit)


def time_zone_of(positions: Mapping[str, int], store: str, path: str) -> str | None:
    """Return the zone of the times at a path of a log of files that have none, by the positions of an index.

    None: no run has read such a time by the clocks of a zone, so they are UTC.
    """
    return _newest(_recorded(positions, _TIME_ZONE, store, path))


def time_zone_position(positions: Mapping[str, int], store: str, path: str, zone: str) -> tuple[str, int]:
    """Return the position that says the zone of the times at a path that have none, as `time_unit_position`."""
    return _next_position(positions, _TIME_ZONE, store, path, zone)


def _recorded(positions: Mapping[str, int], kind: str, store: str, path: str) -> dict[str, int]:
    """Return the units or zones that positions name for a path, each with its number."""
    begin, end = f"{kind}{store}/", f"/{path}"
    names = {name.removeprefix(begin): at for name, at in positions.items() if name.startswith(begin)}
    return {unquote(name.removesuffix(end)): at for name, at in names.items() if name.partition("/")[2] == path}


def _newest(recorded: Mapping[str, int]) -> str | None:
    return max(recorded, key=recorded.__getitem__, default=None)


def _next_position(positions: Mapping[str, int], kind: str, store: str, path: str, value: str) -> tuple[str, int]:
    number = max(_recorded(positions, kind, store, path).values(), default=0) + 1
    return f"{kind}{store}/{quote(value, safe='')}/{path}", number


def positions_of_files(positions: Mapping[str, int], store: str) -> dict[str, int]:
    """Return the positions that say how the rows of a log of files were indexed."""
    begins = [f"{_TIME_UNIT}{store}/", f"{_TIME_ZONE}{store}/"]
    if store == linked_store("", TOPICS_QUEUE):
        begins.append(files_topic(""))
    others = {name: at for name, at in positions.items() if name.startswith(tuple(begins))}
    return topic_keys.positions_of(positions, store) | others


def connector_of(positions: Iterable[str], topic: str | None = None) -> str | None:
    """Return the name of the connector that put a topic (None: any topic), by the names of an index's positions.

    None: no position shows it, as for entries that a program put.
    """
    # how much was read says nothing of entries
    positions = [name for name in positions if not name.startswith(READ_PREFIX)]
    if topic is not None and (
        files_topic(topic) in positions or topic_keys.rules_in(positions, linked_store(topic, FILES_QUEUE))
    ):
        return "files"
    part = "/" if topic is None else f"/{topic}/"
    if any(name.startswith("kafka:") and part in name for name in positions):
        return "kafka"
    return "rocketmq" if any(name.startswith("rocketmq:") for name in positions) else None


def words_of(positions: Iterable[str], topic: str | None = None) -> Words:
    """Return the words for a topic (None: any topic) of an index with these names of positions."""
    positions = list(positions)
    if (name := connector_of(positions, topic)) is not None:
        return CONNECTORS.spec(name).words
    return UNKNOWN if all(name.startswith(READ_PREFIX) for name in positions) else OTHER


def connector_of_segment(segment: ArchivedSegment) -> str:
    """Return the name of the connector whose messages an archived segment has."""
    if segment.columns is None:
        return "rocketmq"
    return "files" if segment.store.startswith((ROWS, POINTS)) else "kafka"


def position_names(index: IndexReader[Any] | IndexService[Any]) -> set[str]:
    """Return the names of all positions of an index, for a reader also those of its archived logs."""
    if not isinstance(index, IndexReader):
        return set(index.durable_positions())
    # positions of entries that are not uploaded are only in the root's files
    names: set[str] = set()
    for file in index.files():
        if isinstance(file, UnsealedView):
            names.update(file.journal.positions)
        elif isinstance(file, CompactedFile) and file.is_local:
            names.update(file.metadata().source_positions)
    for archive in index.segment_archives.values():
        segments = archive.segments()
        names.update(segments.state.positions)
        of_bytes = frozenset(segments.byte_stores)
        names.update(f"rocketmq:{store}" if store in of_bytes else store for store in segments.stores)
    return names
