"""What commands need to know of Kafka before they load what reads it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tiered_index.connectors.options import declare
from tiered_index.connectors.registry import ConnectorSpec, Words
from tiered_index.errors import InvalidArgument

SCHEME = "kafka://"
_PLACES = "kafka:TOPIC/PARTITION/OFFSET"
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


@dataclass(frozen=True)
class KafkaOptions(KafkaClientOptions):
    """Options for following topics: ingest, serve."""

    key: list[str] | None = _kafka(
        metavar="[NAME=]SPEC",
        help="Key to index: key (default), header:NAME or json:JMESPATH. Repeatable. key and header:NAME may end with "
        "a type of Kafka's serializers, such as key:int64. For files with --topic: a column or JMESPATH. With a NAME, "
        "as in order=json:id, the key is NAME= and the value. A new key of a topic is added to what is known, too.",
    )
    drop_key: list[str] | None = _kafka(
        None,
        "--drop-key",
        metavar="[NAME=]SPEC",
        help="Key of earlier runs by which nothing new is indexed any more. Repeatable.",
    )
    restart_at: Literal["begin", "end"] | None = _kafka(
        help="If a partition no longer has the next record, continue at its start or end."
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


def _is_topics(address: str) -> bool:
    """Return whether an address is of topics. Raises `InvalidArgument` for ``kafka:HOST/TOPIC``, unless a file."""
    if not address.startswith(SCHEME) and address.startswith("kafka:") and not Path(address).exists():
        written = address.removeprefix("kafka:").lstrip("/")
        raise InvalidArgument(f"{address} is no file: write topics of Kafka as {SCHEME}{written}")
    return address.startswith(SCHEME)


SPEC = ConnectorSpec(
    name="kafka",
    title="Kafka",
    words=Words(
        "partition",
        "offset",
        "no archive has it, and no broker was given",
        f"it is a topic of Kafka: look up a key, or read a record by {_PLACES}",
        key="key",
    ),
    places=_PLACES,
    advice="pass --kafka bootstrap.servers=HOST:PORT to ask a broker",
    open="tiered_index.connectors.kafka.connector:CONNECTOR",
    claims=_is_topics,
    options=KafkaOptions,
    place_options=KafkaClientOptions,
)
