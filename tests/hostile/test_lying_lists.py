"""A server that lists names outside the requested prefix: the client refuses it, since the caller could delete objects
of another kind.
"""

from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.storage.scripted_server import Answer, ScriptedServer, scripted_server
from tiered_index.errors import StorageMisconfigured
from tiered_index.format.names import DATA_PREFIX, log_name
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage

OLD = "2001-01-01T00:00:00.000Z"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with scripted_server() as running:
        yield running


def opened(server: ScriptedServer, client: str | None = None) -> S3Storage:
    settings = S3Options(endpoint_url=server.endpoint_url, region="us-east-1", max_attempts=1, client=client)
    return S3Storage("bucket", "own/index", settings)


def listing(key: str) -> bytes:
    entry = f"<Contents><Key>{key}</Key><Size>1</Size><LastModified>{OLD}</LastModified></Contents>"
    return f"<ListBucketResult>{entry}</ListBucketResult>".encode()


def uploads(key: str) -> bytes:
    entry = f"<Upload><Key>{key}</Key><UploadId>u</UploadId><Initiated>{OLD}</Initiated></Upload>"
    return f"<ListMultipartUploadsResult>{entry}</ListMultipartUploadsResult>".encode()


def answers(storage: S3Storage, keys: Iterable[str]) -> Iterator[tuple[bytes, Callable[[str], Iterator[object]]]]:
    for key in keys:
        yield listing(key), storage.list
        # uploads are asked for below the whole prefix
        if not key.startswith("own/index/log"):
            yield uploads(key), lambda _: iter(storage.purge(0))


def test_a_key_that_was_not_asked_for_is_refused(server: ScriptedServer) -> None:
    keys = ("other/index/data/x/0.index", "data/x/0.index", f"own/index/{log_name(1)}", "own/data/x", "../data/x")
    with opened(server) as storage:
        for body, act in answers(storage, keys):
            server.answers(Answer(200, body, {"Content-Type": "application/xml"}))
            with pytest.raises(StorageMisconfigured, match=r"does not begin with|invalid path"):
                list(act(DATA_PREFIX))


@pytest.mark.parametrize("client", [None, "boto3"])
def test_an_invalid_name_is_skipped(server: ScriptedServer, client: str | None) -> None:
    keys = [f"own/index/data/{name}" for name in ("x%0a", "x y")]
    # obstore lists no such keys, and its error names boto3
    keys += [f"own/index/data/{name}" for name in ("../../x", "/x", "./x") if client]
    with opened(server, client) as storage:
        for body, act in answers(storage, keys):
            server.answers(Answer(200, body, {"Content-Type": "application/xml"}))
            assert list(act(DATA_PREFIX)) == []
