"""The brokers of commands that read records of Kafka."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_index.connectors.kafka.spec import KafkaClientOptions

if TYPE_CHECKING:
    from tiered_index.connectors.kafka.client.broker import KafkaBroker


def open_kafka_broker(options: KafkaClientOptions, place: str | None = None) -> KafkaBroker | None:
    """Return the brokers at `place`, or those of the setting ``bootstrap.servers``; None: there is neither."""
    if place is None and options.kafka is None and options.kafka_config is None:
        return None
    from tiered_index.connectors.kafka.connector import client_settings

    settings = client_settings(options)
    if place is None and "bootstrap.servers" not in settings:
        return None
    from tiered_index.connectors.kafka.client.broker import KafkaAddress, KafkaBroker

    return KafkaBroker(
        settings if place is None else settings | {"bootstrap.servers": KafkaAddress.parse(place).servers}
    )
