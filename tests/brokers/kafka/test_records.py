"""Records of every kind: the index, the archive and the shown record are what a plain consumer reads."""

import pytest

from tests.brokers.kafka.checked import assert_indexed
from tests.kafka.followed import archive, archived, places
from tests.support.kafka_cluster import Producing
from tiered_index.connectors.kafka.record import TimestampType, key_text

_NEVER = "9223372036854775807"


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("broker_codec", ["producer", "zstd"])
def test_each_codec(servers, topics, index, topic, codec, broker_codec):
    topics.create(topic, 2, compression_type=broker_codec)
    producing = Producing(servers, compression_type=codec, linger_ms=50)
    producing.send(topic, [{"key": f"k{n % 50}", "value": f"{n} " * 40} for n in range(500)])
    follower, logged = assert_indexed(index, topics, topic)
    assert (follower.messages, len(logged)) == (500, 500)


def test_records_of_20_mb(servers, topics, index, topic):
    topics.create(topic, max_message_bytes=25_000_000)
    producing = Producing(servers, message_max_bytes=25_000_000, compression_type="none")
    large = bytes(range(256)) * (20 * 4096)
    producing.send(topic, [{"key": f"k{n}", "value": large[n:]} for n in range(3)] + [{"key": "small", "value": "s"}])
    _, logged = assert_indexed(index, topics, topic, shown=4)
    assert [len(record.value) for record in logged] == [len(large), len(large) - 1, len(large) - 2, 1]


KEYS = {
    "null": None,
    "empty": b"",
    "text": "Bestellung-ü-😀".encode(),
    "binary": bytes(range(128, 256)),
    "zeros": b"\0\0\0\0",
    # a magic byte and the number of a schema stand before the key
    "framed": b"\0\0\0\0\x07order-1",
    "long": b"k" * 30_000,
    "too long": b"k" * 70_000,
    "like hexadecimal": b"0xff",
}


@pytest.mark.parametrize("kind", KEYS)
def test_keys(producing, topics, index, topic, kind):
    topics.create(topic)
    key = KEYS[kind]
    producing.send(topic, [{"key": key, "value": b"v%d" % n} for n in range(3)])
    if kind == "too long":
        follower = archive(index, topics.servers, topic)
        assert (follower.messages, follower.left_out, follower.entries) == (3, 0, 0)
        assert list(archived(index)) == topics.records(topic)
        return
    follower, logged = assert_indexed(index, topics, topic)
    assert [record.key for record in logged] == [key] * 3
    assert (follower.messages, follower.left_out) == (3, 0 if key else 3)
    assert places(index, topic, key_text(key or b"none")) == ({(0, 0), (0, 1), (0, 2)} if key else set())


HEADERS = {
    "none": [],
    "null value": [("trace", None)],
    "empty value": [("trace", b"")],
    "null beside a value": [("trace", None), ("trace", b"t-1")],
    "repeated": [("trace", b"t-1"), ("other", b"o"), ("trace", b"t-2"), ("trace", b"t-1")],
    "binary": [("trace", b"\xff\x00\xfe")],
    "empty name": [("", b"t-1")],
    "name of two bytes": [("tracé", b"t-1")],
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers(producing, topics, index, topic, kind):
    topics.create(topic)
    headers = HEADERS[kind]
    producing.send(topic, [{"key": "k", "value": "v", "headers": headers}])
    _, (logged,) = assert_indexed(index, topics, topic, keys=("key", "header:trace"))
    assert list(logged.headers) == headers
    for value in {value for name, value in headers if name == "trace" and value}:
        assert places(index, topic, key_text(value)) == {(0, 0)}


CLOCKS_MS = [1, 999, 1_000, 86_400_000, 951_782_400_000, 1_700_000_000_123, 4_102_444_800_000, 253_402_300_799_000]


@pytest.mark.parametrize("clock", ["CreateTime", "LogAppendTime"])
def test_clocks_from_1970_to_9999(producing, topics, index, topic, clock):
    topics.create(
        topic,
        message_timestamp_type=clock,
        message_timestamp_after_max_ms=_NEVER,
        message_timestamp_before_max_ms=_NEVER,
        retention_ms=-1,
    )
    producing.send(topic, [{"key": f"k{n}", "value": "v", "timestamp": ms} for n, ms in enumerate(CLOCKS_MS)])
    _, logged = assert_indexed(index, topics, topic, shown=len(CLOCKS_MS))
    if clock == "CreateTime":
        assert [record.timestamp_ms for record in logged] == CLOCKS_MS
    else:
        assert {record.timestamp_type for record in logged} == {TimestampType.LOG_APPEND}
        assert min(record.timestamp_ms for record in logged) > CLOCKS_MS[5]


def test_tombstones_and_empty_values(producing, topics, index, topic):
    topics.create(topic)
    producing.send(topic, [{"key": f"k{n}", "value": value} for n, value in enumerate([None, b"", b"\0"])])
    _, logged = assert_indexed(index, topics, topic, shown=3)
    assert [record.value for record in logged] == [None, b"", b"\0"]
