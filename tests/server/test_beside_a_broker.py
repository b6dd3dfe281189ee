"""The broker's sidecar: `serve --follow` ingests, serves entries and messages, and tells how far it is."""

from __future__ import annotations

import signal
import time

import pytest

from tests.server.conftest import PATIENCE_S
from tests.server.test_serve_command import started
from tiered_index.rocketmq.store_writer import StoreWriter

T = 1_762_000_000_000


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory):
    """A store with three messages, and a client of the service that follows it."""
    folder = tmp_path_factory.mktemp("sidecar")
    with StoreWriter(folder / "store") as writer:
        for number in range(3):
            writer.put("orders", 0, b'{"n": %d}' % number, keys=["k"], uniq_key=f"U{number}", store_ms=T + number)
        writer.flush()
        index = ("--root", folder / "root", "--storage", (folder / "storage").as_uri())
        with started(*index, "--follow", folder / "store", "--max-lag", 60) as (process, client):
            until_s = time.monotonic() + PATIENCE_S
            while len(client.get("/v1/query", params={"topic": "orders", "key": "k"}).json()["items"]) < 3:
                assert time.monotonic() < until_s
            yield folder, process, client


def test_messages_come_with_their_state_and_bodies_as_asked(sidecar):
    folder, _, client = sidecar
    got = client.get("/v1/messages", params={"topic": "orders", "key": "k", "body": "json", "max_count": 2})
    answer = got.json()
    assert [one["message"]["body"] for one in answer["messages"]] == [{"n": 2}, {"n": 1}]
    assert [one["state"] for one in answer["messages"]] == ["local", "local"]
    assert answer["status"] == "truncated" and str(folder) not in got.text
    first = answer["messages"][0]["message"]
    by_place = client.get(f"/v1/messages/{first['msg_id']}").json()["messages"]
    assert by_place[0]["message"]["uniq_key"] == "U2"
    by_key = client.get("/v1/messages/U1", params={"topic": "orders", "body": "none"}).json()["messages"]
    assert [one["message"]["uniq_key"] for one in by_key] == ["U1"]


def test_what_is_not_there_is_404(sidecar):
    _, _, client = sidecar
    assert client.get("/v1/messages/NONE", params={"topic": "orders"}).status_code == 404
    place = client.get("/v1/messages", params={"topic": "orders", "key": "k"}).json()["messages"][0]["message"]
    elsewhere = place["msg_id"][:-4] + "FFFF"
    assert client.get(f"/v1/messages/{elsewhere}").status_code == 404


def test_it_says_how_far_it_is_and_ends_in_order(sidecar):
    _, process, client = sidecar
    metrics = client.get("/metrics").text
    assert "\ntiered_index_follow_lag_bytes 0.0\n" in metrics
    assert client.get("/readyz").status_code == 200
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, error
