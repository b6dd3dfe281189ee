"""The part of S3's protocol that stores and clients of tests use, without sockets.

It has objects, ranges, conditional puts, uploads in parts, and lists. It checks no signatures, and counts requests.
"""

import hashlib
import itertools
import os
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

_LIST_KEYS = 1_000


@dataclass(frozen=True)
class _Object:
    file: Path
    size: int
    etag: str
    changed_s: float


@dataclass(frozen=True)
class Reply:
    """The answer to a request."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


class Store:
    """Objects by `bucket/key`, with their bytes in files of `folder`. It answers requests, and has no sockets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.objects: dict[str, _Object] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self._numbers = itertools.count()
        self.counts: Counter[str] = Counter()

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Reply:
        """Execute a request; `headers` by their names in lower case."""
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
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
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            reply = Reply(200, headers=(("ETag", f'"{hashlib.md5(body).hexdigest()}"'),))
        elif method == "PUT":
            reply = self._put(name, headers, body, hashlib.md5(body).hexdigest())
        elif method == "POST":
            reply = self._upload(name, query, headers)
        else:
            self.uploads.pop(query.get("uploadId", ""), None)
            if "uploadId" not in query:
                self.objects.pop(name, None)
            reply = Reply(204)
        kind = "list" if not key and method == "GET" else "get" if method in ("GET", "HEAD") else "put"
        kind = "delete" if method == "DELETE" or (not key and "delete" in query) else kind
        self.counts[kind] += 1
        self.counts["bytes"] += 0 if method == "HEAD" else len(reply.body)
        return reply

    def _get(self, name: str, method: str, headers: dict[str, str]) -> Reply:
        held = self.objects.get(name)
        if held is None:
            return error(404, "NoSuchKey", name)
        about = (
            ("ETag", f'"{held.etag}"'),
            ("Last-Modified", formatdate(held.changed_s, usegmt=True)),
            ("Accept-Ranges", "bytes"),
            ("Content-Type", "application/octet-stream"),
        )
        if method == "HEAD":
            return Reply(200, headers=(*about, ("Content-Length", str(held.size))))
        if headers.get("if-match", about[0][1]) != about[0][1]:
            return error(412, "PreconditionFailed", name)
        if "range" not in headers:
            return Reply(200, held.file.read_bytes(), about)
        first, _, last = headers["range"].removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, held.size - int(last))
        end = min(int(last) + 1, held.size) if first and last else held.size
        if start >= held.size:
            return error(416, "InvalidRange", name)
        with held.file.open("rb") as file:
            body = os.pread(file.fileno(), end - start, start)
        return Reply(206, body, (*about, ("Content-Range", f"bytes {start}-{end - 1}/{held.size}")))

    def _put(self, name: str, headers: dict[str, str], body: bytes, etag: str) -> Reply:
        held = self.objects.get(name)
        wanted = headers.get("if-match")
        if (held is not None and headers.get("if-none-match") == "*") or (
            wanted is not None and (held is None or wanted.strip('"') != held.etag)
        ):
            return error(412, "PreconditionFailed", name)
        file = self._folder / str(next(self._numbers))
        file.write_bytes(body)
        self.objects[name] = _Object(file, len(body), etag, time.time())
        return Reply(200, headers=(("ETag", f'"{etag}"'),))

    def _upload(self, name: str, query: dict[str, str], headers: dict[str, str]) -> Reply:
        bucket, _, key = name.partition("/")
        place = f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(key)}</Key>"
        if "uploads" in query:
            upload = str(next(self._numbers))
            self.uploads[upload] = {}
            return _xml("InitiateMultipartUploadResult", f"{place}<UploadId>{upload}</UploadId>")
        parts = self.uploads.pop(query["uploadId"])
        body = b"".join(parts[number] for number in sorted(parts))
        reply = self._put(name, headers, body, f"{hashlib.md5(body).hexdigest()}-{len(parts)}")
        if reply.status != 200:
            return reply
        etag = self.objects[name].etag
        return _xml("CompleteMultipartUploadResult", f"{place}<ETag>&quot;{etag}&quot;</ETag>")

    def _delete_many(self, bucket: str, body: bytes) -> Reply:
        for each in ElementTree.fromstring(body).iter():
            if each.tag.endswith("Key"):
                self.objects.pop(f"{bucket}/{each.text}", None)
        return _xml("DeleteResult", "")

    def _list(self, bucket: str, query: dict[str, str]) -> Reply:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after") or query.get("marker") or ""
        before = f"{bucket}/"
        keys = sorted(name.removeprefix(before) for name in self.objects if name.startswith(before + prefix))
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
            held = self.objects[before + key]
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


def error(status: int, code: str, name: str = "") -> Reply:
    """Return the XML document of an error."""
    text = f"<Error><Code>{code}</Code><Message>{code}</Message><Resource>{escape(name)}</Resource></Error>"
    return Reply(status, text.encode(), (("Content-Type", "application/xml"),))


def unchunked(body: bytes) -> bytes:
    """Return the bytes of a body in chunks. Each follows its length in hexadecimal digits; trailers are dropped."""
    parts, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].partition(b";")[0], 16)
        if not size:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
