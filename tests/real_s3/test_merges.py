"""A merge that dies in its uploads or before a response, on a real server. Answers equal the model's before and after.

Shards here are large enough for uploads in parts. A sweep lists and deletes the parts that a killed merge leaves.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.real_s3.commands import finished
from tests.real_s3.conftest import Server
from tests.real_s3.gate import Gate
from tests.real_s3.sample import Sample
from tests.support.later import Later
from tests.support.log_records import open_log
from tests.support.plain_files import plain_files
from tests.support.processes import started
from tiered_index import IndexReader, IndexService
from tiered_index.clock import SystemClock
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.state import LogState
from tiered_index.storage.s3.storage import S3Storage

pytestmark = pytest.mark.real_s3

DAY_S = 86_400
_MERGE = f"""
import sys
from tiered_index.clock import SystemClock
from tiered_index.format.packed import PackingOptions
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.opening import open_storage

# packed, the table would be smaller than a part
PackingOptions.of = lambda items, topics, most: None
with open_storage(sys.argv[1]) as storage:
    log = StorageLog(storage, SystemClock())
    log.open()
    print(merge(storage, log, SystemClock(), MergeOptions(window_s=30 * {DAY_S})).jobs)
"""


@pytest.fixture
def filled(uri: str, storage: S3Storage, tmp_path: Path, sample: Sample) -> str:
    """The sample as a live writer's files."""
    settings = {"slots": 20_000, "items": 100_001, "local_keep_s": 0}
    with plain_files(), IndexService.open(root=tmp_path / "root", storage=uri, background=False, **settings) as index:
        sample.put_into(index)
        index.seal()
        index.run_lifecycle()
    assert len(state_of(storage).files) >= 4
    return uri


def state_of(storage: S3Storage) -> LogState:
    return StorageLog(storage, SystemClock()).open()


def check(storage: S3Storage, uri: str, sample: Sample) -> None:
    assert sum(stored.count for stored in state_of(storage).objects.values()) == sample.workload.entries
    with IndexReader.open(uri) as reader:
        sample.check(reader, sample.questions(40))
        begin_ms, end_ms = sample.hour()
        for topic, key in sample.questions(20, seed=2):
            sample.check_one(reader.query(topic, key, begin_ms, end_ms, max_count=10**6), topic, key, begin_ms, end_ms)


def sweep(storage: S3Storage, *, days: float) -> tuple[int, int]:
    """Sweep as if so many days had passed; return the number of deleted objects and half-made uploads."""
    half_made = len(storage.purge(0))
    orphans = find_orphans(Later(storage, days * DAY_S), open_log(storage, SystemClock()))
    delete_orphans(storage, orphans)
    return len(orphans.objects), half_made - len(storage.purge(0))


MOMENTS: dict[str, tuple[str, str, bool]] = {
    "before the second part": ("PUT", r"partNumber=2\b", False),
    "before completion": ("POST", r"/data/.*uploadId=", False),
    "completed, unheard": ("POST", r"/data/.*uploadId=", True),
    "before its record": ("PUT", r"/log/", False),
    "its record, unheard": ("PUT", r"/log/", True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_merge_that_is_killed(
    server: Server, place: str, server_gate: Gate, filled: str, storage: S3Storage, sample: Sample, moment: str
) -> None:
    method, path, answer = MOMENTS[moment]
    files, command = len(state_of(storage).files), [sys.executable, "-c", _MERGE]
    server_gate.hold(method, path, answer=answer)
    with started([*command, server.uri(place, server_gate.endpoint_url)], os.environ) as process:
        server_gate.wait()
        assert process.poll() is None
        process.kill()
        process.wait()
    # the gate keeps its request: if released now, it would still arrive
    merged = moment == "its record, unheard"
    assert (not state_of(storage).files) == merged
    check(storage, filled, sample)
    unfinished = len(storage.purge(0))
    assert unfinished == (moment in ("before the second part", "before completion"))
    assert sweep(storage, days=0.9) == (0, 0)
    gone = sweep(storage, days=2)
    assert gone == (files if merged else int(not unfinished), unfinished)
    assert storage.purge(0) == ()
    assert finished([*command, filled], os.environ).strip() == ("0" if merged else "1")
    assert [len(shards) for shards in state_of(storage).tables.values()] == [1] and not state_of(storage).files
    check(storage, filled, sample)
    assert sweep(storage, days=2) == (0 if merged else files, 0)
