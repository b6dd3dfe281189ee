"""The places of messages that options of commands name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiered_index.connectors.kafka.spec import KafkaClientOptions
from tiered_index.connectors.registry import CONNECTORS


def opened_places(store: Path | None, kafka: KafkaClientOptions, topics: str | None = None) -> dict[str, Any]:
    """Open the folder of a store and the brokers of Kafka: the `places` of `MessageSources`.

    `topics` is the address of topics, whose brokers are used. Raises as `Connector.place`.
    """
    places: dict[str, Any] = {}
    if store is not None:
        places["rocketmq"] = CONNECTORS.connector("rocketmq").place(None, str(store))
    if topics is not None or kafka.kafka is not None or kafka.kafka_config is not None:
        places["kafka"] = CONNECTORS.connector("kafka").place(kafka, topics)
    return places
