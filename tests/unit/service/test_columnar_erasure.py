"""One function finds the archived messages of an erasure by the shared columns, whatever connector wrote them."""

import pickle

import pyarrow as pa
import pytest

from tiered_index import IndexReader
from tiered_index.connectors.archive.archiver import ColumnArchiver
from tiered_index.connectors.archive.columns import SHARED, ArchiveFormat
from tiered_index.connectors.archive.erasure import columns_to_erase
from tiered_index.connectors.archive.log import logs_of_index
from tiered_index.connectors.erase import messages_to_erase
from tiered_index.connectors.files import row_archive
from tiered_index.connectors.kafka import columns
from tiered_index.errors import ConfigError
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.jobs.erase import EraseRequest

OTHER = ArchiveFormat("messages of a test", "test.messages", 1, pa.schema({**SHARED, "text": pa.binary()}), ("text",))
STORES = {"kafka:c/t/1": columns.FORMAT, "rows:-/t/1": row_archive.FORMAT, "test:here/t/1": OTHER}
MESSAGES = [
    {"offset": 0, "timestamp": 1_000, "keys": ["a", "b"]},
    {"offset": 1, "timestamp": 2_999, "keys": ["b"]},
    {"offset": 2, "timestamp": 3_000, "keys": ["a"]},
    {"offset": 3, "timestamp": None, "keys": ["a"]},
    {"offset": 4, "timestamp": 1_000, "keys": []},
]


@pytest.fixture(params=STORES.items(), ids=lambda named: named[0].partition(":")[0])
def archived(open_index, request):
    """Return the form, the archive, and the only segment, whose messages are those above."""
    (store, form), index = request.param, open_index()
    notes = columns.notes_of_records(["key"]) if form is columns.FORMAT else None
    # the clock of kinds of times is Kafka's own
    more = {"topic": "t", "timestampType": 0} if form is columns.FORMAT else {"topic": "t"}
    archiver = ColumnArchiver(index, form)
    archiver.add(store, 0, 6, pa.Table.from_pylist([message | more for message in MESSAGES], form.schema))
    assert archiver.archive(notes) == 1
    return form, index.segment_archive, index.archived()[0]


def erased(archived, before_ms=10_000, rules=(), **request):
    """Return what is found of a request, and the offsets that are left; None: the file stays."""
    form, archive, segment = archived
    # tasks of Spark get the function
    make = pickle.loads(pickle.dumps(columns_to_erase(form, EraseRequest(**{"topic": "t", **request}), rules)))
    erasure = make(before_ms, True)(archive, segment)
    assert erasure.problem is None
    if erasure.file is None:
        assert erasure.messages == 0
        return None
    records, notes = form.decode(erasure.file, "f")
    assert notes == form.read(archive, segment).notes
    assert (erasure.messages, erasure.rows) == (len(MESSAGES) - len(records), len(records))
    return records["offset"].to_pylist()


def test_messages_go_by_key_queue_topic_and_time(archived):
    upload_ms = archived[2].published_ms
    assert erased(archived, upload_ms + 1_000, keys=("a",)) == [1, 4]
    assert erased(archived, keys=("a",)) == [1, 3, 4]
    assert erased(archived, keys=("a", "b")) == [3, 4]
    assert erased(archived, 3_999, keys=("a",)) == [1, 2, 3, 4]
    assert erased(archived) == erased(archived, queue_id=1) == [3]
    assert erased(archived, upload_ms + 1_000) == []


def test_a_file_without_such_messages_stays(archived):
    for request in ({"keys": ("c",)}, {"queue_id": 2}, {"topic": "other"}):
        assert erased(archived, **request) is None
    assert erased(archived, 2_000) == [1, 2, 3]
    assert erased(archived, 1_999) is None


def test_a_file_that_can_not_be_read_or_lacks_keys_is_a_problem(archived):
    form, archive, segment = archived
    sought = columns_to_erase(form, EraseRequest("t", keys=("a",)), ["function"])(10_000, True)(archive, segment)
    if form is columns.FORMAT:
        lack = "was archived without the keys that a function gave: erase the queue, or the topic"
        assert (sought.problem, sought.file) == (f"{segment.name} {lack}", None)
    else:
        assert sought.messages == 2
    archive.storage.delete_many([segment.name])
    archive.tables._cache.clear()
    erasure = columns_to_erase(form, EraseRequest("t"))(10_000, True)(archive, segment)
    assert segment.name in erasure.problem and erasure.messages == 0


def test_a_store_without_topic_and_queue_in_its_name_has_queue_0(open_index):
    index = open_index()
    archiver = ColumnArchiver(index, OTHER)
    rows = [message | {"topic": topic} for message, topic in zip(MESSAGES, "tutut", strict=True)]
    archiver.add("test:log", 0, 5, pa.Table.from_pylist(rows, OTHER.schema))
    archiver.archive()
    archived = OTHER, index.segment_archive, index.archived()[0]
    assert erased(archived, queue_id=0) == erased(archived) == [1, 3]
    assert erased(archived, keys=("b",)) == [1, 2, 3, 4]
    assert erased(archived, queue_id=1) is None


def test_a_connector_that_is_not_installed_is_a_problem_of_its_own_topics_alone(open_index):
    index = open_index()
    index.describe_topics(["t"], TopicDocument.of("test", 1, package="package-of-test"))
    index.put_source_batch(entry(), "test:here/t/1", 6)
    archiver = ColumnArchiver(index, OTHER)
    archiver.add("test:here/t/1", 0, 5, pa.Table.from_pylist([MESSAGES[0] | {"topic": "t"}], OTHER.schema))
    archiver.archive()
    index.seal()
    index.run_lifecycle()
    (segment,) = index.archived()
    lack = "the connector 'test' wrote this topic: install the package package-of-test"
    for topic, problem in (("t", lack), ("u", None)):
        make = messages_to_erase(EraseRequest(topic), index.log_state)
        erasure = make(10_000, True)(index.segment_archive, segment)
        assert erasure.problem == (problem and f"{segment.name}: {problem}")
        assert erasure.messages == 0
    # nor can another index be made of its archive
    with IndexReader.open("memory://x", storage_backend=index.storage) as reader:
        assert logs_of_index(reader, lambda topic: topic != "t") == {}
        with pytest.raises(ConfigError, match=r"^there is no connector 'test': install the package package-of-test$"):
            logs_of_index(reader, lambda topic: True)


def entry():
    return {"topic": ["t"], "queue_id": [1], "key": ["a"], "offset": [0], "size": [1], "timestamp_ms": [1_000]}
