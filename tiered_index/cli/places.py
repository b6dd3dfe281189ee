"""The places of messages that options of commands name."""

from __future__ import annotations

from typing import Any, NamedTuple

from tiered_index.connectors.kafka.spec import KafkaClientOptions
from tiered_index.connectors.registry import CONNECTORS, FILES, OF_OTHERS, ConnectorSpec


class FollowedSource(NamedTuple):
    """The source that a command follows: its connector, the options of that, and its address."""

    spec: ConnectorSpec
    options: Any
    address: str


def spec_of_store(address: str) -> ConnectorSpec:
    """Return the connector of an address of messages. A path is that of a RocketMQ store."""
    spec = CONNECTORS.of_address(address)
    return CONNECTORS.spec(OF_OTHERS) if spec.name == FILES else spec


def opened_places(
    store: str | None, kafka: KafkaClientOptions, followed: FollowedSource | None = None
) -> dict[str, Any]:
    """Open the messages at an address, the brokers of Kafka, and the place of a source: `places` of `MessageSources`.

    Raises as `Connector.place`.
    """
    places: dict[str, Any] = {}
    if store is not None:
        name = spec_of_store(store).name
        places[name] = CONNECTORS.connector(name).place(None, store)
    if followed is not None and followed.spec.name not in places:
        spec, options, address = followed
        places[spec.name] = CONNECTORS.connector(spec.name).place(options, address)
    if "kafka" not in places and (kafka.kafka is not None or kafka.kafka_config is not None):
        places["kafka"] = CONNECTORS.connector("kafka").place(kafka, None)
    return places
