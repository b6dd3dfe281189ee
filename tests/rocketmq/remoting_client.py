"""A client of RocketMQ's remoting protocol, and a running server of it, for tests of the server."""

import asyncio
import contextlib
import functools
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from itertools import count
from typing import Any

from tiered_index.connectors.rocketmq.log.layout import Host
from tiered_index.connectors.rocketmq.log.message import Message, decode_message
from tiered_index.connectors.rocketmq.remoting.broker import ReadOnlyBroker
from tiered_index.connectors.rocketmq.remoting.frames import JSON, Command, decode_frame, encode_frame
from tiered_index.connectors.rocketmq.remoting.server import RemotingServer

BEGIN, END, STATS, PULL = 31, 30, 202, 11
HERE = Host("127.0.0.1", 10911)
FOREVER = {"beginTimestamp": "0", "endTimestamp": "9223372036854775807"}


class Client:
    """One connection. `ask` waits for the response; `send` and `receive` don't wait for each other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._opaque = count(7)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, server: RemotingServer, **more: Any) -> AsyncIterator["Client"]:
        client = cls(*await asyncio.open_connection(server.address.ip, server.address.port, **more))
        try:
            yield client
        finally:
            client.writer.transport.abort()

    async def send(self, *commands: Command) -> None:
        self.writer.write(b"".join(map(encode_frame, commands)))
        await self.writer.drain()

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive_frame(self) -> bytes:
        async with asyncio.timeout(30):
            length = await self.reader.readexactly(4)
            return length + await self.reader.readexactly(*struct.unpack(">i", length))

    async def receive(self) -> Command:
        return decode_frame((await self.receive_frame())[4:])

    async def ask(
        self, code: int, fields: Mapping[str, str] | None = None, serialisation: int = JSON, **more: Any
    ) -> Command:
        opaque = next(self._opaque)
        await self.send(Command(code=code, opaque=opaque, fields=fields or {}, serialisation=serialisation, **more))
        response = await self.receive()
        assert (response.opaque, response.is_response, response.serialisation) == (opaque, True, serialisation)
        return response

    async def ended(self) -> bool:
        """Wait until the server ends the connection; return whether it ends it without another byte."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(30):
                return await self.reader.read(1) == b""
        return True


def by_key(topic: str, key: str, most: int = 64, **more: str) -> dict[str, str]:
    return {"topic": topic, "key": key, "maxNum": str(most), "_UNIQUE_KEY_QUERY": "false", **FOREVER, **more}


def by_unique_key(topic: str, key: str, **more: str) -> dict[str, str]:
    return by_key(topic, key, **{"_UNIQUE_KEY_QUERY": "true", **more})


def records(body: bytes) -> list[Message]:
    """Return the messages of a response, by the method of the client's decoder."""
    messages = []
    at = 0
    while at < len(body):
        messages.append(decode_message(body, at))
        at += messages[-1].size
    return messages


def run(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine function as a test."""

    @functools.wraps(test)
    def body(*positional: Any, **named: Any) -> None:
        asyncio.run(test(*positional, **named))

    return body


# without a connection


def ask(broker: ReadOnlyBroker, code: int, topic: str, queue_id: int = 0, sees: Any = None, **fields: str) -> Command:
    request = Command(code=code, fields={"topic": topic, "queueId": str(queue_id), **fields})
    return broker.answer_at_once(request, HERE) or broker.look_up(request, HERE, sees)


def pull(
    broker: ReadOnlyBroker, topic: str, queue_id: int, offset: int, most: int = 32, sees: Any = None, **more: str
) -> Command:
    fields = {"queueOffset": str(offset), "maxMsgNums": str(most), "sysFlag": "4", "subscription": "*", **more}
    return ask(broker, PULL, topic, queue_id, sees, **fields)


def ends(broker: ReadOnlyBroker, topic: str, queue_id: int) -> tuple[int, ...]:
    answers = [ask(broker, code, topic, queue_id) for code in (BEGIN, END)]
    assert {answer.code for answer in answers} == {0}, answers
    return tuple(int(answer.fields["offset"]) for answer in answers)


def pulled(
    broker: ReadOnlyBroker, topic: str, queue_id: int, begin: int, end: int, most: int = 32
) -> tuple[list[Message], list[int]]:
    """Return the messages of a queue, page by page, and the offsets of empty pages."""
    messages: list[Message] = []
    empty, at = [], begin
    while at < end:
        answer = pull(broker, topic, queue_id, at, most)
        assert answer.code in (0, 20, 21), answer
        page = records(answer.body)
        empty += [] if page else [at]
        following = int(answer.fields["nextBeginOffset"])
        assert following > at
        assert all(at <= m.queue_offset < following for m in page)
        messages, at = messages + page, following
    return messages, empty
