"""Documents of topics, which say what connector wrote them, in journals, files, records, copies and readers."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.service.conftest import NOW_MS
from tiered_index import IndexReader
from tiered_index.errors import CorruptFile, InvalidArgument, OwnedBySource
from tiered_index.format.names import UNSEALED
from tiered_index.format.topic_documents import (
    MOST_BYTES,
    Revision,
    StoredDocuments,
    TopicDocument,
    connectors_in,
    documents_in,
    in_parts,
    missing_documents,
    newest_documents,
    newest_of,
    stored_documents,
)
from tiered_index.service.jobs.copying import Copier
from tiered_index.service.log.records import LogRecord, encode_document
from tiered_index.service.write import validation
from tiered_index.service.write.validation import TopicTable
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage

KEYS = TopicDocument.of("kafka", 1, {"keys": ["order"], "time": "created"})
MORE_KEYS = TopicDocument.of("kafka", 1, {"keys": ["order", "user"], "time": "created"})


def put(index, topic="t", offset=0, **more):
    index.put(topic, 0, ["k"], offset, 1, NOW_MS, **more)
    index.flush()


def published(index):
    index.seal()
    index.run_lifecycle()
    return index


def record_names(storage):
    return [listed.name for listed in storage.list("log/")]


def reader_of(storage):
    return IndexReader.open("memory://documents", storage_backend=storage)


def test_a_document_outlives_a_kill_once_an_entry_is_flushed(open_index):
    index = open_index("r")
    index.describe_topics(["t"], KEYS)
    put(index)
    index.describe_topics(["other"], MORE_KEYS)
    index.abandon()
    again = open_index("r")
    assert again.topic_documents() == {"t": KEYS}
    assert again.topic_document("t") == KEYS
    assert again.topic_document("u") is None


def test_a_changed_document_becomes_durable_with_a_position_alone(open_index):
    index = open_index("r")
    index.describe_topics(["t"], KEYS)
    put(index)
    index.describe_topics(["t"], MORE_KEYS)
    index.put("t", 0, [], 0, 1, NOW_MS, source="s", source_position=3)
    index.flush()
    index.abandon()
    assert open_index("r").topic_documents() == {"t": MORE_KEYS}


def test_the_newest_document_counts_beside_older_local_files(open_index, storage):
    index = open_index("r", local_keep_s=1e9)
    index.describe_topics(["t"], KEYS)
    put(index)
    published(index)
    index.describe_topics(["t"], MORE_KEYS)
    put(index, offset=1)
    published(index)
    index.describe_topics(["t"], KEYS)
    put(index, offset=2)
    assert storage_documents(storage) == {"t": MORE_KEYS}
    index.abandon()
    assert open_index("r").topic_documents() == {"t": KEYS}


def storage_documents(storage):
    with reader_of(storage) as reader:
        return reader.topic_documents()


def test_the_record_that_publishes_a_topic_has_its_document_and_later_ones_repeat_nothing(open_index, storage):
    index = open_index()
    index.describe_topics(["t", "u"], KEYS)
    put(index)
    published(index)
    assert storage_documents(storage) == {"t": KEYS, "u": KEYS}
    put(index, offset=1)
    published(index)
    records = [LogRecord.decode(storage.get(name), name) for name in record_names(storage)]
    named = [dict(record.documents) for record in records if record.documents]
    assert named == [{"t": Revision(1, KEYS), "u": Revision(1, KEYS)}]


def test_a_document_without_entries_is_published_with_the_next_positions(open_index, storage):
    index = open_index("r")
    index.describe_topics(["t"], KEYS)
    index.put("t", 0, [], 0, 1, NOW_MS, source="s", source_position=3)
    index.flush()
    index.abandon()
    index = open_index("r")
    put(index, "u")
    published(index)
    assert storage_documents(storage) == {"t": KEYS}


def test_readers_of_a_root_see_documents_of_entries_that_are_not_published(open_index, storage, tmp_path):
    index = open_index("r")
    index.describe_topics(["t"], KEYS)
    put(index)
    with IndexReader.open(root=tmp_path / "r", storage_backend=storage) as reader:
        assert reader.topic_documents() == {"t": KEYS}
        assert reader.topic_document("t") == KEYS
        index.describe_topics(["t"], MORE_KEYS)
        put(index, offset=1)
        assert reader.topic_document("t") == MORE_KEYS
        index.seal()
        assert reader.topic_document("t") == MORE_KEYS


def test_a_new_file_has_the_documents_of_its_topics(open_index, tmp_path):
    index = open_index("r", items=3)
    index.describe_topics(["t"], KEYS)
    for offset in range(7):
        put(index, offset=offset)
    for journal in (tmp_path / "r" / UNSEALED).glob("*.journal"):
        assert b'"order"' in journal.read_bytes()


def test_a_new_topic_costs_the_same_however_many_there_are(monkeypatch):
    topics, looked_at = TopicTable(), []

    def connectors_of(documents):
        looked_at.append(len(documents))
        return connectors_in(documents)

    monkeypatch.setattr(validation, "connectors_in", connectors_of)
    for n in range(100):
        topics.describe({f"t{n}": KEYS})
    assert (looked_at, topics.connectors) == ([1] * 100, {"kafka"})
    first = topics.documents
    assert topics.documents is first and len(first) == 100
    topics.describe({"t0": MORE_KEYS, "t1": KEYS})
    # a change leaves what others read as it is
    assert (first["t0"], topics.documents["t0"]) == (Revision(1, KEYS), Revision(2, MORE_KEYS))
    assert topics.documents_since(100) == (topics.document("t0"), 101) == ({"t0": Revision(2, MORE_KEYS)}, 101)
    topics.learn(first)
    assert topics.documents_since(101) == ({}, 101)
    topics.learn({"t1": Revision(7, MORE_KEYS)})
    assert topics.documents_since(101) == ({"t1": Revision(7, MORE_KEYS)}, 102)


def test_a_thousand_topics_share_one_document(open_index, storage):
    index = open_index(items=2000)
    topics = [f"topic-{number}" for number in range(1000)]
    index.describe_topics(topics, KEYS)
    for number, topic in enumerate(topics):
        index.put(topic, 0, ["k"], number, 1, NOW_MS)
    published(index)
    records = [storage.get(name) for name in record_names(storage)]
    (record,) = [data for data in records if b'"documents"' in data]
    assert record.count(b'"kafka"') == 1
    assert storage_documents(storage) == dict.fromkeys(topics, KEYS)


def copied_to(target, storage, clock):
    copier = Copier(storage, target, clock, threads=1)
    copier.open()
    copier.run_once()


def test_a_copy_has_the_documents_and_their_changes(open_index, storage, clock):
    index = open_index()
    index.describe_topics(["t"], KEYS)
    put(index)
    published(index)
    target = MemoryStorage()
    copied_to(target, storage, clock)
    assert storage_documents(target) == {"t": KEYS}
    index.describe_topics(["t"], MORE_KEYS)
    put(index, offset=1)
    published(index)
    copied_to(target, storage, clock)
    assert storage_documents(target) == {"t": MORE_KEYS}


def test_a_checkpoint_has_the_documents(open_index, storage):
    index = open_index()
    index.describe_topics(["t"], KEYS)
    put(index)
    published(index)
    state = index.log_state
    assert type(state).decode(state.encode(), "checkpoint").documents == {"t": Revision(1, KEYS)}


@pytest.mark.parametrize(
    ("connector", "facts", "problem"),
    [
        ("Kafka", {}, "connector"),
        ("", {}, "connector"),
        ("kafka", {"a": "x" * MOST_BYTES}, "at most 4,096"),
        ("kafka", {"a": object()}, "object"),
        ("kafka", {"a": "\ud800"}, "surrogates"),
        # facts that mean the same for all connectors
        ("kafka", {"keys": 5}, "keys"),
        ("kafka", {"keys": "order"}, "keys"),
        ("kafka", {"key_names": ["T#", 1]}, "key_names"),
        ("kafka", {"store": ["kafka:c"]}, "store"),
    ],
)
def test_wrong_documents_are_refused(connector, facts, problem):
    with pytest.raises(InvalidArgument, match=problem):
        TopicDocument.of(connector, 1, facts)


def test_wrong_topics_of_documents_are_refused(index):
    with pytest.raises(InvalidArgument, match="topic is empty"):
        index.describe_topics(["t", ""], KEYS)
    assert index.topic_documents() == {}


def test_a_topic_has_one_connector(index):
    index.describe_topics(["t"], KEYS)
    files = TopicDocument.of("files", 1)
    entry = {"topic": ["t"], "queue_id": [0], "key": ["k"], "offset": [0], "size": [1], "timestamp_ms": [NOW_MS]}
    for refused in (
        lambda: index.describe_topics(["u", "t"], files),
        lambda: index.put_source_batch(entry, document=lambda topic: files),
    ):
        with pytest.raises(InvalidArgument, match="'t' has entries of the connector 'kafka'"):
            refused()
    assert index.topic_documents() == {"t": KEYS}
    assert len(index.query("t", "k")) == 0


def test_a_stored_document_above_4_kib_is_damage(open_index, storage):
    index = open_index()
    index.describe_topics(["t"], KEYS)
    put(index)
    published(index)
    (name,) = [name for name in record_names(storage) if b'"documents"' in storage.get(name)]
    record = json.loads(storage.get(name).partition(b"\n#crc32")[0])
    record["documents"][0]["document"]["facts"] = {"a": "x" * MOST_BYTES}
    with pytest.raises(CorruptFile, match="at most 4,096"):
        LogRecord.decode(encode_document(record), name)


def test_stored_facts_of_another_type_are_damage(open_index, storage):
    index = open_index()
    index.describe_topics(["t"], KEYS)
    put(index)
    published(index)
    (name,) = [name for name in record_names(storage) if b'"documents"' in storage.get(name)]
    record = json.loads(storage.get(name).partition(b"\n#crc32")[0])
    record["documents"][0]["document"]["facts"] = {"keys": 5}
    with pytest.raises(CorruptFile, match="keys"):
        LogRecord.decode(encode_document(record), name)


def test_topics_of_several_indexes_have_the_names_of_the_keys_of_each(open_index, tmp_path):
    uris = [f"file://{tmp_path}/{name}" for name in "ab"]
    for uri, names in zip(uris, (["a=x"], ["b=x"]), strict=True):
        index = open_index(storage_backend=open_storage(uri))
        index.describe_topics(["t"], TopicDocument.of("kafka", 1, {"keys": names}))
        put(index)
        published(index)
    with IndexReader.open(uris) as reader:
        assert reader.topic_documents()["t"].key_names == ("a=",)
        (topic,) = reader.topics()
        assert (topic.connector, topic.key_names) == ("kafka", ("a=", "b="))


DOCUMENTS = st.dictionaries(
    st.sampled_from("abc"), st.builds(Revision, st.integers(1, 3), st.sampled_from([KEYS, MORE_KEYS]))
)


@given(DOCUMENTS, DOCUMENTS)
def test_documents_of_two_states_are_joined_by_their_revisions(first, second):
    joined = newest_documents(first, second)
    assert {topic: revision.number for topic, revision in joined.items()} == {
        topic: max(known[topic].number for known in (first, second) if topic in known) for topic in first | second
    }
    assert newest_documents(joined, second) == joined
    for topic, revision in joined.items():
        assert newest_of(topic, [first, second]) == revision.document
    assert not missing_documents(second, joined)
    stored = msgspec.json.decode(msgspec.json.encode(stored_documents(joined)), type=StoredDocuments)
    assert documents_in(stored) == joined


@given(st.integers(0, 30), st.integers(1, 20_000))
def test_parts_of_documents_have_each_topic_once(count, most_bytes):
    documents = {f"t{number}": Revision(1, [KEYS, MORE_KEYS][number % 2]) for number in range(count)}
    parts = in_parts(documents, most_bytes)
    assert sum(map(len, parts)) == count
    assert {topic: made for part in parts for topic, made in part.items()} == documents


def test_positions_and_queues_of_a_connector_are_closed_to_others(open_index):
    """Otherwise an entry from outside could make its follower skip messages, or hide one."""
    index = open_index("r")
    document = TopicDocument.of("toy", 1)
    entry = {"topic": ["t"], "queue_id": [0], "key": ["k"], "offset": [0], "size": [1], "timestamp_ms": [NOW_MS]}
    put(index, "own", source="toy:here/t/0", source_position=1)
    index.put_source_batch(entry, "toy:box/t/0", 7, document=lambda topic: document)
    for is_opened_again in (False, True):
        if is_opened_again:
            index = open_index("r")
        for name in ("toy:here/t/0", "toy:box/t/0"):
            with pytest.raises(OwnedBySource, match="positions named toy:"):
                index.put("own", 0, ["k"], 1, 1, NOW_MS, source=name, source_position=9)
            with pytest.raises(OwnedBySource, match="positions named toy:"):
                index.put_batch(entry | {"topic": ["own"]}, name, 9)
        with pytest.raises(OwnedBySource, match="has messages of toy"):
            index.put("t", 0, ["k"], 1, 1, NOW_MS)
        assert index.put("t", 1, ["k"], 1, 1, NOW_MS) == 1
        index.flush()
        assert index.durable_position("toy:box/t/0") == 7
        index.abandon()
