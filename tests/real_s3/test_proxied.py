"""A real server behind the counting proxy: it checks every signature, and the counts equal the meter's."""

from __future__ import annotations

import contextvars
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.real_s3.conftest import Server
from tests.storage.scripted_server import error
from tests.support.counting_proxy import Action, Count, counting_proxy, times
from tests.support.measuring import measured
from tiered_index.errors import ObjectExists
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import open_storage

pytestmark = pytest.mark.real_s3

DATA = bytes(range(256)) * 1024
READERS = 16


def test_requests_through_the_proxy_are_accepted_and_counted(server: Server, place: str) -> None:
    with counting_proxy(server.endpoint_url) as proxy:
        with open_storage(server.uri(place, proxy.endpoint_url)) as opened:
            storage = MeteredStorage(opened)
            storage.put_if_absent("object", DATA)
            with pytest.raises(ObjectExists):
                storage.put_if_absent("object", b"other")
            with storage.open_writer("parts") as writer:
                writer.write(DATA)
            assert storage.get("parts") == DATA
            assert storage.get_suffix("parts", 100) == (DATA[-100:], len(DATA))
            assert [info.name for info in storage.list()] == ["object", "parts"]
            assert len(proxy.exchanges) == storage.total.requests
            proxy.reset()

            def read(n: int) -> bool:
                return storage.get_range("object", n * 100, 4096) == DATA[n * 100 : n * 100 + 4096]

            with measured() as usage, ThreadPoolExecutor(READERS) as pool:
                tasks = [pool.submit(contextvars.copy_context().run, read, n) for n in range(200)]
                assert all(task.result() for task in tasks)
            assert proxy.counts() == {("GET", True, f"{server.bucket}/{place}/object"): Count(200, 200 * 4096)}
            assert (usage.requests, usage.bytes_read) == (200, 200 * 4096)
            # boto3 and obstore have a pool each, and obstore may open a connection if the last one comes back a moment
            # late
            assert proxy.connections <= 4 * READERS
            slow_down = Action(answer=error(503, "SlowDown"))
            for action in (slow_down, Action(cut_at=100), Action(lose_answer=True), Action(cut_at=9, reset=True)):
                proxy.fault = times(1, action)
                assert read(7)
            assert len(proxy.exchanges) == 208
