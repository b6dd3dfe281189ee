"""Servers that redirect their clients, or list names outside the requested prefix.

No request reaches another host, and so no signature and no token. Names that were not asked for are refused, since the
caller could delete objects of another kind.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.awsrequest import AWSResponse

from tests.storage.scripted_server import Answer, ScriptedServer, part, scripted_server
from tests.storage.test_s3_writer import BEGUN
from tiered_index.errors import StorageError, StorageMisconfigured
from tiered_index.format.names import DATA_PREFIX, log_name
from tiered_index.storage.base import PART_BYTES
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage


def write_in_parts(storage: S3Storage) -> None:
    with storage.open_writer("a") as writer:
        writer.write(bytes(PART_BYTES + 1))


OPERATIONS: dict[str, Callable[[S3Storage], object]] = {
    "get": lambda storage: storage.get("a"),
    "get_range": lambda storage: storage.get_range("a", 0, 4),
    "get_suffix": lambda storage: storage.get_suffix("a", 4),
    "head": lambda storage: storage.head("a"),
    "list": lambda storage: list(storage.list()),
    "purge": lambda storage: storage.purge(0),
    "put": lambda storage: storage.put("a", b"x"),
    "put_if_absent": lambda storage: storage.put_if_absent("a", b"x"),
    "a single delete": lambda storage: storage.delete_many(["a"]),
    "delete_many": lambda storage: storage.delete_many(["a", "b"]),
    "write_in_parts": write_in_parts,
}
STEPS = [Answer(200, BEGUN), *[Answer(200, headers={"ETag": "x"})] * 2]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ScriptedServer, ScriptedServer]]:
    with scripted_server() as ours, scripted_server("127.0.0.2") as other:
        yield ours, other


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAREDIRECTED")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "scripted-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "scripted-token")


def sent_elsewhere(status: int, other: str, region: str | None) -> Answer:
    """Return a redirection in every known form."""
    host = urlsplit(other).netloc
    body = f"<Error><Code>PermanentRedirect</Code><Message>go</Message><Endpoint>{host}</Endpoint></Error>"
    headers = {"Content-Type": "application/xml", "Location": f"{other}/bucket/a", "x-amz-request-id": "1"}
    return Answer(status, body.encode(), headers | ({"x-amz-bucket-region": region} if region else {}))


@pytest.mark.parametrize(("status", "region"), [(301, "eu-west-1"), (302, "@{}/#"), (307, "eu-west-1"), (308, "@{}/#")])
def test_nothing_is_sent_to_another_host(
    servers: tuple[ScriptedServer, ScriptedServer], status: int, region: str
) -> None:
    ours, other = servers
    region = region.format(urlsplit(other.endpoint_url).netloc)
    settings = S3Options(endpoint_url=ours.endpoint_url, region="eu-central-1", max_attempts=2)
    with S3Storage("bucket", "", settings, sleep=lambda seconds: None) as storage:
        ours.answers(part(b"abcd", 0, 4))
        assert storage.get_range("a", 0, 4) == b"abcd"  # so that the next reads use obstore, if it is installed
        other.reset()
        elsewhere = sent_elsewhere(status, other.endpoint_url, region)
        ours.answers(elsewhere)
        for name, act in OPERATIONS.items():
            ours.requests.clear()
            with pytest.raises(StorageError):
                act(storage)
            assert ours.requests, name
            assert any("AKIAREDIRECTED" in value for value in ours.requests[0].headers.values())
        # a part, or the end of the upload, and then its abort
        for right in (1, 3):
            ours.requests.clear()
            ours.answers(*STEPS[:right], elsewhere)
            with pytest.raises(StorageError):
                write_in_parts(storage)
            methods = [request.method for request in ours.requests]
            assert (methods[right], methods[-1]) == ("PUT" if right == 1 else "POST", "DELETE")
        ours.answers(sent_elsewhere(status, other.endpoint_url, None))
        with pytest.raises(StorageError):
            storage.get_range("a", 0, 4)
    assert other.requests == []
    assert other.connections == 0


@pytest.mark.parametrize("region", ["eu-west-1", "x@127.0.0.2/#", "evil.example/"])
def test_another_region_of_amazons_is_a_host_of_amazons(region: str) -> None:
    """If no endpoint is set, botocore follows to the bucket's region. The server's name of the region must not contain
    another host name.
    """
    hosts: list[str] = []

    def answer(request: Any, **_: object) -> AWSResponse:
        hosts.append(urlsplit(request.url).netloc)
        body = b"<Error><Code>PermanentRedirect</Code><Message>go</Message><Endpoint>127.0.0.2</Endpoint></Error>"
        raw = SimpleNamespace(stream=lambda *_, **__: iter([body]), close=lambda: None)
        return AWSResponse(request.url, 301, {"x-amz-bucket-region": region, "Location": "http://127.0.0.2/"}, raw)

    settings = S3Options(region="eu-central-1", max_attempts=2)
    with S3Storage("bucket", "", settings, sleep=lambda seconds: None) as storage:
        storage.client.meta.events.register("before-send.s3", answer)
        for act in OPERATIONS.values():
            with pytest.raises(StorageError):
                act(storage)
    assert hosts
    assert {host for host in hosts if not host.endswith(".amazonaws.com")} == set()


def answers(storage: S3Storage, *keys: str) -> Iterator[tuple[Answer, Callable[[str], Iterator[object]]]]:
    """Yield listings of objects and of uploads with each key, and what reads them."""
    for key in keys:
        about = f"<Key>{key}</Key><Size>1</Size><LastModified>{OLD}</LastModified>"
        yield Answer(200, f"<ListBucketResult><Contents>{about}</Contents></ListBucketResult>".encode()), storage.list
        # uploads are asked for below the whole prefix
        if not key.startswith("own/index/log"):
            about = f"<Upload><Key>{key}</Key><UploadId>u</UploadId><Initiated>{OLD}</Initiated></Upload>"
            body = f"<ListMultipartUploadsResult>{about}</ListMultipartUploadsResult>".encode()
            yield Answer(200, body), lambda _: iter(storage.purge(0))


OLD = "2001-01-01T00:00:00.000Z"


@pytest.mark.parametrize("client", [None, "boto3"])
def test_names_that_were_not_asked_for(servers: tuple[ScriptedServer, ScriptedServer], client: str | None) -> None:
    settings = S3Options(endpoint_url=servers[0].endpoint_url, region="us-east-1", max_attempts=1, client=client)
    wrong = ("other/index/data/x/0.index", "data/x/0.index", f"own/index/{log_name(1)}", "own/data/x", "../data/x")
    # obstore lists no keys of the second kind, and its error names boto3
    invalid = ("x%0a", "x y", *(("../../x", "/x", "./x") if client else ()))
    with S3Storage("bucket", "own/index", settings) as storage:
        for answer, act in answers(storage, *wrong):
            servers[0].answers(answer)
            with pytest.raises(StorageMisconfigured, match=r"does not begin with|invalid path"):
                list(act(DATA_PREFIX))
        for answer, act in answers(storage, *(f"own/index/data/{name}" for name in invalid)):
            servers[0].answers(answer)
            assert list(act(DATA_PREFIX)) == []
