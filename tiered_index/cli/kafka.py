"""Options of commands that read Kafka, and the follower of topics."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tiered_index.cli.options import declare, pairs
from tiered_index.cli.session import Session
from tiered_index.errors import InvalidArgument
from tiered_index.service.root import Root
from tiered_index.storage.disk import Disk

if TYPE_CHECKING:
    from tiered_index.follow import Follower
    from tiered_index.kafka.client import KafkaBroker
    from tiered_index.service.index import IndexService

SCHEME = "kafka://"
_kafka = partial(declare, rich_help_panel="Kafka")


@dataclass(frozen=True)
class KafkaClientOptions:
    """Settings of Kafka's client: for each command that reads Kafka."""

    kafka: list[str] | None = _kafka(
        metavar="NAME=VALUE", help="Setting of Kafka's client (librdkafka), such as security.protocol=SSL."
    )
    kafka_config: Path | None = _kafka(
        metavar="FILE", help="File with settings of Kafka's client, one NAME=VALUE per line. Use it for secrets."
    )

    def settings(self) -> dict[str, str]:
        """Return the settings; the command line has precedence over the file."""
        from tiered_index.kafka.client import check_setting, read_settings

        of_file = {} if self.kafka_config is None else read_settings(self.kafka_config)
        malformed = [text for text in self.kafka or () if "=" not in text]
        if malformed:
            raise InvalidArgument("write --kafka as NAME=VALUE")  # do not repeat the text: it may be a secret
        of_line = pairs("--kafka", self.kafka)
        for name in of_line:
            check_setting(name, "--kafka")
        return of_file | of_line


@dataclass(frozen=True)
class KafkaOptions(KafkaClientOptions):
    """Options for following topics: ingest, serve."""

    key: list[str] | None = _kafka(
        metavar="[NAME=]SPEC",
        help="Key to index: key (default), header:NAME or json:JMESPATH. Repeatable. key and header:NAME may end with "
        "a type of Kafka's serializers, such as key:int64. For files with --topic: a column or JMESPATH. With a NAME, "
        "as in order=json:id, the key is NAME= and the value.",
    )
    restart_at: Literal["begin", "end"] | None = _kafka(
        help="If a partition no longer has the next record, continue at its begin or end."
    )
    commit_group: str | None = _kafka(
        metavar="GROUP", help="Commit offsets to this consumer group, for lag tools, once their entries are on disk."
    )
    archive: bool = _kafka(
        False, "--archive", help="Archive Kafka's records, or the rows of files, in the storage, as Parquet files."
    )
    archive_every: float | None = _kafka(
        None,
        min=0,
        metavar="SECONDS",
        help="With --archive: longest wait of a record for its file (default 3600); less by a topic's retention.",
    )


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
    from tiered_index.follow import Follower
    from tiered_index.kafka.archive import EVERY_S, KafkaArchiver
    from tiered_index.kafka.client import KafkaAddress
    from tiered_index.kafka.keys import RecordKeys
    from tiered_index.kafka.source import KafkaSource

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
        note=session.out.note,
    )
    every_s = EVERY_S if kafka.archive_every is None else kafka.archive_every
    archiver = KafkaArchiver(source, every_s=every_s) if kafka.archive else None
    return Follower(index, source, follow=follow, stop=stop, archiver=archiver, note=session.out.note, **of_follower)


def check_kafka(place: str, options: KafkaOptions, root: Path | None) -> None:
    """Raise the errors of a wrong address and of wrong settings, so that no index is made before them.

    For a new `root`, also those of a cluster that does not answer and of missing topics.
    """
    from tiered_index.kafka.client import KafkaAddress
    from tiered_index.kafka.keys import RecordKeys
    from tiered_index.kafka.source import check_cluster

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
    from tiered_index.kafka.client import KafkaAddress, KafkaBroker

    return KafkaBroker(
        settings if place is None else settings | {"bootstrap.servers": KafkaAddress.parse(place).servers}
    )
