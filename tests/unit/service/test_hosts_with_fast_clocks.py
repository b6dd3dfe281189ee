"""Ages of objects are by the storage's clock: a host's clock that is wrong sweeps nothing too early."""

from datetime import UTC, datetime

import boto3
import pytest
from botocore.stub import Stubber

from tests.support.later import Later
from tests.support.log_records import open_log
from tiered_index import IndexService
from tiered_index.clock import ManualClock, SystemClock
from tiered_index.service.lifecycle.orphans import find_orphans
from tiered_index.storage.base import Storage, WrapperStorage
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.s3 import reads
from tiered_index.storage.s3.storage import S3Storage

DAYS_S = 3 * 86_400
TICK_MS = 20


class Probing(WrapperStorage):
    """A backend whose answers have no time."""

    now_ms = Storage.now_ms


@pytest.fixture(params=["memory", "file", "probing"])
def place(request, tmp_path):
    if request.param == "file":
        return LocalStorage(tmp_path / "s")
    return MemoryStorage() if request.param == "memory" else Probing(MemoryStorage())


def test_a_host_whose_clock_is_days_fast_takes_nothing_that_was_sent_a_moment_ago(place, tmp_path):
    fast = ManualClock(SystemClock().now_ms() + DAYS_S * 1000)
    IndexService.open(root=tmp_path / "root", storage_backend=place, slots=7, items=20, background=False).close()
    place.put("data/sent/1.index", b"x")
    upload = place.begin_upload("data/sending/1.index")
    log = open_log(place, fast)
    found = find_orphans(place, log)
    assert (found.objects, found.uploads) == ((), ())
    found = find_orphans(Later(place, DAYS_S), log)
    assert ([info.name for info in found.objects], found.uploads) == (["data/sent/1.index"], (upload,))
    assert not list(place.list("probe/"))


def test_a_storage_tells_the_time_of_its_objects(place):
    before_ms = place.now_ms()
    place.put("a", b"x")
    # a file's time is that of the kernel's last tick
    assert before_ms - TICK_MS <= place.head("a").modified_ms


def test_s3_tells_the_services_time_by_one_request(monkeypatch):
    client = boto3.client("s3", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    monkeypatch.setattr(reads, "build_client", lambda *_: client)
    with Stubber(client) as stubber:
        headers = {"HTTPHeaders": {"date": "Tue, 14 Nov 2023 22:13:20 GMT"}}
        asked = {"Bucket": "bucket", "Prefix": "index/", "MaxKeys": 1}
        stubber.add_response("list_objects_v2", {"ResponseMetadata": headers}, asked)
        assert S3Storage("bucket", "index").now_ms() == 1_700_000_000_000
        # a service whose answers have no date is asked by an object
        stubber.add_response("list_objects_v2", {}, asked)
        stubber.add_response("put_object", {})
        written = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
        stubber.add_response("head_object", {"ContentLength": 0, "LastModified": written})
        stubber.add_response("delete_object", {})
        assert S3Storage("bucket", "index").now_ms() == 1_700_000_000_000
