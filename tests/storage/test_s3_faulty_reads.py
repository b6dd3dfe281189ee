"""Reads of an `S3Storage` over a network that damages answers: right bytes after a transient fault, else a helpful
error.

The server behind the proxy is a working one. `test_s3_answers` scripts the answers that no server gives.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from tests.storage.conftest import WAYS
from tests.storage.scripted_server import error
from tests.support.counting_proxy import Action, CountingProxy, Request, counting_proxy, times
from tests.support.s3_server import S3Server
from tiered_index.errors import (
    InvalidArgument,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageMisconfigured,
    StorageUnavailable,
)
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage

DATA = bytes(range(256)) * 16
SIZE = len(DATA)
ATTEMPTS = 3


@pytest.fixture(scope="module")
def proxy(server: S3Server) -> Iterator[CountingProxy]:
    with counting_proxy(server.endpoint_url) as running:
        yield running


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def s3(request: pytest.FixtureRequest, s3_environment: S3Server, proxy: CountingProxy) -> Iterator[S3Storage]:
    options = S3Options(endpoint_url=proxy.endpoint_url, max_attempts=ATTEMPTS, read_timeout_s=20, client=request.param)
    storage = S3Storage(s3_environment.new_bucket(), "pre/fix", options, sleep=lambda seconds: None)
    proxy.fault = None
    storage.put("object", DATA)
    proxy.reset()
    yield storage
    proxy.reset()
    storage.close()


READS: dict[str, tuple[Callable[[Storage], bytes], bytes]] = {
    "a range": (lambda s3: s3.get_range("object", 100, 1000), DATA[100:1100]),
    "a suffix": (lambda s3: s3.get_suffix("object", 1000)[0], DATA[-1000:]),
    "a whole object": (lambda s3: s3.get("object"), DATA),
}
PASSING: dict[str, tuple[Action, int]] = {
    "throttled": (Action(answer=error(503, "SlowDown", "reduce your request rate")), ATTEMPTS),
    "an inner error": (Action(answer=error(500, "InternalError")), ATTEMPTS),
    "a lost answer": (Action(lose_answer=True), ATTEMPTS),
    "a body that ends early": (Action(cut_at=500), ATTEMPTS),
    "an empty body": (Action(cut_at=0), ATTEMPTS),
    # which may strike the headers
    "a connection reset in the body": (Action(cut_at=500, reset=True), 2 * ATTEMPTS - 1),
}


@pytest.mark.parametrize(("action", "most"), PASSING.values(), ids=PASSING.keys())
def test_a_passing_fault_is_repeated_and_a_lasting_one_is_unavailable(s3, proxy, action, most):
    for read, expected in READS.values():
        proxy.fault = times(1, action)
        assert read(s3) == expected
        assert len(proxy.reset()) == 2
    proxy.fault = lambda request: action
    with pytest.raises(StorageUnavailable, match=r"bytes 100-1099 of 'object' in s3://") as caught:
        s3.get_range("object", 100, 1000)
    assert ATTEMPTS <= len(proxy.reset()) <= most
    assert not isinstance(caught.value, StorageMisconfigured)
    assert s3.get_range("object", 100, 1000) == DATA[100:1100]


def test_an_answer_that_does_not_come_is_given_up_and_asked_for_again(s3, proxy, never):
    silent = Action(hold=lambda: never.wait(30), lose_answer=True)
    # a busy machine may use up a short time with an answer that does arrive
    for read_timeout_s in (0.7, 7.0, 20.0):
        options = replace(s3.options, read_timeout_s=read_timeout_s)
        with S3Storage(s3.bucket, "pre/fix", options, sleep=lambda seconds: None) as impatient:
            proxy.fault = times(1, silent)
            try:
                found = impatient.get_range("object", 100, 1000)
            except StorageUnavailable:
                continue
            assert found == DATA[100:1100]
            assert len(proxy.reset()) >= 2
            proxy.fault = lambda request: silent
            with pytest.raises(StorageUnavailable, match=r"bytes 100-1099 of 'object'.*timeout"):
                impatient.get_range("object", 100, 1000)
            assert len(proxy.exchanges) <= ATTEMPTS
            break
    else:
        pytest.fail("no answer came in time")


WRONG_RANGES: dict[str, Action] = {
    "fewer bytes": Action(ask_range="bytes=100-1000"),
    "more bytes": Action(ask_range="bytes=100-1100"),
    "another start": Action(ask_range="bytes=101-1100"),
    "fewer bytes than Content-Range says": Action(
        ask_range="bytes=100-1000", headers={"Content-Range": f"bytes 100-1099/{SIZE}"}
    ),
    "more bytes than Content-Range says": Action(
        ask_range="bytes=100-2000", headers={"Content-Range": f"bytes 100-1099/{SIZE}"}
    ),
    "a Content-Range of other bytes": Action(headers={"Content-Range": f"bytes 0-999/{SIZE}"}),
}


def test_a_wrong_range_is_asked_for_again_and_never_believed(s3, proxy):
    for kind, action in WRONG_RANGES.items():
        proxy.fault = times(ATTEMPTS - 1, action)
        assert s3.get_range("object", 100, 1000) == DATA[100:1100], kind
        assert len(proxy.reset()) == ATTEMPTS, kind
        proxy.fault = lambda request, action=action: action
        with pytest.raises(StorageUnavailable, match=rf"bytes 100-1099 of 'object'.*\({ATTEMPTS} attempts\)"):
            s3.get_range("object", 100, 1000)
        assert len(proxy.reset()) == ATTEMPTS, kind


def test_a_range_in_another_unit_is_refused_at_once(s3, proxy):
    proxy.fault = lambda request: Action(headers={"Content-Range": "octets 100-1099/4096"})
    with pytest.raises(StorageError, match=r"\boctets 100-1099"):
        s3.get_range("object", 100, 1000)
    assert len(proxy.reset()) == 1
    assert s3.get_range("object", 100, 1000) == DATA[100:1100]


def test_wrong_bytes_of_the_right_length_pass_in_a_range_but_not_in_a_whole_object(s3, proxy):
    """Nothing in a range's answer shows it. The checksums of trailer and slot groups do, above the storage."""
    proxy.fault = lambda request: Action(flip_byte=10)
    spoiled = s3.get_range("object", 100, 1000)
    assert [n for n in range(1000) if spoiled[n] != DATA[100 + n]] == [10]
    proxy.reset()
    if s3.options.client is None:
        return  # obstore compares no checksum of the service: the engine's own do, above the storage
    proxy.fault = times(1, Action(flip_byte=10))
    assert s3.get("object") == DATA  # the object's own CRC32, stored by the put, showed it
    assert len(proxy.reset()) == 2
    proxy.fault = lambda request: Action(flip_byte=10)
    with pytest.raises(StorageUnavailable, match="checksum"):
        s3.get("object")


def test_credentials_that_expire_between_two_requests_say_so(s3, proxy):
    assert s3.get_range("object", 0, 10) == DATA[:10]
    proxy.reset()
    for status, code in ((403, "ExpiredToken"), (400, "ExpiredToken"), (400, "TokenRefreshRequired")):
        expired = Action(answer=error(status, code, "The provided token has expired."))
        proxy.fault = lambda request, expired=expired: expired
        for read, _ in READS.values():
            with pytest.raises(StorageMisconfigured, match=r"'object'.*expired"):
                read(s3)
    asked = len(proxy.reset())
    assert asked == 3 * len(READS)  # repeating it would not help
    assert s3.get_range("object", 10, 10) == DATA[10:20]


def test_lost_answers_of_writes_leave_their_work_done(s3, proxy):
    lost = Action(lose_answer=True)
    proxy.fault = times(1, lost)
    s3.put("put", b"data")
    assert s3.get("put") == b"data"
    proxy.fault = times(1, lost)
    with pytest.raises(ObjectExists):  # its own success: as the contract says, only the content can show that
        s3.put_if_absent("once", b"attempt 1")
    assert s3.get("once") == b"attempt 1"
    proxy.fault = times(1, lost)
    s3.delete("put")
    with pytest.raises(ObjectNotFound):
        s3.head("put")


def test_an_object_that_is_deleted_or_shrinks_between_two_ranges(s3, proxy):
    assert s3.get_range("object", 0, 10) == DATA[:10]
    s3.put("object", DATA[:500])
    with pytest.raises(InvalidArgument, match="500 bytes"):
        s3.get_range("object", 490, 20)
    with pytest.raises(InvalidArgument):
        s3.get_range("object", 600, 20)
    s3.delete("object")
    proxy.reset()
    for read, _ in READS.values():
        with pytest.raises(ObjectNotFound):
            read(s3)
    assert len(proxy.exchanges) == len(READS)


def test_parallel_reads_over_a_bad_network_get_their_own_bytes(s3, proxy):
    refused, another = Action(answer=error(503, "SlowDown")), Action(ask_range="bytes=0-63")
    actions = (Action(cut_at=20), Action(lose_answer=True), refused, another)
    repeated: set[str] = set()
    struck = 0

    def fault(request: Request) -> Action | None:
        """Strike every other range at its first attempt, so that no read fails too often."""
        nonlocal struck
        span = request.headers["Range"]
        if span in repeated or int(span.removeprefix("bytes=").split("-")[0]) % 2:
            return None
        repeated.add(span)
        struck += 1
        return actions[struck % len(actions)]

    proxy.fault = fault
    starts = range(1, 321)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda start: s3.get_range("object", start, 64), starts))
    assert answers == [DATA[start : start + 64] for start in starts]
    assert struck == 160
    assert len(proxy.exchanges) == 320 + 160


def test_parallel_reads_keep_their_connections_in_a_pool_of_their_size(s3, proxy):
    readers = 16
    barrier = threading.Barrier(readers)

    def read(reader: int) -> None:
        for n in range(10):
            barrier.wait(30)
            assert s3_sized.get_range("object", reader + n, 64) == DATA[reader + n : reader + n + 64]

    uri = f"s3://{s3.bucket}/pre/fix?endpoint_url={proxy.endpoint_url}"
    options = S3Options(client=s3.options.client, max_pool_connections=readers)
    with open_storage(uri, options=options) as s3_sized, ThreadPoolExecutor(readers) as pool:
        before = proxy.connections
        list(pool.map(read, range(readers)))
        # boto3 and obstore have a pool each, and obstore may open a connection if the last one returns a moment late
        assert proxy.connections - before <= 4 * readers
    assert len(proxy.exchanges) == 10 * readers
