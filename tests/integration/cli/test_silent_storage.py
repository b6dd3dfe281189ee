"""A storage that does not answer: the messages during the wait, and the timely end of lookups."""

import json
import socket

import pytest

from tests.integration.cli.conftest import BEGIN_MS, write_source
from tests.storage.scripted_server import error, scripted_server

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture
def silent():
    """The URI of a storage that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"s3://bucket/prefix?endpoint_url=http://127.0.0.1:{listening.getsockname()[1]}"


def test_retries_are_reported_from_the_first_on(run_here):
    with scripted_server() as server:
        # requests for lease and log are concurrent
        server.answers(*[error(500, "InternalError")] * 2, *[error(404, "NoSuchBucket")] * 2)
        done = run_here("files", "--storage", f"s3://bucket/p?endpoint_url={server.endpoint_url}", environment=KEYS)
    *retries, last = done.err.splitlines()
    retry = next(line for line in retries if "listing 'checkpoint/'" in line)
    assert "attempt 1 of 5 failed, the next one in 0." in retry
    assert "listing 'checkpoint/' in s3://bucket/p" in retry and "500" in retry
    assert (done.code, "NoSuchBucket" in last) == (3, True)


@pytest.fixture
def root(run_here, tmp_path):
    """A root whose files are in its storage, ``tmp_path/store``, and in the root, too."""
    line = ("ingest", write_source(tmp_path / "messages.ndjson", 0, 10), "--root", tmp_path / "root")
    assert run_here(*line, "--storage", f"file://{tmp_path}/store", "--wait").code == 0
    return tmp_path / "root"


def move_storage(root, uri):
    marker = json.loads((root / "tiered_index.json").read_text())
    (root / "tiered_index.json").write_text(json.dumps(marker | {"storage": uri}))


def test_a_root_answers_without_its_storage_and_says_so(run_here, root):
    move_storage(root, "s3://bucket/p?endpoint_url=http://127.0.0.1:9")
    once = KEYS | {"TIERED_INDEX_S3__MAX_ATTEMPTS": "1"}
    query = ("query", "orders", "own-5", "--root", root)
    outcome = run_here(*query, environment=once)
    assert outcome.code == 0
    assert "1 found, complete as far as the root knows (the storage as of 2023-11-14T22:13:29Z)\n" in outcome.out
    assert "the storage could not be read: listing 'checkpoint/' in s3://bucket/p" in outcome.out
    document = run_here(*query, "--json", environment=once).document
    assert (document["status"], document["as_of_ms"]) == ("complete", BEGIN_MS + 9000)
    assert "Connection refused" in document["freshness"][0]["not_asked"]
    for gone in (root / "uploaded").iterdir():
        gone.unlink()
    assert run_here(*query, environment=once).code == 3
    (root / "log").unlink()
    assert run_here(*query, environment=once).code == 3


def test_a_root_answers_in_time_though_its_storage_is_silent(run_here, root, silent):
    move_storage(root, silent)
    query = ("query", "orders", "own-5", "--root", root, "--timeout", 3)
    outcome = run_here(*query, environment=KEYS)
    assert outcome.code == 0, outcome
    assert "1 found, complete as far as the root knows (the storage as of 2023-11-14T22:13:29Z)\n" in outcome.out
    assert "did not answer within half of timeout_s" in outcome.out
    # the command line names the storage
    named = run_here(*query[:-1], 0.5, "--storage", silent, environment=KEYS)
    assert (named.code, named.out) == (6, "0 found, partial\n")
