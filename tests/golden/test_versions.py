"""Indexes of every format version can be read, continued, merged and copied. The refusal of a newer version names
it.
"""

import json
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

import tiered_index
from tiered_index import IndexReader, IndexService, Retention
from tiered_index.clock import ManualClock, SystemClock
from tiered_index.errors import UnsupportedVersion
from tiered_index.format.trailer import TAIL_SIZE
from tiered_index.service.jobs.verify import check_storage
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import encode_document
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments import Segments
from tiered_index.storage.local.storage import LocalStorage

FOLDER = Path(__file__).parent / "versions"
# the versions of uploaded files (None: all are pending) and of window tables
SAMPLES = {
    "v1": (1, 1),
    "v1-rocketmq": (1, 1),
    "v2-mask-rocketmq": (2, 2),
    "v3-packed-tables-rocketmq": (2, 3),
    "v4-packed": (4, 3),
    "v5-topics": (4, 5),
    "v5-pending": (None, 5),
}
NAMES = sorted(SAMPLES)
SEGMENT = bytes(range(256)) * 64


class Sample:
    """One of the samples, unpacked."""

    def __init__(self, name: str, folder: Path) -> None:
        with zipfile.ZipFile(FOLDER / f"{name}.zip") as packed:
            packed.extractall(folder)
        self.answers = json.loads((FOLDER / f"{name}.json").read_text())
        self.root, self.uri = folder / "root", f"file://{folder}/storage"
        self.storage = LocalStorage(folder / "storage")

    @property
    def state(self) -> LogState:
        return StorageLog(self.storage, SystemClock()).open()

    def check(self, index: Any, of: str = "storage") -> None:
        """Compare all answers."""
        for name, expected in self.answers[of].items():
            assert self.rows(index, name) == expected, name

    def rows(self, index: Any, name: str) -> list[list[int]]:
        """Return the complete answer for ``topic#key``."""
        answer = index.query(*name.split("#"), max_count=1000)
        assert answer.status == "complete"
        return [[item.timestamp_ms, item.offset, item.queue_id, item.size] for item in answer]

    def verify(self) -> None:
        """Check every byte."""
        report = Report()
        check_storage(self.storage, {}, report, lambda *_: None, deep=True, threads=1)
        assert (report.findings, report.missing) == ([], [])

    def version(self, name: str) -> int:
        """Return the format version of an object."""
        return int(struct.unpack_from(">I", self.storage.get_suffix(name, TAIL_SIZE)[0], 8)[0])


@pytest.fixture
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Sample:
    return Sample(request.param, tmp_path)


every_sample = pytest.mark.parametrize("sample", NAMES, indirect=True)


def test_there_is_a_sample_of_each(request: pytest.FixtureRequest) -> None:
    assert {path.stem for path in FOLDER.glob("*.zip")} == set(NAMES)
    assert set(re.findall(r"^\| `([\w-]+)`", (FOLDER / "README.md").read_text(), re.M)) == set(NAMES)


@pytest.mark.parametrize(("name", "sample"), [(name, name) for name in NAMES], indirect=["sample"])
def test_it_is_read_as_it_was_written(name: str, sample: Sample) -> None:
    with IndexReader.open(sample.uri) as reader:
        sample.check(reader)
        assert sum(stored.count for stored in reader.log_state.objects.values()) == sample.answers["entries"]
        (segment,) = reader.log_state.archive.values()
        assert reader.segment_archive.read(segment, 0, len(SEGMENT)) == SEGMENT
    sample.verify()
    state = sample.state
    shards = {stored.name for shards in state.tables.values() for stored in shards}
    assert {sample.version(name) for name in shards} == {SAMPLES[name][1]}
    assert {sample.version(stored.name) for stored in state.files.values()} == {SAMPLES[name][0]} - {None}
    assert len(state.files or state.pending) == 4
    with IndexReader.open(sample.uri, root=sample.root) as beside:
        sample.check(beside, "root")


@every_sample
def test_its_writer_continues(sample: Sample) -> None:
    """The root recovers, files that were not uploaded continue their life cycle, and old and new tables merge."""
    with IndexService.open(root=sample.root, storage=sample.uri, background=False, local_keep_s=0) as index:
        assert index.durable_position("s") > sample.answers["position"]
        sample.check(index, "root")
        index.put("orders", 0, "k0", 10**6, 7, 1_700_351_999_000)
        sample.answers["root"]["orders#k0"].insert(0, [1_700_351_999_000, 10**6, 0, 7])
        index.seal()
        index.run_lifecycle()
        index.run_lifecycle()
        sample.check(index, "root")
    # a summary of directories, which some versions wrote, is deleted with the first record
    assert not [info.name for info in sample.storage.list("checkpoint/") if info.name.endswith(".summary")]
    with IndexReader.open(sample.uri) as reader:
        sample.check(reader, "root")
    # tables of versions that recorded no origin stay separate from those known to be a writer's
    origins = {"writer", *(shards[0].origin for shards in sample.state.tables.values())}
    assert tiered_index.merge(sample.uri, window="30d").tables == len(origins)
    assert not (sample.state.files or sample.state.pending)
    assert {shards[0].origin for shards in sample.state.tables.values()} == origins
    with IndexReader.open(sample.uri) as reader:
        sample.check(reader, "root")
    sample.verify()


@every_sample
def test_it_is_erased_and_expired(sample: Sample) -> None:
    """Entries go with their bytes, and others stay. What is left verifies, and a writer continues."""
    if sample.state.pending:
        # lookups in the storage have no pending entries before a merge
        tiered_index.merge(sample.uri)
        with IndexReader.open(sample.uri) as reader:
            sample.answers["storage"] = {name: sample.rows(reader, name) for name in sample.answers["storage"]}
    done = tiered_index.erase(sample.uri, "orders", keys="k0", yes=True, now=True, grace_s=0)
    # the sample's segment is no log of messages, so nobody knows whether it has some of the key
    segments = tuple([segment.name for segment in Segments(sample.state, sample.storage)])
    assert (done.entries > 0, len(segments), done.remaining) == (True, 1, segments)
    sample.answers["storage"] |= {"orders#k0": []}
    with IndexReader.open(sample.uri) as reader:
        sample.check(reader)
    sample.verify()
    times_ms = sorted(row[0] for rows in sample.answers["storage"].values() for row in rows)
    before_ms = times_ms[len(times_ms) // 2]
    present = ManualClock(before_ms + 100_000)
    tiered_index.expire(sample.uri, Retention(age_s=100), yes=True, now=True, clock=present)
    sample.answers["storage"] = {
        name: [row for row in rows if row[0] >= before_ms] for name, rows in sample.answers["storage"].items()
    }
    with IndexReader.open(sample.uri) as reader:
        sample.check(reader)
    sample.verify()
    with IndexService.open(root=sample.root, storage=sample.uri, background=False) as index:
        assert list(index.query("orders", "k0")) == []


@every_sample
def test_it_is_copied(sample: Sample, tmp_path: Path) -> None:
    tiered_index.copy(sample.uri, f"sqlite://{tmp_path}/copy.db")
    with IndexReader.open(f"sqlite://{tmp_path}/copy.db") as reader:
        sample.check(reader)


def _newer_tail(data: bytes) -> bytes:
    tail = bytearray(data[-TAIL_SIZE:])
    struct.pack_into(">I", tail, 8, 99)
    return data[:-TAIL_SIZE] + bytes(tail[:-4]) + zlib.crc32(tail[:-4]).to_bytes(4, "big")


@pytest.mark.parametrize("what", ["file", "table", "log", "journal"])
@pytest.mark.parametrize("sample", ["v4-packed", "v1-rocketmq"], indirect=True)
def test_a_newer_version_is_refused_by_name(sample: Sample, what: str) -> None:
    """An answer never leaves it out, and no message calls it damage."""
    state, storage = sample.state, sample.storage
    if what == "log":
        name = [info.name for info in storage.list("log/")][-1]
        record = json.loads(storage.get(name).rpartition(b"\n#crc32 ")[0])
        storage.put(name, encode_document({**record, "version": 99}))
        storage.delete_many([info.name for info in storage.list("checkpoint/")])
        for begin in (IndexReader.open, lambda uri: IndexService.open(root=sample.root, storage=uri)):
            with pytest.raises(UnsupportedVersion, match=r"log version 99 is newer"):
                begin(sample.uri)
    elif what == "journal":
        for journal in (sample.root / "unsealed").glob("*.journal"):
            data = bytearray(journal.read_bytes())
            struct.pack_into(">I", data, 8, 99)
            journal.write_bytes(data)
        for opened in (
            IndexReader.open(sample.uri, root=sample.root),
            IndexService.open(root=sample.root, storage=sample.uri, background=False),
        ):
            with opened, pytest.raises(UnsupportedVersion, match="journal version 99 is newer"):
                opened.query("orders", "k0")
    else:
        chosen = state.files.values() if what == "file" else [shard for part in state.tables.values() for shard in part]
        for stored in chosen:
            storage.put(stored.name, _newer_tail(storage.get(stored.name)))
        with IndexReader.open(sample.uri) as reader:
            with pytest.raises(UnsupportedVersion, match="format version 99 is newer"):
                reader.query("orders", "k0", max_count=1000)
            partial = reader.query("orders", "k0", max_count=1000, allow_partial=True)
            assert {failed.file for failed in partial.failed} >= {stored.file for stored in chosen}
            assert partial.status == "partial"
