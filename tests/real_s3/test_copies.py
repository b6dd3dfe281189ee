"""Copies on a real server: whole and verified, between prefixes and backends, and across broken connections. An
interrupted copy continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tiered_index
from tests.real_s3.conftest import Server, clear
from tests.real_s3.sample import Sample
from tests.support.plain_files import plain_files
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.clock import SystemClock
from tiered_index.errors import StorageUnavailable
from tiered_index.format.verify import WINDOW_BYTES
from tiered_index.service.jobs.copying import Copier
from tiered_index.service.jobs.verify import check_storage
from tiered_index.service.jobs.verify_report import Report
from tiered_index.storage.opening import open_storage

pytestmark = pytest.mark.real_s3


@pytest.fixture
def filled(uri: str, tmp_path: Path, sample: Sample) -> str:
    """The sample as files of plain layout. One of them is larger than a window of a copy."""
    settings = {"slots": 20_000, "items": 1_000_000}
    with plain_files(), IndexService.open(root=tmp_path / "root", storage=uri, background=False, **settings) as index:
        sample.put_into(index, step=100_000)
        index.seal()
        index.run_lifecycle()
    with IndexReader.open(uri) as reader:
        assert max(one.size_bytes for one in reader.log_state.objects.values()) > WINDOW_BYTES
    return uri


@pytest.fixture
def other(server: Server, place: str) -> Iterator[str]:
    """A prefix beside the test's own."""
    uri = server.uri(f"{place}-other")
    yield uri
    clear(uri)


def check(uri: str, sample: Sample) -> None:
    report = Report()
    with open_storage(uri) as storage:
        check_storage(storage, {}, report, lambda *_: None, deep=True, threads=4)
        assert storage.purge(0) == ()
    assert not report.findings and not report.notes
    with IndexReader.open(uri) as reader:
        sample.check(reader, sample.questions(30))


@pytest.mark.parametrize("way", ["s3 to s3", "s3 to file", "file to s3"])
def test_a_copy_is_whole_and_an_interrupted_one_continues(
    filled: str, other: str, tmp_path: Path, sample: Sample, way: str
) -> None:
    source, target = filled, other if way.endswith("s3") else f"file://{tmp_path}/copy"
    if way == "file to s3":
        source = f"file://{tmp_path}/copy"
        tiered_index.copy(filled, source)
    with open_storage(source) as copied, open_storage(target) as into:
        faulty = FaultStorage(into)
        faulty.fail("put" if way.endswith("s3") else "put_if_absent", when="after")
        copier = Copier(copied, faulty, SystemClock())
        with pytest.raises(StorageUnavailable):
            copier.open()
            copier.run_once()
    report = tiered_index.copy(source, target)
    assert report.source_number and report.sent + report.kept >= 1
    assert tiered_index.copy(source, target).sent == 0
    check(target, sample)
