"""A service reads the indexes of several brokers while one of them does not respond."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.conftest import serving
from tests.support.several_indexes import of
from tiered_index.clock import ManualClock
from tiered_index.errors import StorageUnavailable
from tiered_index.storage.memory import MemoryStorage

pytest.importorskip("starlette")
SHORT_S = 0.5
NUMBER = "\ntiered_index_log_number "
ASKED = {"topic": "t", "key": "k", "max_count": "1000"}


def test_a_broker_that_hangs_is_named_and_delays_no_request(cluster, opened):
    away = cluster.uris[1]
    expected = len(cluster.expected([uri for uri in cluster.uris if uri != away]))
    clock = ManualClock(1_700_000_000_000)
    with (
        cluster.reader(clock=clock, refresh_interval_s=10, source_timeout_s=SHORT_S) as reader,
        serving(reader) as client,
    ):
        hanging = [of(opened, away).hang("get_range", times=None), of(opened, away).hang("list", times=None)]
        try:
            clock.advance(11)
            got = client.get("/v1/query", params=ASKED | {"allow_partial": "true"}).json()
            assert (got["status"], len(got["items"])) == ("partial", expected)
            assert {one["source"] for one in got["failed"]} == {away}
            begun_s = time.monotonic()
            with ThreadPoolExecutor(8) as threads:
                asking = [
                    threads.submit(client.get, path, params=params)
                    for _ in range(10)
                    for path, params in (
                        ("/v1/query", ASKED | {"allow_partial": "true"}),
                        ("/v1/query", ASKED),
                        ("/v1/topics", {"allow_partial": "true"}),
                    )
                ]
                answers = [one.result() for one in asking]
            assert time.monotonic() - begun_s < 20 * SHORT_S
            assert {answer.status_code for answer in answers[1::3]} == {502}
            assert all("did not answer" in answer.json()["detail"] for answer in answers[1::3])
            assert {len(answer.json()["items"]) for answer in answers[::3]} == {expected}
            assert all({one["source"] for one in answer.json()["failed"]} == {away} for answer in answers[2::3])
            # the others can be served, so this replica stays ready
            assert client.get("/readyz").status_code == 200
            (problem,) = client.get("/v1/health").json()["problems"]
            assert away in problem["reason"]
        finally:
            for one in hanging:
                one.release.set()


def test_the_sum_of_log_numbers_waits_for_a_broker_that_is_away_at_the_opening(cluster, monkeypatch):
    # a smaller sum would fire the alert for a restored storage
    away, listed = [cluster.uris[1]], MemoryStorage.list

    def list_or_fail(self, *args, **named):
        if self.uri in away:
            raise StorageUnavailable(f"{self.uri} is away")
        return listed(self, *args, **named)

    monkeypatch.setattr(MemoryStorage, "list", list_or_fail)
    clock = ManualClock(1_700_000_000_000)
    with cluster.reader(clock=clock, refresh_interval_s=10) as reader, serving(reader) as client:
        assert NUMBER not in client.get("/metrics").text
        away.clear()
        clock.advance(11)
        assert client.get("/v1/query", params=ASKED).json()["status"] == "complete"
        # also while nobody refreshes the list
        clock.advance(100_000)
        assert NUMBER in client.get("/metrics").text
