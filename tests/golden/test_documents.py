"""Every kind of stored document of earlier versions is read, also with lone surrogates, which no call takes now."""

import os
import zipfile
from pathlib import Path

import pytest

from tests.support.pending import Job
from tiered_index import IndexReader, IndexService
from tiered_index.clock import SystemClock
from tiered_index.errors import InvalidArgument
from tiered_index.format.names import base_of
from tiered_index.rocketmq.follow.fingerprints import LogFingerprints, RangeFingerprint
from tiered_index.service.jobs.orphans import find_orphans
from tiered_index.service.log.kept import KeptLog
from tiered_index.service.log.log import Checkpoints, StorageLog
from tiered_index.service.log.records import LogRecord
from tiered_index.service.log.session import writer_of
from tiered_index.service.log.state import LogState
from tiered_index.service.root import Root
from tiered_index.storage.disk import Disk
from tiered_index.storage.local.storage import LocalStorage

FOLDER = Path(__file__).parent / "versions" / "documents"
COMMITS = ("2c288595", "2eddba67", "10df0670")
LONE = "t\ud800", "lone\udfff"


@pytest.fixture(params=COMMITS)
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpacked(request.param, tmp_path)


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    return unpacked(COMMITS[-1], tmp_path)


def unpacked(name: str, folder: Path) -> Path:
    with zipfile.ZipFile(FOLDER / f"{name}.zip") as packed:
        packed.extractall(folder)
    return folder


def test_the_checkpoints_of_the_newest_have_changes_whose_base_may_be_deleted(newest: Path) -> None:
    storage, root, clock = LocalStorage(newest / "index"), newest / "root", SystemClock()
    name = max(info.name for info in storage.list("checkpoint/"))
    assert base_of(name) and b'"kind":"changes"' in storage.get(name)
    assert b'"kind":"changes"' in (root / "log").read_bytes()
    whole = StorageLog(storage, clock).open()
    assert Checkpoints(storage).state_of(name) == whole
    known = KeptLog(Root(root, Disk())).read()
    assert known is not None and known.number > 1
    names = [info.name for info in storage.list("log/")][: known.number]
    assert known == LogState().replayed([(LogRecord.decode(storage.get(name), name), name) for name in names])
    # without the base they cost requests only, and the next writers replace them
    storage.delete_many([base_of(name)])
    assert StorageLog(storage, clock).open() == whole
    for _ in range(10):
        log = StorageLog(storage, clock)
        log.open()
        log.claim_epoch()
        log.write_checkpoint()
    left = [info.name for info in storage.list("checkpoint/")]
    assert name not in left and not any(map(base_of, left))
    assert StorageLog(storage, clock).open() == log.state


def offsets(index: IndexReader | IndexService, topic: str, key: str) -> list[int]:
    answer = index.query(topic, key, max_count=1000)
    assert answer.status == "complete"
    return sorted(item.offset for item in answer)


def end_lease(storage: LocalStorage) -> None:
    """Delete the lease, whose age is that of the unpacked file."""
    writer = writer_of(storage, SystemClock())
    assert writer is not None and writer.pid > 0
    storage.delete_many([info.name for info in storage.list("lease/")])


def test_there_is_a_sample_of_each() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(COMMITS)


def test_its_storage_and_root(sample: Path) -> None:
    storage = LocalStorage(sample / "index")
    end_lease(storage)
    records = [LogRecord.decode(storage.get(info.name), info.name) for info in storage.list("log/")]
    replayed = StorageLog(storage, SystemClock()).open()
    assert replayed.number == len(records)
    assert replayed.positions == {"s": 6000, LONE[1]: 2}
    assert [tombstone.topic for tombstone in replayed.expired.tombstones] == ["orders"]
    # those of each record, whose objects, segments and horizons the last checkpoint has too
    left = {stored.name: stored for record in records for stored in record.add}
    for name in (name for record in records for name in record.remove):
        del left[name]
    assert dict(replayed.objects) == left
    assert set(replayed.archive) == {segment.name for record in records for segment in record.archive}
    assert [horizon for record in records for horizon in record.expired.horizons][-1] in replayed.expired.horizons
    published = [day * 100 + number for day in range(4) for number in range(0, 40, 10)]
    with IndexReader.open(f"file://{sample}/index") as reader:
        assert offsets(reader, "orders", "k0") == [*published, 6000]
        assert offsets(reader, "orders", "k1") == []
        assert LONE[0] in [bounds.topic for bounds in reader.topics()]
        with pytest.raises(InvalidArgument, match="Unicode"):
            reader.query(LONE[0], "a")
    uri, root = f"file://{sample}/index", sample / "root"
    with IndexService.open(root=root, storage=uri, background=False) as index:
        assert offsets(index, "orders", "k0") == [*published, 6000, 7000, 7010, 8000, 8010]
        assert index.durable_position(LONE[1]) == 2
        assert index.durable_position("s") == 8019
        index.seal()
        index.run_lifecycle()
    memory = LogFingerprints.load(root, "rocketmq:x", Disk())
    assert memory.ranges == [RangeFingerprint(100, 60, 40, 1, 1), RangeFingerprint(200, 160, 40, 2, 2, 100, 3)]
    assert memory.rewritten == ((20, 40, 1_700_000_000_000),)


@pytest.mark.parametrize("compaction", ["spark", "local"])
def test_its_staged_files_are_published_from_their_root(sample: Path, compaction: str) -> None:
    """A root of a version that staged files is continued. Staged objects are orphans from then on."""
    storage, uri = LocalStorage(sample / "staged"), f"file://{sample}/staged"
    root = sample / "staged_root"
    end_lease(storage)
    for path in (sample / "staged" / "staging%").rglob("*.*"):
        os.utime(path, (1, 1))  # the time of an unpacked file is that of the test
    with IndexService.open(
        root=root, storage=uri, background=False, compaction=compaction, refresh_interval_s=0
    ) as index:
        done = index.run_lifecycle()
        assert done.pending + done.uploaded == 2
        assert len(Job(storage, SystemClock()).run()) == done.pending == (2 if compaction == "spark" else 0)
        index.run_lifecycle()
        assert index.log_state.positions == {"s": 129}
    with IndexReader.open(uri) as reader:
        assert offsets(reader, "orders", "k0") == [0, 10, 20, 100, 110, 120]
    log = Job(storage, SystemClock()).log
    orphans = {info.name for info in find_orphans(storage, log, older_than_s=3600).objects}
    assert orphans >= {info.name for info in storage.list("staging/")}
