"""The demo's broker: its store has the stream, at the places that this process computed."""

from __future__ import annotations

import json

import pytest

from tests.demo import processes as module
from tests.demo.processes import Broker, ProcessFailed, placed
from tests.demo.workload import TOPICS, Workload
from tests.support.store_writer import StoreWriter
from tiered_index.rocketmq.log.commitlog import CommitLogReader

COUNT, SEED = 2_000, 7


@pytest.fixture(scope="module")
def drawn():
    return Workload.generate(COUNT, seed=SEED)


def keys_of(workload, number):
    return tuple(
        workload.keys[k] for k, m in zip(workload.entry_key, workload.entry_message, strict=True) if m == number
    )


def check(workload, messages):
    for number, message in enumerate(messages):
        assert (message.physical_offset, message.size) == (workload.offset[number], workload.size[number])
        assert (message.topic, message.queue_id) == (TOPICS[workload.topic[number]], workload.queue_id[number])
        assert message.store_ms == workload.timestamp_ms[number]
    for number in range(0, len(messages), 97):
        assert messages[number].index_keys == keys_of(workload, number)


def test_the_process_writes_the_placed_messages_and_waits_before_the_tail(drawn, tmp_path):
    workload = placed(drawn)
    store = tmp_path / "store"
    with Broker(COUNT, SEED, 1_900, store) as broker:
        broker.wait_written()
        assert broker.process.poll() is None
        assert len(list(CommitLogReader(store / "commitlog").messages())) == 1_900
        broker.write_tail()
        assert broker.process.poll() is not None
    messages = list(CommitLogReader(store / "commitlog").messages())
    assert len(messages) == COUNT
    check(workload, messages)
    bodies = {message.body() for message in messages}
    assert {len(body) for body in bodies} == set(range(64))
    assert all(isinstance(json.loads(body), dict) for body in bodies if len(body) > 26)


@pytest.mark.parametrize("segment_bytes", [400, 1_000, 4_096])
def test_places_behind_blanks(drawn, tmp_path, segment_bytes):
    workload = placed(drawn, segment_bytes)
    with StoreWriter(tmp_path, segment_bytes=segment_bytes) as writer:
        for number in range(300):
            body = bytes(int(drawn.size[number]) % module._BODY_BYTES)
            writer.put(
                TOPICS[drawn.topic[number]],
                int(drawn.queue_id[number]),
                body,
                keys=keys_of(drawn, number),
                store_ms=int(drawn.timestamp_ms[number]),
            )
    check(workload, list(CommitLogReader(tmp_path / "commitlog").messages()))


def test_a_process_that_fails_says_why(tmp_path):
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    (tmp_path / "store" / "consumequeue").touch()
    with Broker(COUNT, SEED, 10, tmp_path / "store") as broker, pytest.raises(ProcessFailed, match="exit code"):
        broker.wait_written()
        broker.write_tail()
