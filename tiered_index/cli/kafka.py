"""The part of commands that read Kafka: the follower of topics, and the brokers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered_index.cli.options import KafkaClientOptions, KafkaOptions
from tiered_index.cli.session import Session
from tiered_index.errors import InvalidArgument
from tiered_index.service.root import Root
from tiered_index.storage.disk import Disk

if TYPE_CHECKING:
    from tiered_index.connectors.follow import Follower
    from tiered_index.connectors.kafka.client.broker import KafkaBroker
    from tiered_index.connectors.kafka.client.calls import Watch
    from tiered_index.service.index import IndexService

SCHEME = "kafka://"


def is_of_kafka(source: str) -> bool:
    """Return whether a source is topics of Kafka. Raises `InvalidArgument` for ``kafka:HOST/TOPIC``, unless a file."""
    if not source.startswith(SCHEME) and source.startswith("kafka:") and not Path(source).exists():
        address = source.removeprefix("kafka:").lstrip("/")
        raise InvalidArgument(f"{source} is no file: write topics of Kafka as {SCHEME}{address}")
    return source.startswith(SCHEME)


def open_kafka_follower(
    session: Session,
    index: IndexService,
    stop: threading.Event,
    *,
    place: str,
    kafka: KafkaOptions,
    follow: bool = True,
    restart: bool = False,
    cluster: str | None = None,
    **of_follower: Any,
) -> Follower:
    """Return a follower of the topics at `place`; raises as `KafkaSource` does."""
    # imported when asked for: the client is of an extra
    from tiered_index.connectors.follow import Follower
    from tiered_index.connectors.kafka.archive import EVERY_S, KafkaArchiver
    from tiered_index.connectors.kafka.client.broker import KafkaAddress
    from tiered_index.connectors.kafka.keys import RecordKeys
    from tiered_index.connectors.kafka.source import KafkaSource

    source = KafkaSource(
        index,
        KafkaAddress.parse(place),
        kafka.settings(),
        RecordKeys(kafka.key or ("key",)),
        follow,
        restart,
        kafka.restart_at,
        kafka.commit_group,
        cluster,
        kafka.drop_key or (),
        note=session.out.note,
    )
    every_s = EVERY_S if kafka.archive_every is None else kafka.archive_every
    archiver = KafkaArchiver(source, every_s=every_s) if kafka.archive else None
    return Follower(index, source, follow=follow, stop=stop, archiver=archiver, note=session.out.note, **of_follower)


def watched_clients(session: Session) -> Watch:
    """Return a context in which the process ends with exit code 3 if a client of Kafka does not return from a call."""
    from tiered_index.connectors.kafka.client.calls import Watch

    return Watch(lambda problem: session.out.error("StorageUnavailable", problem))


def check_kafka(place: str, options: KafkaOptions, root: Path | None) -> None:
    """Raise the errors of a wrong address and of wrong settings, so that no index is made before them.

    For a new `root`, also those of a cluster that does not answer and of missing topics.
    """
    from tiered_index.connectors.kafka.client.broker import KafkaAddress
    from tiered_index.connectors.kafka.keys import RecordKeys
    from tiered_index.connectors.kafka.source import check_cluster

    address, settings = KafkaAddress.parse(place), options.settings()
    RecordKeys(options.key or ("key",))
    if options.archive_every is not None and not options.archive:
        raise InvalidArgument("--archive-every needs --archive")
    if root is not None and address.topics and Root(root, Disk()).read_marker() is None:
        check_cluster(address, settings)


def open_kafka_broker(options: KafkaClientOptions, place: str | None = None) -> KafkaBroker | None:
    """Return the brokers at `place`, or those of the setting ``bootstrap.servers``; None: there is neither."""
    if place is None and options.kafka is None and options.kafka_config is None:
        return None
    settings = options.settings()
    if place is None and "bootstrap.servers" not in settings:
        return None
    from tiered_index.connectors.kafka.client.broker import KafkaAddress, KafkaBroker

    return KafkaBroker(
        settings if place is None else settings | {"bootstrap.servers": KafkaAddress.parse(place).servers}
    )
