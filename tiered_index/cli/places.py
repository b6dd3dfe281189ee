"""The places of messages that options of commands name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tiered_index.connectors.kafka.spec import KafkaClientOptions
from tiered_index.connectors.registry import CONNECTORS, ConnectorSpec


class FollowedSource(NamedTuple):
    """The source that a command follows: its connector, the options of that, and its address."""

    spec: ConnectorSpec
    options: Any
    address: str


def opened_places(
    store: Path | None, kafka: KafkaClientOptions, followed: FollowedSource | None = None
) -> dict[str, Any]:
    """Open the folder of a store, the brokers of Kafka, and the place of a source: the `places` of `MessageSources`.

    Raises as `Connector.place`.
    """
    places: dict[str, Any] = {}
    if store is not None:
        places["rocketmq"] = CONNECTORS.connector("rocketmq").place(None, str(store))
    if followed is not None and followed.spec.name not in places:
        spec, options, address = followed
        places[spec.name] = CONNECTORS.connector(spec.name).place(options, address)
    if "kafka" not in places and (kafka.kafka is not None or kafka.kafka_config is not None):
        places["kafka"] = CONNECTORS.connector("kafka").place(kafka, None)
    return places
