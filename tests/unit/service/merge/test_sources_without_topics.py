"""A source whose trailer has no topic table: every key is found after the merge, and topics are told apart no more
where hashes agree.
"""

import dataclasses
from collections.abc import Callable

import pytest

from tests.support.merging import BASE_MS, HOUR_MS, Merging
from tiered_index.format.metadata import Metadata
from tiered_index.service.cold.path import ColdPath

COLLIDING = ("Aa", "BB")
"""Topics of one Java hash."""


def publish_without_topics(life: Merging, patch: pytest.MonkeyPatch) -> None:
    real = Metadata.encode
    with patch.context() as patched:
        patched.setattr(Metadata, "encode", lambda self: real(dataclasses.replace(self, topics=())))
        life.publish()


@pytest.mark.parametrize("preset", ["rocketmq", "native"])
def test_one_source_without_a_topic_table(
    make_life: Callable[..., Merging], monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    life = make_life(preset=preset)
    for hour in range(4):
        for number, topic in enumerate(("orders", "payments")):
            # keys of their own: without names only hashes tell topics apart
            life.put(
                [(BASE_MS + hour * HOUR_MS + n * 1000, f"{topic}-{n % 5}") for n in range(20)],
                topic,
                topic_id=10 + number,
            )
        if hour == 2:
            publish_without_topics(life, monkeypatch)
        else:
            life.publish()
    life.later()
    life.check()
    report = life.merge()
    assert (report.sources, report.entries, report.tables) == (4, 160, 1)
    life.check()
    (shards,) = life.state.tables.values()
    cold = ColdPath(life.storage, keyed=preset == "native")
    try:
        assert {cold.trailer(stored).metadata.topics for stored in shards} == {()}
    finally:
        cold.close()


def test_topics_of_one_hash_answer_for_each_other_where_no_table_tells_them_apart(
    make_life: Callable[..., Merging], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = make_life(preset="rocketmq")
    for hour, topic in enumerate(COLLIDING):
        life.put([(BASE_MS + hour * HOUR_MS, "k")], topic)
        if hour == 0:
            publish_without_topics(life, monkeypatch)
        else:
            life.publish()
    life.later()
    life.merge()
    with life.reader() as reader:
        for topic in COLLIDING:
            assert len(reader.query(topic, "k").items) == 2
        assert not reader.query("orders", "k").items
