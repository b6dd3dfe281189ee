"""What commands need to know of RocketMQ's stores before they load what reads them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tiered_index.connectors.options import declare
from tiered_index.connectors.registry import ConnectorSpec, Words

_of_store = partial(declare, rich_help_panel="RocketMQ stores")


@dataclass(frozen=True)
class SelectionOptions:
    """Options that select the messages of a store: ingest."""

    topics: list[str] | None = _of_store(
        metavar="PATTERN",
        help="Index matching topics only, for example 'order*'. Repeatable. Default: all except internal ones.",
    )
    exclude_topics: list[str] | None = _of_store(metavar="PATTERN", help="Leave out matching topics. Repeatable.")
    index_tags: bool = _of_store(False, "--index-tags", help="Also index messages by their tags, for query --tag.")
    index_prepared: bool = _of_store(False, "--index-prepared", help="Also index prepared messages of transactions.")

    @property
    def arguments(self) -> tuple[tuple[str, ...], tuple[str, ...], bool, bool]:
        """The arguments of a `Selection`."""
        return tuple(self.topics or ()), tuple(self.exclude_topics or ()), self.index_tags, self.index_prepared


@dataclass(frozen=True)
class ArchiveOptions:
    """Options for archiving a followed store: ingest, serve."""

    archive_segments: bool = _of_store(
        False, "--archive-segments", help="Upload each closed segment of the commit log."
    )
    archive_queues: bool = _of_store(
        False,
        "--archive-queues",
        help="As --archive-segments, and also store queue offsets, so that clients can pull from the archive.",
    )


@dataclass(frozen=True)
class StoreOptions:
    """Options of a RocketMQ store."""

    skip_corrupt: bool = _of_store(
        False, "--skip-corrupt", help="Skip damage in the commit log or in archive:URI, and report it."
    )
    skip_missing: bool = _of_store(
        False,
        "--skip-missing",
        help="Skip messages that the broker deleted or rewrote before they were read, and report them.",
    )
    commitlog: list[Path] | None = _of_store(
        None,
        "--commitlog",
        metavar="DIR",
        help="Another folder of the commit log, if storePathCommitLog has several. Repeatable.",
    )
    check_bodies: bool = _of_store(
        True, "--check-bodies/--no-check-bodies", help="Check each message's body against its CRC (default)."
    )


@dataclass(frozen=True)
class RocketmqOptions:
    """Options for reading a store."""

    of_store: StoreOptions = field(default_factory=StoreOptions)
    selected: SelectionOptions = field(default_factory=SelectionOptions)
    archiving: ArchiveOptions = field(default_factory=ArchiveOptions)


def folder_of(address: str) -> Path:
    """Return the folder that a path or a `file://` URI names."""
    if not address.startswith("file://"):
        return Path(address)
    # a folder has no parameters: these are characters of its name
    return Path(unquote(urlsplit(address.replace("?", "%3F").replace("#", "%23")).path))


def _is_folder(address: str) -> bool:
    # what reads files names a path that is wrong
    with contextlib.suppress(OSError, ValueError):
        return ("://" not in address or address.startswith("file://")) and folder_of(address).is_dir()
    return False


SPEC = ConnectorSpec(
    name="rocketmq",
    title="a RocketMQ store",
    words=Words(
        "queue",
        "commit log offset",
        "no archived segment holds it, and no store directory was given",
        "queue offsets are needed: give --store, or archive segments with --archive-queues",
    ),
    open="tiered_index.connectors.rocketmq.connector:CONNECTOR",
    claims=_is_folder,
    folder=folder_of,
    options=RocketmqOptions,
    offset_space="commitlog",
    queues="tiered_index.connectors.rocketmq.remoting.queue_sources:LogQueues",
)
