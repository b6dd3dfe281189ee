"""Archived segments as a source: their builds answer as builds of the broker's own files do."""

from dataclasses import dataclass

import pytest

from tests.spark.entries import BEGIN_MS, states
from tests.support.store_writer import StoreWriter
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.errors import CorruptFile
from tiered_index.format.archived import PIECE_BYTES
from tiered_index.rocketmq.archive.archive import SegmentArchiver, closed_segments
from tiered_index.spark import build
from tiered_index.storage.opening import open_storage

CONFIG = IndexConfig(slots=64, items=10_000)


@dataclass
class Stores:
    """Two stores, and the `uri` of the index that archived their closed segments. Only the open segments are left
    locally.
    """

    folders: list[str]
    uri: str
    closed_bytes: int = 0


@pytest.fixture(scope="module")
def archived(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archived")
    stores = Stores([], f"file://{folder}/storage")
    settings = {"slots": 64, "items": 10_000, "background": False, "offset_space": "commitlog"}
    with IndexService.open(root=folder / "root", storage=stores.uri, **settings) as index:
        for number, name in enumerate(("broker a", "broker-b")):
            path = folder / name
            with StoreWriter(path, segment_bytes=25_000) as writer:
                writer.put("TBW102", number, keys="k-3", store_ms=BEGIN_MS)
                for n in range(500):
                    body = b"x" * (n % 90)
                    writer.put(
                        "orders", number, body, keys=[f"k-{n % 9}", f"{number}-{n}"], store_ms=BEGIN_MS + n * 700_000
                    )
            closed = closed_segments(path / "commitlog")
            stores.closed_bytes += sum(segment.file_size for segment in closed)
            SegmentArchiver(index, name, path / "commitlog").run_once()
            for segment in path.joinpath("commitlog").iterdir():
                if segment.name not in {segment_left.path.name for segment_left in closed}:
                    segment.unlink()
            stores.folders.append(str(path))
    return stores


def answers(storage):
    with IndexReader.open(storage) as reader:
        keys = [*(f"k-{n}" for n in range(9)), "0-5", "1-17", "0-299"]
        items_by_key = {key: reader.query("orders", key, max_count=1_000).items for key in keys}
    return {
        key: [(i.timestamp_ms, i.offset, i.queue_id, i.size, i.topic_id) for i in items]
        for key, items in items_by_key.items()
    }


@pytest.mark.long
def test_archived_segments_and_the_files_give_one_index(spark, archived, tmp_path):
    local, remote, single = (f"file://{tmp_path}/{name}" for name in ("local", "remote", "one"))
    expected = build(spark, archived.folders, storage=local, config=CONFIG)
    result = build(spark, f"archive:{archived.uri}", storage=remote, config=CONFIG)
    assert (result.entries, result.windows, result.shards) == (expected.entries, expected.windows, expected.shards)
    assert answers(remote) == answers(local) and answers(local)["k-3"]
    for built in (local, remote):
        with IndexReader.open(built) as reader:
            assert not reader.query("TBW102", "k-3")  # RocketMQ's own topic, which `ingest` also leaves out
    assert states(remote).genesis.offset_space == "commitlog"
    # a build of one store has the answers of its queue only
    build(spark, f"archive:{archived.uri}?store=broker%20a", storage=single, config=CONFIG)
    assert answers(single) == {key: [item for item in items if item[2] == 0] for key, items in answers(local).items()}


@pytest.mark.long
def test_a_damaged_archived_segment_fails_the_build_or_is_skipped(spark, archived, storage, tmp_path):
    with open_storage(archived.uri) as stored:
        segment = min(states(archived.uri).archive.values(), key=lambda s: (s.store, s.start))
        data = stored.get(segment.name)
        # only the original object is gone: a copy of the index would still have the segment
        stored.delete_many([segment.name])
        stored.put(segment.name, bytes([data[0] ^ 1]) + data[1:])
        try:
            with pytest.raises(CorruptFile, match="CRC32") as caught:
                build(spark, f"archive:{archived.uri}?store=broker%20a", storage=storage, config=CONFIG)
            assert caught.value.file == segment.name
            result = build(
                spark, f"archive:{archived.uri}?store=broker%20a", storage=storage, config=CONFIG, skip_corrupt=True
            )
        finally:
            stored.delete_many([segment.name])
            stored.put(segment.name, data)
    # the damaged piece, with the message that crosses its end
    file, begin, end = result.skipped[0][:3]
    assert (result.skipped_ranges, result.skipped_bytes, file, begin) == (1, end - begin, segment.name, segment.start)
    assert PIECE_BYTES <= result.skipped_bytes < segment.size_bytes
    assert 0 < result.entries < 1_000
