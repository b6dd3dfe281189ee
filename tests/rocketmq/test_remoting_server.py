"""The server's connections over real sockets: many, slow, silent, invalid and ended. Its bounds hold for each."""

import asyncio
import logging
import socket
import ssl
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import MagicMock

import pytest

from tests.rocketmq.remoting_client import Client, run
from tests.support.authority import Authority
from tiered_index.base import strangers
from tiered_index.base.call import active_context
from tiered_index.connectors.rocketmq.remoting import server as server_module
from tiered_index.connectors.rocketmq.remoting.frames import (
    BINARY,
    JSON,
    ONEWAY,
    RESPONSE,
    AccessKey,
    Command,
    ResponseCode,
    encode_frame,
)
from tiered_index.connectors.rocketmq.remoting.server import RemotingServer
from tiered_index.errors import ConfigError

free_port = partial(socket.create_server, ("127.0.0.1", 0))
AT_ONCE, LOOKED_UP, HELD, LONG, BROKEN, BROKEN_AT_ONCE = 34, 12, 33, 106, 206, 105
BUSY = "[REJECTREQUEST]system busy, start flow control for a while"


class FakeBroker:
    """Answers with the request's body; `HELD` requests wait until they are released."""

    def __init__(self) -> None:
        self.held = threading.Semaphore(0)
        self.release = threading.Event()
        self.running = 0
        self.most = 0
        self.cancellations: list = []
        self._lock = threading.Lock()

    def answer_at_once(self, request, local):
        if request.code == BROKEN_AT_ONCE:
            raise RuntimeError("a defect")
        return request.answered(0, str(local), body=request.body) if request.code == AT_ONCE else None

    def refuse(self, request, peer):
        return request.answered(ResponseCode.NO_PERMISSION)

    def look_up(self, request, local, sees):
        if request.code == BROKEN:
            raise RuntimeError("a defect")
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        if request.code == HELD:
            self.cancellations.append(active_context().cancellations[-1])
            self.held.release()
            assert self.release.wait(60)
        with self._lock:
            self.running -= 1
        body = bytes(8 << 20) if request.code == LONG else request.body
        return request.answered(0, fields=request.fields, body=body)


@asynccontextmanager
async def serving(*, threads=16, tls=None, audit=None, observe=None, keys=None, **bounds):
    """A server of a fake broker with other bounds."""
    kind = type("Bounded", (RemotingServer,), bounds)
    more = {"keys": keys, "tls": tls, "threads": threads, "audit": audit, "observe": observe}
    async with kind(FakeBroker(), free_port(), **more) as server:
        try:
            yield server
        finally:
            server.broker.release.set()


@asynccontextmanager
async def accounting(**limits):
    """A server, and the accounts of its requests: opaque, and code of the response."""
    audited, observed = [], []
    limits["audit"] = lambda request, response, is_known: audited.append((request.opaque, response.code))
    limits["observe"] = lambda request, response, seconds: observed.append((request.opaque, response.code))
    async with serving(**limits) as server:
        yield server, audited, observed


async def held(server, count=1):
    """Wait until that many requests are in threads."""
    for _ in range(count):
        assert await asyncio.to_thread(server.broker.held.acquire, True, 60)


async def until(condition):
    """Run the event loop until a condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def answered(client, code):
    """Ask until the server answers a lookup with a code."""
    async with asyncio.timeout(60):
        while (await client.ask(LOOKED_UP)).code != code:
            await asyncio.sleep(0)


@run
async def test_responses_come_as_they_are_ready_each_with_its_opaque():
    async with serving() as server, Client.open(server) as client:
        await client.send(
            Command(code=HELD, opaque=-5, body=b"slow"),
            Command(code=LOOKED_UP, opaque=2**31 - 1, body=b"quick", serialisation=BINARY),
            Command(code=AT_ONCE, opaque=0, body=b"at once"),
        )
        answers = [await client.receive() for _ in range(2)]
        assert {(response.opaque, response.body, response.serialisation) for response in answers} == {
            (2**31 - 1, b"quick", BINARY),
            (0, b"at once", JSON),
        }
        server.broker.release.set()
        slow = await client.receive()
        assert (slow.opaque, slow.body, slow.flag) == (-5, b"slow", RESPONSE)
        assert (await client.ask(LONG)).body == bytes(8 << 20)


@run
async def test_oneway_requests_get_no_answer_and_responses_are_no_requests():
    async with serving() as server, Client.open(server) as client:
        await client.send(*[Command(code=LOOKED_UP, opaque=n, flag=ONEWAY) for n in range(100)])
        await client.send(*[Command(code=LOOKED_UP, opaque=n, flag=RESPONSE) for n in range(100)])
        assert (await client.ask(LOOKED_UP)).code == 0
        assert server.broker.most == 1


# each request is counted and audited once


@pytest.mark.parametrize("flag", [0, ONEWAY])
@run
async def test_requests_count_that_come_with_the_end_of_their_connection(flag):
    async with accounting() as (server, audited, observed):
        async with Client.open(server) as client:
            sent = [Command(code=code, opaque=n, flag=flag) for n, code in enumerate((AT_ONCE, LOOKED_UP, AT_ONCE))]
            client.writer.write(b"".join(map(encode_frame, sent)))
            client.writer.write_eof()
            await client.ended()
        await until(lambda: len(observed) == 3)
        assert sorted(opaque for opaque, _ in audited) == sorted(opaque for opaque, _ in observed) == [0, 1, 2]


@run
async def test_requests_count_once_though_their_client_has_gone():
    async with accounting(threads=1) as (server, audited, observed):
        async with Client.open(server) as client:
            await client.send(*[Command(code=HELD, opaque=n) for n in range(4)])
            await held(server)
            assert (await client.ask(AT_ONCE)).code == 0  # the others are read, too
        await until(lambda: server.connections == 0 and len(audited) == 5)
        # the request in the thread still runs
        assert sorted(audited[1:]) == sorted(observed[1:]) == [(n, 2) for n in range(4)]
        (cancellation,) = server.broker.cancellations
        assert cancellation.is_set  # and reads no more
        server.broker.release.set()
        # the others never began
        async with Client.open(server) as client:
            assert (await client.ask(LOOKED_UP)).code == 0
        assert len(server.broker.cancellations) == 1 and len(audited) == len(observed) == 6


@run
async def test_a_request_is_audited_whose_client_leaves_before_an_audit_thread_begins():
    class Counting(ThreadPoolExecutor):
        calls = 0

        def submit(self, *positional, **named):
            self.calls += 1
            return super().submit(*positional, **named)

    goes_on, threads = threading.Event(), Counting(1)
    asyncio.get_running_loop().set_default_executor(threads)
    async with accounting() as (server, audited, observed):
        busy = asyncio.ensure_future(asyncio.to_thread(goes_on.wait, 60))
        try:
            async with Client.open(server) as client:
                await client.send(Command(code=AT_ONCE, opaque=7))
                await until(lambda: threads.calls == 2)
            await until(lambda: server.connections == 0)
            assert audited == []
        finally:
            goes_on.set()
        assert await busy
        # the pool is idle after this call
        await asyncio.to_thread(int)
        assert audited == observed == [(7, 0)]


@run
async def test_an_audit_log_that_hangs_delays_no_other_request():
    goes_on = threading.Event()

    def audit(request, response, is_known):
        assert request.opaque or goes_on.wait(60)

    async with serving(audit=audit) as server, Client.open(server) as stuck, Client.open(server) as other:
        await stuck.send(Command(code=AT_ONCE, opaque=0))
        for _ in range(3):
            await other.send(Command(code=LOOKED_UP, opaque=7))
            assert (await other.receive()).opaque == 7
        goes_on.set()
        assert (await stuck.receive()).opaque == 0


@run
async def test_a_defect_ends_one_connection_and_is_counted_and_audited():
    async with accounting() as (server, audited, observed), Client.open(server) as other:
        for opaque, code in enumerate((BROKEN, BROKEN_AT_ONCE)):
            async with Client.open(server) as client:
                await client.send(Command(code=code, opaque=opaque))
                assert await client.ended()
        assert audited == observed == [(0, 1), (1, 1)]
        assert (await other.ask(AT_ONCE)).code == 0


# hostile bytes


GARBAGE = {
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a TLS hello": bytes.fromhex("16030100f1010000ed0303") + bytes(100),
    "zeros": bytes(8),
    "a frame of 2 GiB": struct.pack(">i", 2**31 - 1) + b"\0\0\0\x02{}",
    "a negative length": struct.pack(">i", -1),
    "a frame that is a byte too long": struct.pack(">i", 4097),
    "a deep header": struct.pack(">iI", 4004, 4000) + b"[" * 4000,
    "half a frame": struct.pack(">iI", 100, 90) + b"{",
}


@run
async def test_an_invalid_frame_ends_only_its_connection():
    async with serving(frame_bytes=4096) as server, Client.open(server) as other:
        for kind, data in GARBAGE.items():
            async with Client.open(server) as client:
                assert (await client.ask(AT_ONCE)).code == 0
                await client.raw(data)
                if data.endswith(b"{"):
                    client.writer.write_eof()
                assert await client.ended(), kind
            assert (await other.ask(AT_ONCE, body=b"x" * 3000)).code == 0
            await until(lambda: server.connections == 1)


# bounds


@run
async def test_idle_connections_end_and_waiting_ones_do_not():
    async with serving(idle_s=2.0) as server:
        async with Client.open(server) as silent, Client.open(server) as halting, Client.open(server) as waiting:
            for client in (silent, halting):
                assert (await client.ask(AT_ONCE)).code == 0
            await waiting.send(Command(code=HELD, opaque=1))
            await halting.raw(b"\0\0\0\x20\0\0")
            assert await silent.ended()
            assert await halting.ended()
            assert server.connections == 1
            server.broker.release.set()
            assert (await waiting.receive()).opaque == 1


@run
async def test_connections_are_bounded(caplog):
    """One log line reports the refusal, however often clients try."""
    caplog.set_level(logging.WARNING)
    async with serving(connections_at_most=2) as server, Client.open(server) as first:
        async with Client.open(server) as second:
            assert [(await client.ask(AT_ONCE)).code for client in (first, second)] == [0, 0]
            for _ in range(3):
                async with Client.open(server) as third:
                    assert await third.ended()
            assert [(await client.ask(AT_ONCE)).code for client in (first, second)] == [0, 0]
        await until(lambda: server.connections == 1)
        async with Client.open(server) as third:
            assert (await third.ask(AT_ONCE)).code == 0
    assert caplog.messages == ["refusing connections: all 2 allowed ones are open"]


@run
async def test_strangers_have_little_time_and_make_place_for_others():
    """Connections that send nothing shut nobody out. With access keys, only a key makes a stranger known."""
    async with serving(first_s=30.0, connections_at_most=100) as server:
        async with Client.open(server) as known, AsyncExitStack() as idle:
            assert (await known.ask(AT_ONCE)).code == 0
            for number in range(250):
                await idle.enter_async_context(Client.open(server))
                if number % 100 == 80:
                    async with Client.open(server) as further:
                        assert (await further.ask(AT_ONCE)).code == 0
            await until(lambda: len(server.strangers) <= 64)
            assert (await known.ask(AT_ONCE)).code == 0
    async with serving(keys={"one": AccessKey("secret")}) as server, Client.open(server) as unknown:
        assert (await unknown.ask(AT_ONCE)).code == ResponseCode.NO_PERMISSION
        assert len(server.strangers) == 1
    async with serving(first_s=0.05) as server, Client.open(server) as silent:
        assert await silent.ended()


@run
async def test_requests_of_one_connection_are_bounded():
    """The server does not read requests over the bound until there is room. It does not delay another connection."""
    async with serving(requests_of_connection=3) as server:
        async with Client.open(server) as client, Client.open(server) as other:
            await client.send(*[Command(code=HELD, opaque=n) for n in range(5)])
            await client.send(Command(code=AT_ONCE, opaque=9))
            await held(server, 3)
            assert (await other.ask(AT_ONCE)).code == 0
            assert (server.broker.running, server.broker.most) == (3, 3)
            server.broker.release.set()
            assert {(await client.receive()).opaque for _ in range(6)} == {0, 1, 2, 3, 4, 9}


@run
async def test_requests_of_all_are_bounded_also_by_their_time_in_the_queue():
    async with serving(requests=4, threads=2) as server:
        async with Client.open(server) as client, Client.open(server) as other:
            await client.send(*[Command(code=HELD, opaque=n) for n in range(4)])
            await held(server, 2)
            refused = await other.ask(LOOKED_UP)
            assert (refused.code, refused.remark) == (2, BUSY)
            assert (await other.ask(AT_ONCE)).code == 0
            server.broker.release.set()
            assert {(await client.receive()).code for _ in range(4)} == {0}
            assert (await other.ask(LOOKED_UP)).code == 0
            assert server.broker.most == 2
    async with serving(threads=1, queued_s=1e-9) as server, Client.open(server) as client:
        assert (await client.ask(LOOKED_UP)).code == 2
        assert server.broker.most == 0


@run
async def test_a_client_that_reads_nothing_uses_little_memory_and_is_disconnected():
    """Its responses count as unsent. While they are too many, the server begins no lookups."""
    async with serving(unsent_bytes=20 << 20, idle_s=2.0) as server:
        async with Client.open(server, limit=1) as slow, Client.open(server) as other:
            await slow.send(*[Command(code=LONG, opaque=n) for n in range(3)])
            await answered(other, 2)
            await answered(other, 0)
            assert server.connections == 1


@run
async def test_a_lookup_that_waited_while_clients_read_nothing_is_not_begun():
    async with serving(unsent_bytes=4 << 20, threads=1) as server:
        async with Client.open(server) as first, Client.open(server) as other:
            await first.send(Command(code=HELD))
            await held(server)
            # admitted, because no response is unsent yet
            await other.send(*[Command(code=LONG, opaque=n) for n in range(3)], Command(code=AT_ONCE))
            assert (await other.receive()).code == 0
            with server.sending(bytes(4 << 20)):
                server.broker.release.set()
                assert {(await other.receive()).code for _ in range(3)} == {2}
            assert (await other.ask(LONG)).code == 0


@run
async def test_a_response_that_waits_for_its_step_counts_as_unsent(monkeypatch):
    monkeypatch.setattr(server_module, "pause_s", lambda passed_s: 60.0)
    async with serving(unsent_bytes=8 << 20) as server:
        look_up = server.broker.look_up
        server.broker.look_up = lambda request, *more: replace(
            look_up(request, *more), withheld=int(request.code == LONG)
        )
        async with Client.open(server) as other:
            async with Client.open(server) as client:
                await client.send(Command(code=LONG))
                await answered(other, 2)
            await answered(other, 0)


# begin and end


@run
async def test_a_server_ends_what_is_under_way():
    server = RemotingServer(FakeBroker(), free_port())
    await server.start()
    port = server.address.port
    assert server.url == f"rocketmq://127.0.0.1:{port}"
    async with Client.open(server) as client:
        assert (await client.ask(LOOKED_UP)).code == 0
        await client.send(Command(code=HELD))
        await held(server)
        server.broker.release.set()
        await server.close()
        async with asyncio.timeout(60):
            await client.reader.read()
    assert server.connections == 0
    with pytest.raises(OSError, match=r".*"):
        await asyncio.open_connection("127.0.0.1", port)
    await server.close()


@run
async def test_an_address_on_which_another_server_listens_meanwhile():
    # both may be bound to it until one listens
    first, second = socket.socket(), socket.socket()
    for bound in (first, second):
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0 if bound is first else first.getsockname()[1]))
    async with RemotingServer(FakeBroker(), first) as server:
        with second, pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1 port {server.address.port}: Addr"):
            await RemotingServer(FakeBroker(), second).start()


@run
async def test_a_connection_that_is_made_while_the_server_closes_ends_at_once():
    server = RemotingServer(FakeBroker(), free_port())
    await server.start()
    await server.close()
    writer = MagicMock()
    await asyncio.wait_for(server._connected(asyncio.StreamReader(), writer), 60)
    writer.transport.abort.assert_called_once()
    assert server.connections == 0


@run
async def test_encrypted_connections(tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(authority.server_file)
    async with serving(tls=tls) as server:
        trusting = ssl.create_default_context(cafile=authority.certificate_file)
        async with Client.open(server, ssl=trusting) as client:
            assert (await client.ask(LOOKED_UP, body=b"secret")).body == b"secret"
        async with Client.open(server) as client:
            await client.send(Command(code=AT_ONCE))
            assert await client.ended()
    monkeypatch.setattr(strangers, "FIRST_S", 0.1)
    async with serving(tls=tls) as server, Client.open(server) as silent:
        # sooner than asyncio's timeout of a minute
        assert await asyncio.wait_for(silent.ended(), 30.0)
