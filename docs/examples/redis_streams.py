"""A connector for streams of Redis, as a package of its own has it: a stream is a topic, and an entry a message.

An entry MS-SEQ has the offset MS * 2^20 + SEQ, and its field ``key`` is its key. Entries are archived: they are found
after Redis has trimmed them. Needs Redis 7 and the package `redis`.
"""

import contextlib
import re
from dataclasses import dataclass

import pyarrow as pa
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tiered_index.connectors.archive.archiver import PutArchiver
from tiered_index.connectors.archive.columns import SHARED, ArchiveFormat, entries_of
from tiered_index.connectors.archive.connector import ArchivingConnector
from tiered_index.connectors.contract import OpenedSource
from tiered_index.connectors.registry import ConnectorSpec
from tiered_index.connectors.source import Batch, Lag, Loss, patiently
from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.format.keys.spelling import key_text

SCHEME = "redis:"
ADDRESS = re.compile(r"redis://([^/:]+):(\d+)/([^/]+)")
SEQ_BITS = 20
# entries of a batch, and the longest wait for an answer: a source must close within 10 s
COUNT, TIMEOUT_S = 1000, 2
SPEC = ConnectorSpec(
    name="redis",
    title="a stream of Redis",
    open="redis_streams:CONNECTOR",
    claims=lambda address: address.startswith(f"{SCHEME}//"),
)
FIELDS = pa.list_(pa.struct({"name": pa.binary(), "value": pa.binary()}))
FORMAT = ArchiveFormat(
    "archived entries of Redis",
    "redis_streams.entries",
    1,
    pa.schema({**SHARED, "fields": FIELDS}),
    texts=("fields.list.element.name", "fields.list.element.value", "keys.list.element"),
)


def offset_of(entry_id):
    ms, seq = map(int, entry_id.decode().split("-"))
    if seq >> SEQ_BITS:
        raise InvalidArgument(f"entry {ms}-{seq}: sequence numbers from {1 << SEQ_BITS:,} on have no offset")
    return ms << SEQ_BITS | seq


def id_of(offset):
    return f"{offset >> SEQ_BITS}-{offset & (1 << SEQ_BITS) - 1}"


class Stream:
    """A stream of a server."""

    def __init__(self, address):
        if (matched := ADDRESS.fullmatch(address)) is None:
            raise InvalidArgument(f"{address}: write redis://HOST:PORT/STREAM")
        host, port, self.topic = matched.groups()
        waits = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
        self.client = redis.Redis(host, int(port), retry=Retry(NoBackoff(), 0), **waits)
        # its log in the archive, and its position
        self.place, self.store = address, f"{SCHEME}{host}:{port}/{self.topic}/0"

    @contextlib.contextmanager
    def asking(self):
        try:
            yield self.client
        except redis.RedisError as error:
            raise StorageUnavailable(f"{self.place}: {error}") from error

    def table(self, rows):
        """Return entries as the columns of the archive."""
        columns = {
            "topic": [self.topic] * len(rows),
            "offset": [offset_of(entry_id) for entry_id, _ in rows],
            "timestamp": [offset_of(entry_id) >> SEQ_BITS for entry_id, _ in rows],
            "keys": [[key_text(fields[b"key"])] if b"key" in fields else [] for _, fields in rows],
            "fields": [[{"name": name, "value": text} for name, text in fields.items()] for _, fields in rows],
        }
        return pa.table(columns, FORMAT.schema)

    def read(self, topic, queue_id, offset):
        """Return the entry at an offset as columns of the archive: one row, or none. None: it is another stream's."""
        with self.asking() as client:
            return self.table(client.xrange(self.topic, id_of(offset), id_of(offset))) if topic == self.topic else None

    def close(self):
        self.client.close()


class StreamSource:
    unit, offsets = "milliseconds", "offsets"

    def __init__(self, index, stream, follow):
        self.stream, self.place, self.follow = stream, stream.place, follow
        self.trouble, self.deleted, self.generation = None, 0, 0
        # each stream that replaced an earlier one has positions under a name of its own
        while index.durable_position(self.named(self.generation + 1)) is not None:
            self.generation += 1
        self.name = self.named(self.generation)
        self.position = index.durable_position(self.name) or 0

    def named(self, generation):
        return f"{self.stream.store}#{generation}" if generation else self.stream.store

    def positions(self):
        return {self.name: self.position}

    def batches(self):
        return patiently(self, self.round())

    def round(self):
        info, rows = self.look()
        losses = self.losses(info, rows)
        for loss in losses:
            if loss.kind == "rewritten":
                self.generation, self.position = self.generation + 1, 0
                self.name = self.named(self.generation)
                info, rows = self.look()
        entries = entries_of(FORMAT, self.stream.table(rows))
        caught_up = len(rows) < COUNT
        # entries before the end of a loss are gone, unless there is a next batch
        ends = [loss.end for loss in losses if caught_up and loss.kind == "missing"]
        end = max([self.position, *ends, *(offset_of(entry_id) + 1 for entry_id, _ in rows[-1:])])
        counts = {"messages": len(rows), "left_out": len(rows) - len(entries)}
        yield Batch(source=self.name, position=end, columns=entries, losses=losses, caught_up=caught_up, **counts)
        self.position = end

    def look(self):
        """Return what Redis says of the stream, and the next entries, of one moment."""
        with self.stream.asking() as client, client.pipeline(transaction=True) as pipeline:
            pipeline.exists(self.stream.topic)
            pipeline.xrange(self.stream.topic, id_of(self.position), "+", COUNT)
            pipeline.xinfo_stream(self.stream.topic)
            exists, rows, info = pipeline.execute(raise_on_error=False)
        for answer in (rows, info) if exists else ():
            if isinstance(answer, redis.RedisError):
                raise InvalidArgument(f"{self.place}: {answer}")
        return (info, rows) if exists else (None, [])

    def losses(self, info, rows):
        """Return the entries that were deleted unread, or a stream that ends before the last put entry."""
        if info is None or not self.position:
            return ()
        last, deleted = offset_of(info["last-generated-id"]), offset_of(info["max-deleted-entry-id"])
        if last < self.position - 1:
            return (Loss("rewritten", last + 1, self.position, None, "the stream was replaced by a shorter one"),)
        first = offset_of(info["recorded-first-entry-id"]) if info["length"] else last + 1
        begin_ms, why = self.position >> SEQ_BITS, []
        # XTRIM moves the first entry: whether it was the next one is not known
        if first > self.position:
            why.append(Loss("missing", self.position, first, None, "entries may be trimmed unread", begin_ms))
        # XDEL tells the greatest id that it has deleted
        if deleted >= max(self.position, self.deleted, first):
            why.append(Loss("missing", self.position, deleted + 1, None, "entries were deleted unread", begin_ms))
        self.deleted = deleted + 1
        return tuple(why)

    def entries(self, store, begin, end):
        """Yield the entries of a log for the archive."""
        while begin < end:
            with self.stream.asking() as client:
                rows = client.xrange(self.stream.topic, id_of(begin), id_of(end - 1), COUNT)
            begin = end if len(rows) < COUNT else offset_of(rows[-1][0]) + 1
            yield self.stream.table(rows), begin

    def lag(self):
        try:
            info = self.stream.client.xinfo_stream(self.stream.topic)
        except redis.ResponseError:  # there is no such stream yet
            return Lag(self.position, 0, 0.0)
        except redis.RedisError:
            return Lag(self.position, 0, None)
        end = offset_of(info["last-generated-id"]) + 1
        behind_ms = max(end - self.position, 0) / (1 << SEQ_BITS)
        return Lag(end, -int(-behind_ms // 1), behind_ms / 1000)

    def close(self):
        self.stream.close()


@dataclass(frozen=True)
class StreamEntry:
    entry_id: str
    fields: dict

    @classmethod
    def of(cls, row):
        return cls(id_of(row["offset"]), {field["name"]: field["value"] for field in row["fields"]})

    def to_dict(self, body="text", max_body_bytes=1 << 20):
        return {"id": self.entry_id, "fields": {key_text(name): key_text(text) for name, text in self.fields.items()}}


class RedisConnector(ArchivingConnector):
    form, scheme, message_of = FORMAT, SCHEME, StreamEntry.of

    def check(self, run, config):
        with contextlib.closing(Stream(run.address)) as stream, stream.asking() as client:
            client.ping()

    def source(self, run, index):
        source = StreamSource(index, Stream(run.address), run.follow)
        archiver = PutArchiver(index, FORMAT, lambda: [source.name], source.entries)
        return OpenedSource(source, archiver, source.place)

    def place(self, options, address=None):
        return None if address is None else Stream(address)


CONNECTOR = RedisConnector()
