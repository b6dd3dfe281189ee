"""The counting proxy changes nothing and counts everything. The tests that use its faults cover them."""

import http.client
from collections.abc import Iterator

import pytest

from tests.storage.scripted_server import Answer, scripted_server
from tests.support.counting_proxy import Count, CountingProxy, counting_proxy
from tests.support.s3_server import S3Server
from tiered_index.errors import ObjectExists, ObjectNotFound
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage

DATA = bytes(range(256)) * 64


@pytest.fixture(scope="module")
def proxy(server: S3Server) -> Iterator[CountingProxy]:
    with counting_proxy(server.endpoint_url) as running:
        yield running


@pytest.fixture
def storage(s3_environment: S3Server, proxy: CountingProxy) -> Iterator[S3Storage]:
    options = S3Options(endpoint_url=proxy.endpoint_url, max_attempts=1)
    storage = S3Storage(s3_environment.new_bucket(), "pre fix", options)
    proxy.reset()
    yield storage
    storage.close()


def test_every_kind_of_call_passes_and_is_counted_as_the_meter_counts_it(
    storage: S3Storage, proxy: CountingProxy
) -> None:
    metered = MeteredStorage(storage)
    metered.put("a", DATA)
    metered.put_if_absent("b=1/c@d+e", b"x")
    with pytest.raises(ObjectExists):
        metered.put_if_absent("b=1/c@d+e", b"y")
    assert metered.get("a") == DATA
    assert metered.get_range("a", 5, 70) == DATA[5:75]
    assert [metered.get_range("a", 0, 10), metered.get_range("a", 100, 20)] == [DATA[:10], DATA[100:120]]
    assert metered.get_suffix("a", 10) == (DATA[-10:], len(DATA))
    assert metered.head("a").size_bytes == len(DATA)
    with pytest.raises(ObjectNotFound):
        metered.get("missing")
    assert [info.name for info in metered.list()] == ["a", "b=1/c@d+e"]
    metered.delete("a")
    metered.delete_many(["b=1/c@d+e"])
    counts = proxy.counts()
    bucket = storage.bucket
    assert counts["GET", True, f"{bucket}/pre fix/a"] == Count(4, 70 + 10 + 20 + 10)
    assert counts["GET", False, f"{bucket}/pre fix/a"] == Count(1, len(DATA))
    assert counts["PUT", False, f"{bucket}/pre fix/b=1/c@d+e"].requests == 2
    assert counts["HEAD", False, f"{bucket}/pre fix/a"] == Count(1, 0)
    assert counts["DELETE", False, f"{bucket}/pre fix/a"] == Count(1, 0)
    assert counts["GET", False, bucket].requests == counts["POST", False, bucket].requests == 1
    assert sum(count.requests for count in counts.values()) == metered.total.requests == len(proxy.exchanges)
    read = [e.bytes for e in proxy.exchanges if e.method == "GET" and e.status in (200, 206) and e.key != bucket]
    assert sum(read) == metered.total.bytes_read
    assert proxy.reset()
    assert proxy.counts() == {}


def test_multipart_uploads_pass(storage: S3Storage) -> None:
    big = DATA * 530  # 8.3 MiB
    with storage.open_writer("big") as writer:
        writer.write(big)
        writer.write(b"tail")
    assert storage.get_suffix("big", 10) == (big[-6:] + b"tail", len(big) + 4)


def test_requests_arrive_unchanged() -> None:
    with scripted_server() as upstream, counting_proxy(upstream.endpoint_url) as proxy:
        upstream.answers(Answer(200, b"body", {"X-Odd": "a, b", "ETag": '"e"'}))
        client = http.client.HTTPConnection(proxy.endpoint_url.removeprefix("http://"), timeout=30)
        for _ in range(2):
            headers = {"Host": "elsewhere.example", "Authorization": "AWS4 x=y"}
            headers |= {"X-Amz-Meta-A": "v", "Range": "bytes=0-3"}
            client.request("PUT", "/bucket/a%20b/c?x=1&y=%2F", body=b"\0\xff" * 500, headers=headers)
            answer = client.getresponse()
            assert (answer.status, answer.read()) == (200, b"body")
            assert [answer.getheader(name) for name in ("X-Odd", "ETag", "Content-Length")] == ["a, b", '"e"', "4"]
        client.close()
        assert proxy.connections == 1
        assert proxy.counts() == {("PUT", True, "bucket/a b/c"): Count(2, 8)}
    sent = upstream.requests[0]
    assert (sent.method, sent.path, sent.body) == ("PUT", "/bucket/a%20b/c?x=1&y=%2F", b"\0\xff" * 500)
    assert {name: sent.headers[name] for name in headers} == headers
    assert sent.headers.keys() == headers.keys() | {"Accept-Encoding", "Content-Length"}
