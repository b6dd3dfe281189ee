"""Life-cycle rules of a bucket that archive objects or delete the log's oldest records are reported, and the index
works around them.
"""

import pytest
from botocore.exceptions import ClientError

from tests.support.storage_faults import FaultStorage
from tiered_index import IndexService
from tiered_index.base.clock import SystemClock
from tiered_index.errors import ObjectArchived
from tiered_index.format.names import log_name
from tiered_index.service.jobs.copying import Copier
from tiered_index.service.jobs.repair import Repairs
from tiered_index.service.jobs.segments.catalogs import merge_catalogs
from tiered_index.service.jobs.verify import check_storage
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.s3.boto import translate

BEGIN_MS = 1_700_000_000_000


@pytest.fixture
def storage(tmp_path):
    """Two files of one entry."""
    storage = MemoryStorage()
    with IndexService.open(
        root=tmp_path / "root", storage_backend=storage, slots=7, items=20, background=False, local_keep_s=0
    ) as index:
        for offset in (1, 2):
            index.put("t", 0, "k", offset, 7, BEGIN_MS + offset * 1000)
            index.seal()
            index.run_lifecycle()
    return storage


def verified(storage, *, deep=True):
    report = Report()
    check_storage(storage, {}, report, lambda done, what: None, deep=deep, threads=2)
    return report


def test_an_archived_object_is_distinguished_from_a_missing_permission():
    answer = {"Error": {"Code": "InvalidObjectState", "Message": "x"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    error = translate(ClientError(answer, "GetObject"), doing="reading 'a'", uri="s3://b", name="a")
    assert isinstance(error, ObjectArchived)
    assert "archived: restore it first" in str(error) and "grant" not in str(error)


@pytest.mark.parametrize("deep", [False, True])
def test_verify_lists_every_archived_object(storage, deep):
    archived = FaultStorage(storage)
    for operation in ("get", "get_range", "get_suffix"):
        archived.fail(operation, name_prefix="data/", times=None, error=ObjectArchived)
    report = verified(archived, deep=deep)
    assert (report.status, report.findings) == ("incomplete", [])
    assert sorted(what for what, _ in report.unchecked) == [info.name for info in storage.list("data/")]
    assert {type(error) for _, error in report.unchecked} == {ObjectArchived}


def test_verify_continues_from_a_checkpoint_if_records_are_archived(storage):
    archived = FaultStorage(storage)
    archived.fail("get", name_prefix=log_name(1), times=None, error=ObjectArchived)
    report = verified(archived)
    assert (report.status, [what for what, _ in report.unchecked]) == ("incomplete", [log_name(1)])
    assert report.checked["objects"] == 2


@pytest.mark.parametrize("kind", ["object", "segment", "catalog"])
def test_a_repair_tells_of_an_archived_copy_and_repairs_the_rest(tmp_path, storage, kind):
    """The bucket of the copy has archived one object of it."""
    with IndexService.open(root=tmp_path / "root", storage_backend=storage, background=False) as index:
        for store in ("log", "other"):
            index.archive(store, 0, 1000, lambda at, length: bytes(length))
        log = index._session.log
        merge_catalogs(log)
        index.archive("log", 1000, 1000, lambda at, length: bytes(length))
    copier = Copier(storage, target := FaultStorage(MemoryStorage()), SystemClock())
    copier.open()
    copier.run_once()
    prefix = {"object": "data/", "segment": "segments/", "catalog": "catalog/"}[kind]
    first, *others = bad = [info.name for info in storage.list(prefix)]
    for name in bad:
        storage.put(name, bytes(100))
    for operation in ("get", "get_range", "get_suffix"):
        target.fail(operation, name_prefix=first, times=None, error=ObjectArchived)
    report = verified(storage)
    log = StorageLog(storage, SystemClock())
    log.open()
    done = Repairs(storage, log, standby=target).run(report, yes=True)
    assert sorted(repair.object for repair in done) == others
    (note,) = [note for note in report.notes if "could replace a damaged object, but can't be read" in note]
    assert first in note and bool(others) is (kind != "catalog")
    target.clear()
    assert [repair.object for repair in Repairs(storage, log, standby=target).run(report, yes=True)] == [first]
    assert verified(storage).status == "ok"


def test_verify_says_that_the_oldest_records_are_gone_and_checks_the_rest(storage):
    storage.delete_many([log_name(1), log_name(2)])
    report = verified(storage)
    assert [(defect.file, defect.part) for defect in report.findings] == [(log_name(3), "log")]
    assert "life-cycle rule" in report.findings[0].problem
    assert report.checked["objects"] == 2
    copier = Copier(storage, target := MemoryStorage(), SystemClock())
    copier.open()
    report = copier.run_once()
    assert report.sent == 2
    assert "the log's first records are gone" in report.problems[0]
    assert verified(target).status == "ok"
