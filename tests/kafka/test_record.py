"""Records of Kafka as the package passes them on."""

from __future__ import annotations

from tiered_index.kafka.record import KafkaRecord, TimestampType


def test_the_size_of_a_record_is_that_of_key_value_and_headers():
    assert KafkaRecord("orders", 3, 7, None, None).size == 0
    record = KafkaRecord("orders", 3, 7, b"key", b"value", (("trace", b"12"), ("trace", None), ("ä", b"")))
    assert record.size == 3 + 5 + 7 + 5 + 2
    assert (record.timestamp_ms, record.timestamp_type) == (None, TimestampType.NONE)
