"""An S3 server of one folder that counts requests and delays answers: `python -m tests.benchmarks.cold_peers.server`.

A server for tests keeps objects in memory, copies the whole object for a range, and takes milliseconds a request:
lookups at once would measure it. This one reads ranges from files, in one thread, in some 0.2 ms a request. It does
the part of S3's protocol that the stores of the comparison use: objects, ranges, conditional puts, uploads in parts,
lists. It checks no signatures.

Requests below `/-/` control it, and neither count nor wait: `POST /-/delay?ms=30`, `POST /-/counts` (return the counts
and begin anew), `POST /-/copy?source=BUCKET/PREFIX&target=BUCKET/PREFIX`. An object's file never changes: a copy is a
second name of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import sys
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

__all__ = ["Reply", "Store", "main", "unchunked"]

_CONTROL = "/-/"
_LIST_KEYS = 1_000


@dataclass(frozen=True)
class _Object:
    file: Path
    size: int
    etag: str
    changed_s: float


@dataclass(frozen=True)
class Reply:
    """What a request is answered with."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


class Store:
    """Objects by `bucket/key`, their bytes in files of `folder`; answers requests, and knows nothing of sockets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._objects: dict[str, _Object] = {}
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._numbers = itertools.count()
        self.counts: Counter[str] = Counter()
        self.delay_s = 0.0

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Reply:
        """Do what a request asks for; `headers` by their names in lower case."""
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if parts.path.startswith(_CONTROL):
            return self._control(parts.path.removeprefix(_CONTROL), query)
        name = unquote(parts.path).strip("/")
        bucket, _, key = name.partition("/")
        if not key:
            if method == "GET":
                reply = self._list(bucket, query)
            elif method == "POST" and "delete" in query:
                reply = self._delete_many(bucket, body)
            else:
                reply = Reply(200)
        elif method in ("GET", "HEAD"):
            reply = self._get(name, method, headers)
        elif method == "PUT" and "uploadId" in query:
            self._uploads[query["uploadId"]][int(query["partNumber"])] = body
            reply = Reply(200, headers=(("ETag", f'"{hashlib.md5(body).hexdigest()}"'),))
        elif method == "PUT":
            reply = self._put(name, headers, body, hashlib.md5(body).hexdigest())
        elif method == "POST":
            reply = self._upload(name, query, headers)
        else:
            self._uploads.pop(query.get("uploadId", ""), None)
            if "uploadId" not in query:
                self._objects.pop(name, None)
            reply = Reply(204)
        kind = "list" if not key and method == "GET" else "get" if method in ("GET", "HEAD") else "put"
        kind = "delete" if method == "DELETE" or (not key and "delete" in query) else kind
        self.counts[kind] += 1
        self.counts["bytes"] += 0 if method == "HEAD" else len(reply.body)
        return reply

    def _control(self, what: str, query: dict[str, str]) -> Reply:
        if what == "delay":
            self.delay_s = float(query["ms"]) / 1000
        elif what == "copy":
            source, target = query["source"] + "/", query["target"] + "/"
            found = [(name, held) for name, held in self._objects.items() if name.startswith(source)]
            self._objects |= {target + name.removeprefix(source): held for name, held in found}
        elif what == "size":
            prefix = query["prefix"]
            sizes = [held.size for name, held in self._objects.items() if f"{name}/".startswith(f"{prefix}/")]
            return Reply(200, json.dumps({"objects": len(sizes), "bytes": sum(sizes)}).encode())
        counts, self.counts = self.counts, Counter()
        return Reply(200, json.dumps(counts).encode())

    def _get(self, name: str, method: str, headers: dict[str, str]) -> Reply:
        held = self._objects.get(name)
        if held is None:
            return _error(404, "NoSuchKey", name)
        about = (
            ("ETag", f'"{held.etag}"'),
            ("Last-Modified", formatdate(held.changed_s, usegmt=True)),
            ("Accept-Ranges", "bytes"),
            ("Content-Type", "application/octet-stream"),
        )
        if method == "HEAD":
            return Reply(200, headers=(*about, ("Content-Length", str(held.size))))
        if "range" not in headers:
            return Reply(200, held.file.read_bytes(), about)
        first, _, last = headers["range"].removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, held.size - int(last))
        end = min(int(last) + 1, held.size) if first and last else held.size
        if start >= held.size:
            return _error(416, "InvalidRange", name)
        with held.file.open("rb") as file:
            body = os.pread(file.fileno(), end - start, start)
        return Reply(206, body, (*about, ("Content-Range", f"bytes {start}-{end - 1}/{held.size}")))

    def _put(self, name: str, headers: dict[str, str], body: bytes, etag: str) -> Reply:
        held = self._objects.get(name)
        wanted = headers.get("if-match")
        if (held is not None and headers.get("if-none-match") == "*") or (
            wanted is not None and (held is None or wanted.strip('"') != held.etag)
        ):
            return _error(412, "PreconditionFailed", name)
        file = self._folder / str(next(self._numbers))
        file.write_bytes(body)
        self._objects[name] = _Object(file, len(body), etag, time.time())
        return Reply(200, headers=(("ETag", f'"{etag}"'),))

    def _upload(self, name: str, query: dict[str, str], headers: dict[str, str]) -> Reply:
        bucket, _, key = name.partition("/")
        place = f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(key)}</Key>"
        if "uploads" in query:
            upload = str(next(self._numbers))
            self._uploads[upload] = {}
            return _xml("InitiateMultipartUploadResult", f"{place}<UploadId>{upload}</UploadId>")
        parts = self._uploads.pop(query["uploadId"])
        body = b"".join(parts[number] for number in sorted(parts))
        reply = self._put(name, headers, body, f"{hashlib.md5(body).hexdigest()}-{len(parts)}")
        if reply.status != 200:
            return reply
        etag = self._objects[name].etag
        return _xml("CompleteMultipartUploadResult", f"{place}<ETag>&quot;{etag}&quot;</ETag>")

    def _delete_many(self, bucket: str, body: bytes) -> Reply:
        for each in ElementTree.fromstring(body).iter():
            if each.tag.endswith("Key"):
                self._objects.pop(f"{bucket}/{each.text}", None)
        return _xml("DeleteResult", "")

    def _list(self, bucket: str, query: dict[str, str]) -> Reply:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after") or query.get("marker") or ""
        before = f"{bucket}/"
        keys = sorted(name.removeprefix(before) for name in self._objects if name.startswith(before + prefix))
        rows, folders = [], dict[str, None]()
        most, last, truncated = int(query.get("max-keys") or _LIST_KEYS), "", False
        for key in keys[bisect_left(keys, after) if after else 0 :]:
            if key <= after or (last.endswith("/") and delimiter and key.startswith(last)):
                continue
            if after and delimiter and after.endswith(delimiter) and key.startswith(after):
                continue
            if len(rows) + len(folders) >= most:
                truncated = True
                break
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0:
                last = key[: cut + len(delimiter)]
                folders[last] = None
                continue
            last = key
            held = self._objects[before + key]
            changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(held.changed_s))
            rows.append(
                f"<Contents><Key>{escape(_shown(key, query))}</Key><LastModified>{changed}</LastModified>"
                f"<ETag>&quot;{held.etag}&quot;</ETag><Size>{held.size}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        more = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if truncated else ""
        encoding = "<EncodingType>url</EncodingType>" if "encoding-type" in query else ""
        return _xml(
            "ListBucketResult",
            f"<Name>{escape(bucket)}</Name><Prefix>{escape(_shown(prefix, query))}</Prefix>{encoding}"
            f"<KeyCount>{len(rows) + len(folders)}</KeyCount><MaxKeys>{most}</MaxKeys>"
            f"<IsTruncated>{str(truncated).lower()}</IsTruncated>{more}{''.join(rows)}"
            + "".join(
                f"<CommonPrefixes><Prefix>{escape(_shown(name, query))}</Prefix></CommonPrefixes>" for name in folders
            ),
        )


def _shown(key: str, query: dict[str, str]) -> str:
    return quote(key, safe="/") if query.get("encoding-type") == "url" else key


def _xml(root: str, inner: str) -> Reply:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{root} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}'
    return Reply(200, f"{text}</{root}>".encode(), (("Content-Type", "application/xml"),))


def _error(status: int, code: str, name: str) -> Reply:
    text = f"<Error><Code>{code}</Code><Message>{code}</Message><Resource>{escape(name)}</Resource></Error>"
    return Reply(status, text.encode(), (("Content-Type", "application/xml"),))


def unchunked(body: bytes) -> bytes:
    """Return the bytes of a body in chunks, each behind its length in hexadecimal digits; trailers are dropped."""
    parts, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].partition(b";")[0], 16)
        if not size:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return b"".join(parts)


async def _serve_client(store: Store, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
            control = target.startswith(_CONTROL)
            if store.delay_s and not control:
                await asyncio.sleep(store.delay_s)
            reply = store.answer(method, target, headers, body)
            sent = dict(reply.headers)
            sent.setdefault("Content-Length", str(len(reply.body)))
            rows = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
            writer.write(f"HTTP/1.1 {reply.status} OK\r\n{rows}\r\n".encode("latin-1") + reply.body)
            await writer.drain()
    writer.close()


async def _serve(folder: Path) -> None:
    store = Store(folder)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _serve_client(store, reader, writer)

    server = await asyncio.start_server(client, "127.0.0.1", 0, limit=1 << 26)
    print(server.sockets[0].getsockname()[1], flush=True)
    # ends with the process that started it, whose pipe it reads
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


def main() -> None:
    """Serve the folder of the first argument on a port of its own, which is the first line of output."""
    asyncio.run(_serve(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
