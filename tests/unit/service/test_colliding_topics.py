"""Topics whose keys have one hash: RocketMQ's preset keeps no fingerprint, so only the topic tells their entries
apart.
"""

import pytest

from tiered_index import IndexReader, Lookup
from tiered_index.format.hashing import key_hash

T = 1_700_000_000_000
TOPICS = ("Aa", "BB")  # one Java hash


@pytest.mark.parametrize("entries", [2, 30])
def test_each_topic_has_its_own_answers(open_index, storage, clock, entries):
    """Also where queue and offset are the same (RocketMQ's results overwrite each other), in every state of the
    file.
    """
    assert key_hash("Aa", "k") == key_hash("BB", "k")
    index = open_index("root", preset="rocketmq", items=200, local_keep_s=0)
    for offset in range(entries):
        for size, topic in enumerate(TOPICS):
            index.put(topic, 0, "k", offset, size, T + 1000 * offset)

    def check(asked):
        for size, topic in enumerate(TOPICS):
            found = [(item.topic, item.offset, item.size) for item in asked.query(topic, "k")]
            assert found == [(topic, offset, size) for offset in reversed(range(entries))]
        many = asked.query_many([Lookup(topic=topic, key="k") for topic in TOPICS])
        assert [[item.size for item in answer] for answer in many] == [[0] * entries, [1] * entries]
        assert not asked.query("C#", "k").items

    check(index)
    index.flush()
    check(index)
    with IndexReader.open(root=index.config.root, storage_backend=storage, clock=clock) as reader:
        check(reader)
    index.seal()
    index.run_lifecycle()
    index.run_lifecycle()
    assert [handle.place for handle in index.files()] == ["storage"]
    check(index)
