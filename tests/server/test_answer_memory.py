"""The answers of all requests together have a bounded number of bytes, both while they are made and while they are
sent.
"""

import asyncio
import json
import re
import socket
import threading
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from tests.rocketmq.archived_store import index_log
from tests.rocketmq.messages import message
from tests.rocketmq.test_archived_queues import made
from tests.server.conftest import PATIENCE_S, index_in, serving
from tests.support.batches import batch
from tests.support.stored_messages import compress
from tiered_index import IndexItem
from tiered_index.rocketmq.log.message import Message
from tiered_index.server import calls
from tiered_index.server.calls import Allowance, Calls, Caps
from tiered_index.server.handlers import Handlers
from tiered_index.server.memory import (
    MESSAGE_FACTOR,
    SEARCHED_FACTOR,
    CountedMessages,
    MemoryBudget,
    Reservation,
    ShownBodies,
    entries_bytes,
)
from tiered_index.server.pacing import PacedResponse
from tiered_index.server.problems import Refused
from tiered_index.storage.prices import PriceTable

T0 = 1_700_000_000_000


class NothingAsked:
    def fetch(self, items, topic, key):
        raise AssertionError("there is no room for them")


def test_an_answer_without_memory_waits_in_turn_then_is_refused():
    async def main():
        memory = MemoryBudget(800, wait_s=PATIENCE_S)
        first, second, third, small = (Reservation(memory) for _ in range(4))
        # more than the bound: one call can claim the whole bound
        await first.claim(10_000, PATIENCE_S)
        assert memory.held_bytes == 700
        waiting = [asyncio.ensure_future(reservation.claim(300, PATIENCE_S)) for reservation in (second, third)]
        # a smaller call that fits runs before a waiting larger one
        await small.claim(100, PATIENCE_S)
        with pytest.raises(Refused) as refused:
            await Reservation(memory).claim(1, 0.0)
        assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
        # fetching, in a thread, doesn't wait
        item = IndexItem(topic="t", topic_id=0, queue_id=0, offset=0, size=50, timestamp_ms=T0, key_hash=1)
        with pytest.raises(Refused):
            CountedMessages(NothingAsked(), small).fetch([item], "t", "k")
        assert not any(task.done() for task in waiting)
        # a finished answer holds only its bytes, and admits the next one
        first.settle(350)
        await waiting[0]
        assert not waiting[1].done() and memory.held_bytes == 750
        # a cancelled call leaves nothing claimed
        waiting[1].cancel()
        await asyncio.wait([waiting[1]])
        for reservation in (first, second, third, small):
            reservation.end()
        assert memory.held_bytes == 0

    asyncio.run(main())


def test_a_call_without_a_waiting_client_holds_its_memory_until_it_ends():
    async def main():
        memory, begun, go_on = MemoryBudget(800), threading.Event(), threading.Event()
        reservation = Reservation(memory)
        await reservation.claim(500, PATIENCE_S)
        call = asyncio.to_thread(reservation.making, lambda: begun.set() or go_on.wait(PATIENCE_S))
        made = asyncio.ensure_future(call)
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        reservation.end()
        holds = memory.held_bytes
        # this claim needs the bytes that the call releases
        waiting = asyncio.ensure_future(Reservation(memory).claim(600, PATIENCE_S))
        go_on.set()
        await made
        await waiting
        assert (holds, memory.held_bytes) == (500, 600)

    asyncio.run(main())


def test_a_call_whose_request_has_ended_is_not_begun():
    """It would run in a thread after its request ended, and nothing would release its bytes."""

    async def main():
        memory, called = MemoryBudget(800), []
        reservation = Reservation(memory)
        await reservation.claim(500, PATIENCE_S)
        reservation.end()
        with pytest.raises(Refused, match="client has gone"):
            await asyncio.to_thread(reservation.making, lambda: called.append(reservation.grow(100)))
        assert (called, memory.held_bytes) == ([], 0)

    asyncio.run(main())


@pytest.mark.parametrize("soon_s", [calls._SOON_S, 0])
def test_a_running_call_holds_its_memory_and_waits_for_it_in_no_thread(monkeypatch, soon_s):
    """This also holds if memory runs out only later: a repeated call may send as many requests as before."""
    monkeypatch.setattr(calls, "_SOON_S", soon_s)
    allowance = Allowance(Caps(), PriceTable())

    async def main():
        memory, begun, go_on, looked = MemoryBudget(800), threading.Event(), threading.Event(), threading.Event()
        routes = object.__new__(Handlers)
        routes.calls = Calls(1, 9)

        def made(act, claim, gone=None):
            reservation = Reservation(memory)

            async def receive():
                looked.set()
                await (gone or asyncio.Event()).wait()
                return {"type": "http.disconnect"}

            request = SimpleNamespace(state=SimpleNamespace(reservation=reservation), receive=receive)
            return reservation, asyncio.ensure_future(routes.made(request, allowance, act, claim))

        first, answer = made(lambda: begun.set() or (go_on.wait(PATIENCE_S) and memory.held_bytes), 300)
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        second, waiting = made(lambda: memory.held_bytes, 500)
        await asyncio.sleep(0)
        go_on.set()
        # a call that waits for the one thread holds no bytes
        assert (await answer, await waiting) == (300, 800)
        called = []
        third, waiting = made(lambda: called.append("third") or third.hold(200) or memory.held_bytes, 100)
        while not memory._waiting:
            await asyncio.sleep(0)
        # the thread is free meanwhile
        assert await made(lambda: "free", 0)[1] == "free" and not called
        first.end()
        assert (await waiting, called) == (700, ["third"])
        second.end()
        # a call waits for further bytes, too, and is then repeated
        looked.clear()

        def act():
            called.append("again")
            assert soon_s or looked.wait(PATIENCE_S)
            again.hold(650)
            return memory.held_bytes

        again, waiting = made(act, 100)
        while not memory._waiting:
            await asyncio.sleep(0)
        third.end()
        assert (await waiting, called) == (650, ["third", "again", "again"])
        assert allowance.usage.max_requests == Caps().limits.max_requests
        # if the client disconnects, its call waits no longer, and nothing is claimed for it
        gone = asyncio.Event()
        _, waiting = made(lambda: None, 500, gone)
        while not memory._waiting:
            await asyncio.sleep(0)
        gone.set()
        with pytest.raises(Refused, match="client has gone"):
            await waiting
        again.end()
        assert memory.held_bytes == 0 and not memory._waiting
        routes.calls.close()

    asyncio.run(main())


def test_between_pieces_the_loop_notes_that_the_client_has_gone():
    """Otherwise each further piece is written to the lost connection, and adds a warning to the log."""
    loop_had_turns, sent = [], []

    async def send(message):
        sent.append(len(loop_had_turns))
        asyncio.get_running_loop().call_soon(loop_had_turns.append, message["type"])

    asyncio.run(PacedResponse(bytes(1 << 20))({"type": "http"}, None, send))
    # the head, and four pieces
    assert sent == [0, 0, 2, 3, 4]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """An index with 3,000 entries of one key."""
    n = 3_000
    with index_in(tmp_path_factory.mktemp("room"), items=9_000) as index:
        index.put_batch(batch(n, size=10, timestamp_ms=[T0 + at * 1000 for at in range(n)]))
        index.flush()
        yield index


WIDE = {"lookups": [{"topic": "t", "key": "k", "max_count": 3_000}] * 4}


def test_a_large_answer_waits_for_one_that_its_client_does_not_read(index, monkeypatch):
    monkeypatch.setitem(MemoryBudget.__init__.__kwdefaults__, "wait_s", 0.2)
    # one of two answers fits while it is made, and both do once they are finished
    most = entries_bytes([("t", 12_000)])
    with serving(index, answer_bytes=most, threads=4) as client:
        service = client.base_url
        asked = json.dumps(WIDE).encode()
        head = f"POST /v1/query:batch HTTP/1.1\r\nhost: {service.host}\r\ncontent-type: application/json\r\n"
        address = urlsplit(str(service))
        with socket.socket() as slow:
            # the kernels' buffers hold less than the answer, and no client reads it
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((address.hostname, address.port))
            slow.sendall(f"{head}content-length: {len(asked)}\r\n\r\n".encode() + asked)
            assert slow.recv(12) == b"HTTP/1.1 200"
            # a body waits, too, if it may hold more while it is read, for any request
            narrow = json.dumps({"lookups": [{"topic": "t", "key": "k", "max_count": 1}]}).encode() + b" " * 400_000
            for sent in (asked, narrow):
                refused = client.post("/v1/query:batch", content=sent, headers={"content-type": "application/json"})
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert "no memory left" in refused.json()["detail"]
            line = {"topic": "t", "queue_id": 0, "keys": ["new"], "offset": 1, "size": 1, "timestamp_ms": T0}
            for padding, status in ((400_000, 503), (10, 200)):
                sent = json.dumps(line).encode() + b" " * padding
                got = client.post("/v1/entries", content=sent, headers={"content-type": "application/x-ndjson"})
                assert got.status_code == status
            # a smaller one fits beside the finished answer, which holds less than its claim
            assert len(client.get("/v1/query?topic=t&key=k&max_count=1000").json()["items"]) == 1000
        # when the client disconnects, its answer is dropped
        assert client.post("/v1/query:batch", content=narrow, headers={"content-type": "application/json"}).is_success
        answer = client.post("/v1/query:batch", json=WIDE)
        assert answer.status_code == 200 and len(answer.json()["results"][3]["items"]) == 3_000


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    """A client of a service with three messages of one key, whose bodies are a thousand times as large as stored."""
    folder = tmp_path_factory.mktemp("bombs")
    body, flags = compress(b" " * BOMB_BYTES + b"1", "zlib")
    made(folder / "store", ({"keys": ["k"], "body": body, "sys_flag": flags} for _ in range(3)), 1 << 16)
    with index_in(folder) as index:
        index_log(index, folder / "store")
        with serving(index, store=folder / "store") as client:
            yield client


BOMB_BYTES = 1 << 20


def refuse_bombs(patch, grow):
    """Refuse reservations of more than a bomb."""

    def full(self, size):
        if size > BOMB_BYTES:
            raise Refused(503, "full")
        grow(self, size)

    patch.setattr(Reservation, "grow", full)


OF_BOMBS = (("/v1/messages", {"key": "k"}), ("/v1/browse", {"at_ms": 1}))


@pytest.mark.parametrize(("path", "asked"), OF_BOMBS)
def test_plain_bodies_count_as_memory_of_the_answer_before_they_are_made(bombs, monkeypatch, path, asked):
    held, grow = [], Reservation.grow
    monkeypatch.setattr(Reservation, "grow", lambda self, size: held.append(size) or grow(self, size))
    for body, factor in (("excerpt", 0), ("text", 3 * MESSAGE_FACTOR), ("json", 3 * MESSAGE_FACTOR + 50)):
        held.clear()
        got = bombs.get(path, params={"topic": "orders", "body": body, **asked})
        forms = [one["message"]["body_format"] for one in got.json()["messages"]]
        assert forms == ["json" if body == "json" else "text"] * 3
        assert factor <= sum(held) / BOMB_BYTES < factor + 0.1

    refuse_bombs(monkeypatch, grow)
    assert bombs.get(path, params={"topic": "orders", **asked}).status_code == 503


def test_the_largest_plain_body_counts_as_memory_before_bodies_are_searched(bombs, monkeypatch):
    held, grow = [], Reservation.grow
    monkeypatch.setattr(Reservation, "grow", lambda self, size: held.append(size) or grow(self, size))
    asked = {"topic": "orders", "key": "k", "body": "none"}
    for text, count in (("  1", 3), ("nowhere", 0)):
        held.clear()
        got = bombs.get("/v1/messages", params={**asked, "contains": text})
        assert len(got.json()["messages"]) == count
        assert SEARCHED_FACTOR <= sum(held) / BOMB_BYTES < SEARCHED_FACTOR + 0.1

    refuse_bombs(monkeypatch, grow)
    monkeypatch.setattr(Message, "body", lambda *_: pytest.fail("decompressed without memory"))
    assert bombs.get("/v1/messages", params={**asked, "contains": "nowhere"}).status_code == 503


@pytest.mark.parametrize("cause", ["too large", "too large for JSON", "cut short"])
def test_bodies_that_are_shown_as_stored_share_the_memory_of_the_largest(cause):
    async def main():
        memory = MemoryBudget(64 * BOMB_BYTES)
        wanted, most_bytes = "json" if "JSON" in cause else "text", 4 * BOMB_BYTES if cause == "cut short" else 1000
        bodies = ShownBodies(Reservation(memory), Allowance(Caps(), PriceTable()), wanted, most_bytes)
        stored, flags = compress(b" " * BOMB_BYTES + b"1", "zlib")
        bomb = message(body=stored[:-1] if cause == "cut short" else stored, sys_flag=flags)
        for _ in range(4):
            assert bodies.document(bomb)["body_format"] == "hex"
        assert memory.held_bytes == MESSAGE_FACTOR * bomb.plain_bytes(most_bytes)
        # a body that is shown plain keeps its memory
        small = message(body=compress(b"-" * 1000, "zlib")[0], sys_flag=flags)
        bodies.left, parsed = 1000, 50 * 1000 if wanted == "json" else 0
        held = max(memory.held_bytes, 5 * MESSAGE_FACTOR * 1000) + parsed
        for _ in range(5):
            assert bodies.document(small)["body"] == "-" * 1000
        assert memory.held_bytes == held

    asyncio.run(main())


@pytest.mark.parametrize(("path", "asked"), OF_BOMBS)
def test_no_body_is_decompressed_after_the_deadline(bombs, monkeypatch, path, asked):
    left_s = Allowance.left_s

    def late(self, *when):
        if when:
            self._began_s -= 3600
        return left_s(self, *when)

    def lookups(status):
        # counted as they are audited
        counts = re.findall(rf'lookups_total{{.*status="{status}".*}} (\d+)', bombs.get("/metrics").text)
        return sum(map(int, counts))

    monkeypatch.setattr(Allowance, "left_s", late)
    complete, exceeded, partial = map(lookups, ("complete", "BudgetExceeded", "partial"))
    got = bombs.get(path, params={"topic": "orders", **asked})
    assert (got.status_code, got.json()["error"]) == (422, "BudgetExceeded")
    assert lookups("BudgetExceeded") == exceeded + 1
    if path == "/v1/messages":
        answer = bombs.get(path, params={"topic": "orders", "allow_partial": True, **asked}).json()
        problems = [one["message"]["body_problem"] for one in answer["messages"]]
        assert problems == ["timeout_s=30 was reached while bodies were decompressed"] * 3
        assert (answer["status"], lookups("partial")) == ("partial", partial + 1)
    assert lookups("complete") == complete


def test_a_stream_counts_its_bytes_and_says_where_to_continue(index):
    with serving(index, answer_bytes=512 << 10, threads=2) as client:
        asked = {"topic": "t", "key": "k", "all": "true", "max_count": "100"}
        client.headers["accept"] = "application/x-ndjson"
        *items, status = map(json.loads, client.get("/v1/query", params=asked).text.splitlines())
        # 256 bytes per entry, and space for a page
        assert status["error"]["status"] == 503 and 1_000 <= len(items) < 2_000
        rest = client.get("/v1/query", params={**asked, "cursor": status["cursor"]}).text.splitlines()
        assert json.loads(rest[0])["offset"] == items[-1]["offset"] - 1


def test_a_stream_counts_the_reports_of_its_files(index):
    with serving(index, answer_bytes=256 << 10, threads=2) as client:
        client.headers["accept"] = "application/x-ndjson"
        asked = {"topic": "t", "key": "k", "all": "true", "max_count": "2"}
        *items, status = map(json.loads, client.get("/v1/query", params={**asked, "explain": "true"}).text.splitlines())
        # 2,048 bytes per page: the page has one file
        assert status["error"]["status"] == 503 and 100 < len(items) < 300
        rest = client.get("/v1/query", params={**asked, "cursor": status["cursor"]}).text.splitlines()
        assert json.loads(rest[0])["offset"] == items[-1]["offset"] - 1


@pytest.mark.parametrize("path", ["/v1/query", "/v1/messages"])
def test_memory_is_reserved_for_each_entry(index, monkeypatch, path):
    held, hold = [], Reservation.hold
    monkeypatch.setattr(Reservation, "hold", lambda self, size: held.append(size) or hold(self, size))
    with serving(index) as client:
        assert client.get(path, params={"topic": "t", "key": "k", "max_count": "1000"}).status_code == 200
    assert held[0] == entries_bytes([("t", 1000)])
