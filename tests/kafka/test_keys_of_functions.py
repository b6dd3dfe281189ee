"""The archive has the keys that a function gave: lookups, erasures and `ingest archive:` do not need the function."""

from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tests.kafka.followed import archive, ingest
from tests.kafka.test_archive_kept import entries_of, paths, run
from tiered_index import IndexReader, IndexService, erase
from tiered_index.connectors.kafka.messages import KafkaMessages


def messages_of(uri, topic, key):
    with IndexReader.open(uri) as reader:
        source = KafkaMessages(reader.segment_archives)
        return [(each.state, each.message.value) for each in reader.messages(topic, key, source=source)]


def by_function(record):
    """No rule gives these keys. Record 3 has none, and record 4 two."""
    last = record.key[-1:].decode()
    return {"3": [], "4": ["of-4", "of-5"]}.get(last, [f"of-{last}"])


@pytest.fixture
def of_function(servers, producing, topic, tmp_path):
    """Archive 10 records with the keys of a function; return the place and the root of the index."""
    producing.send(topic, [{"key": f"k{n}", "value": "v", "partition": 0} for n in range(10)])
    uri, root = (tmp_path / "storage").as_uri(), tmp_path / "root"
    with IndexService.open(root=root, storage=uri, background=False, slots=97, items=500) as index:
        archive(index, servers, topic, function=by_function)
        index.seal()
        index.run_lifecycle()
    return uri, root


def test_the_keys_of_a_function_are_kept_beside_the_records(of_function, topic, tmp_path):
    uri, _ = of_function
    rows = pq.read_table(paths(uri)).to_pylist()
    assert [row["keys"] for row in rows] == [by_function(SimpleNamespace(key=f"k{n}".encode())) for n in range(10)]
    assert messages_of(uri, topic, "of-7") == [("archived", b"v")]
    new = (tmp_path / "new").as_uri()
    assert run("ingest", f"archive:{uri}", "--storage", new)["entries"] == 10
    assert entries_of(new) == entries_of(uri)
    # the copies have them, too
    assert [row["keys"] for row in pq.read_table(paths(new)).to_pylist()] == [row["keys"] for row in rows]


def test_a_key_of_a_function_is_erased_with_its_records_alone(of_function, topic):
    uri, _ = of_function
    certificate = erase(uri, topic, keys="of-5", yes=True, now=True, grace_s=0)
    assert (certificate.messages_erased, certificate.segments_remaining) == (2, ())
    # the record's key is no key of the index
    assert erase(uri, topic, keys="k7", yes=True, now=True, grace_s=0).messages_erased == 0
    assert [row["offset"] for row in pq.read_table(paths(uri)).to_pylist()] == [0, 1, 2, 3, 6, 7, 8, 9]
    assert messages_of(uri, topic, "of-6") == [("archived", b"v")]


def test_a_file_that_lacks_the_keys_of_a_function_is_named(of_function, servers, producing, topic, tmp_path):
    uri, root = of_function
    producing.send(topic, [{"key": "later", "value": "v", "partition": 0}])
    with IndexService.open(root=root, storage=uri, background=False) as index:
        archive(index, servers, topic)
        index.seal()
        index.run_lifecycle()
    certificate = erase(uri, topic, keys="of-1", yes=True, now=True, grace_s=0)
    with IndexReader.open(uri) as reader:
        lacking = reader.segments().last(reader.segments().stores[0]).name
    assert (certificate.messages_erased, certificate.segments_remaining) == (1, (lacking,))
    assert certificate.segment_problems == (
        f"{lacking} was archived without the keys that a function gave: erase the queue, or the topic",
    )
    new = (tmp_path / "new").as_uri()
    refused = run_here("ingest", f"archive:{uri}", "--storage", new)
    assert (refused.code, f"{lacking} was archived without the keys" in refused.err) == (2, True), refused.err
    (skipped,) = run("ingest", f"archive:{uri}", "--storage", new, "--skip-missing")["skipped"]
    assert (skipped["begin"], skipped["end"]) == (10, 11)
    with IndexReader.open(new) as reader:
        # by the rules of the later run, also in the file of the function
        assert [len(reader.query(topic, key)) for key in ("of-2", "k2", "later")] == [1, 1, 1]


def test_a_key_that_was_added_later_is_erased_beside_those_of_a_function(of_function, servers, topic):
    uri, root = of_function
    with IndexService.open(root=root, storage=uri, background=False) as index:
        ingest(index, servers, topic, keys=("key",), function=None)
        index.seal()
        index.run_lifecycle()
    for key, count in (("k1", 1), ("of-2", 1), ("k6", 1), ("k2", 0)):
        assert erase(uri, topic, keys=key, yes=True, now=True, grace_s=0).messages_erased == count, key
