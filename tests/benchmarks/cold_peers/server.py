"""An S3 server of one folder that counts requests and delays answers: `python -m tests.benchmarks.cold_peers.server`.

The tests' other server keeps objects in memory, copies the whole object for a range, and takes milliseconds per
request. Concurrent lookups would measure that server. This one reads ranges from files, in one thread, in about 0.2 ms
per request.

Requests below `/-/` control it. They are neither counted nor delayed. They are `POST /-/delay?ms=30`, `POST /-/counts`
(return the counts and reset them) and `POST /-/copy?source=BUCKET/PREFIX&target=BUCKET/PREFIX`. An object's file never
changes, so a copy is a second name of it.
"""

import asyncio
import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from tests.support.object_store import Reply, Store, unchunked

_CONTROL = "/-/"


class Delayed(Store):
    """Objects with a delay that requests can set."""

    delay_s = 0.0

    def control(self, target: str) -> Reply:
        """Execute a request below `/-/`."""
        what, query = urlsplit(target).path.removeprefix(_CONTROL), dict(parse_qsl(urlsplit(target).query))
        if what == "delay":
            self.delay_s = float(query["ms"]) / 1000
        elif what == "copy":
            source, target = query["source"] + "/", query["target"] + "/"
            copied = [(name, held) for name, held in self.objects.items() if name.startswith(source)]
            self.objects |= {target + name.removeprefix(source): held for name, held in copied}
        elif what == "size":
            prefix = query["prefix"]
            sizes = [held.size for name, held in self.objects.items() if f"{name}/".startswith(f"{prefix}/")]
            return Reply(200, json.dumps({"objects": len(sizes), "bytes": sum(sizes)}).encode())
        counts, self.counts = self.counts, Counter()
        return Reply(200, json.dumps(counts).encode())


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return b"".join(parts)


async def _serve_client(store: Delayed, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            request, *lines = head.split("\r\n")
            method, target, _ = request.split(" ")
            headers = {
                name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if _
            }
            if headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if headers.get("transfer-encoding", "").lower() == "chunked":
                body = await _chunks(reader)
            else:
                body = await reader.readexactly(int(headers.get("content-length") or 0))
            if "aws-chunked" in headers.get("content-encoding", ""):
                body = unchunked(body)
            if target.startswith(_CONTROL):
                reply = store.control(target)
            else:
                await asyncio.sleep(store.delay_s)
                reply = store.answer(method, target, headers, body)
            sent = dict(reply.headers)
            sent.setdefault("Content-Length", str(len(reply.body)))
            rows = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
            writer.write(f"HTTP/1.1 {reply.status} OK\r\n{rows}\r\n".encode("latin-1") + reply.body)
            await writer.drain()
    writer.close()


async def _serve(folder: Path) -> None:
    store = Delayed(folder)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _serve_client(store, reader, writer)

    server = await asyncio.start_server(client, "127.0.0.1", 0, limit=1 << 26)
    print(server.sockets[0].getsockname()[1], flush=True)
    # it reads the pipe of the process that started it, and ends with that process
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


def main() -> None:
    """Serve the folder of the first argument on a free port, and print the port as the first line."""
    asyncio.run(_serve(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
