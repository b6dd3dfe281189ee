"""A connector for streams of Redis, as a package of its own has it: a stream is a topic, and an entry a message.

An entry MS-SEQ has the offset MS * 2^20 + SEQ, and its field ``key`` is its key. Needs Redis 7 and the package `redis`.
"""

import contextlib
import re
from dataclasses import dataclass

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tiered_index.connectors.contract import OpenedSource
from tiered_index.connectors.registry import ConnectorSpec
from tiered_index.connectors.source import Batch, Lag, Loss
from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.format.keys.spelling import key_text
from tiered_index.service.read.answers.messages import Fetched

SCHEME = "redis://"
ADDRESS = re.compile(r"redis://([^/:]+):(\d+)/(.+)")
SEQ_BITS = 20
# entries of a batch, and the longest wait for an answer: a source must close within 10 s
COUNT, TIMEOUT_S = 1000, 2
SPEC = ConnectorSpec(
    name="redis",
    title="a stream of Redis",
    open="redis_streams:CONNECTOR",
    claims=lambda address: address.startswith(SCHEME),
)


def offset_of(entry_id):
    ms, seq = map(int, entry_id.decode().split("-"))
    if seq >> SEQ_BITS:
        raise InvalidArgument(f"entry {ms}-{seq}: sequence numbers from {1 << SEQ_BITS:,} on have no offset")
    return ms << SEQ_BITS | seq


def id_of(offset):
    return f"{offset >> SEQ_BITS}-{offset & (1 << SEQ_BITS) - 1}"


def parse(address):
    matched = ADDRESS.fullmatch(address)
    if matched is None:
        raise InvalidArgument(f"{address}: write redis://HOST:PORT/STREAM")
    return matched[1], int(matched[2]), matched[3]


def connect(host, port):
    waits = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
    return redis.Redis(host, port, retry=Retry(NoBackoff(), 0), **waits)


@contextlib.contextmanager
def asking(place):
    try:
        yield
    except redis.RedisError as error:
        raise StorageUnavailable(f"{place}: {error}") from error


class StreamSource:
    unit, offsets = "milliseconds", "offsets"

    def __init__(self, index, address, follow):
        host, port, self.stream = parse(address)
        self.place, self.follow, self.trouble = address, follow, None
        self.client, self.deleted = connect(host, port), 0
        # each stream that replaced an earlier one has positions under a name of its own
        self.name, generation = f"redis:{address}", 0
        while index.durable_position(f"redis:{address}#{generation + 1}") is not None:
            generation += 1
            self.name = f"redis:{address}#{generation}"
        self.generation = generation
        self.position = index.durable_position(self.name) or 0

    def positions(self):
        return {self.name: self.position}

    def batches(self):
        try:
            with asking(self.place):
                yield from self.round()
            self.trouble = None
        except StorageUnavailable as error:
            self.trouble = str(error)
            if not self.follow:
                raise
            yield Batch(source=self.name, position=self.position)

    def round(self):
        info, rows = self.look()
        losses = self.losses(info, rows)
        for loss in losses:
            if loss.kind == "rewritten":
                self.generation, self.position = self.generation + 1, 0
                self.name = f"redis:{self.place}#{self.generation}"
                info, rows = self.look()
        keyed = [(offset_of(entry_id), fields) for entry_id, fields in rows if b"key" in fields]
        columns = {
            "topic": [self.stream] * len(keyed),
            "queue_id": [0] * len(keyed),
            "key": [key_text(fields[b"key"]) for _, fields in keyed],
            "offset": [offset for offset, _ in keyed],
            "size": [sum(map(len, (*fields, *fields.values()))) for _, fields in keyed],
            "timestamp_ms": [offset >> SEQ_BITS for offset, _ in keyed],
        }
        caught_up = len(rows) < COUNT
        # entries before the end of a loss are gone, unless there is a next batch
        ends = [loss.end for loss in losses if caught_up and loss.kind == "missing"]
        end = max([self.position, *ends, *(offset_of(entry_id) + 1 for entry_id, _ in rows[-1:])])
        counts = {"messages": len(rows), "left_out": len(rows) - len(keyed)}
        yield Batch(source=self.name, position=end, columns=columns, losses=losses, caught_up=caught_up, **counts)
        self.position = end

    def look(self):
        """Return what Redis says of the stream, and the next entries, of one moment."""
        with asking(self.place), self.client.pipeline(transaction=True) as pipeline:
            pipeline.exists(self.stream)
            pipeline.xrange(self.stream, id_of(self.position), "+", COUNT)
            pipeline.xinfo_stream(self.stream)
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

    def lag(self):
        try:
            info = self.client.xinfo_stream(self.stream)
        except redis.ResponseError:  # there is no such stream yet
            return Lag(self.position, 0, 0.0)
        except redis.RedisError:
            return Lag(self.position, 0, None)
        end = offset_of(info["last-generated-id"]) + 1
        behind_ms = max(end - self.position, 0) / (1 << SEQ_BITS)
        return Lag(end, -int(-behind_ms // 1), behind_ms / 1000)

    def close(self):
        self.client.close()


@dataclass(frozen=True)
class StreamEntry:
    entry_id: str
    fields: dict

    def to_dict(self, body="text", max_body_bytes=1 << 20):
        return {"id": self.entry_id, "fields": {key_text(name): key_text(text) for name, text in self.fields.items()}}


class StreamMessages:
    def __init__(self, address):
        host, port, self.stream = parse(address)
        self.client, self.place = connect(host, port), address

    def fetch(self, items, topic, key):
        return [self.fetched(item, topic, key) for item in items]

    def fetched(self, item, topic, key):
        if topic != self.stream:
            return Fetched(item=item, state="no_topic", problem=f"{self.place} is not the stream {topic}")
        entry_id = id_of(item.offset)
        try:
            rows = self.client.xrange(self.stream, entry_id, entry_id)
        except redis.RedisError as error:
            return Fetched(item=item, state="unavailable", problem=f"{self.place}: {error}")
        if not rows:
            return Fetched(item=item, state="expired", problem=f"{self.place} has no entry {entry_id} any more")
        carries_key = key_text(rows[0][1].get(b"key", b"")) == key
        entry = StreamEntry(entry_id, rows[0][1])
        return Fetched(item=item, state="local", message=entry, carries_key=carries_key, read_from=self.place)

    def close(self):
        self.client.close()


class RedisConnector:
    def check(self, run, config):
        host, port, _ = parse(run.address)
        with asking(run.address), contextlib.closing(connect(host, port)) as client:
            client.ping()

    def source(self, run, index):
        source = StreamSource(index, run.address, run.follow)
        return OpenedSource(source, None, source.place)

    def watch(self, tell):
        return contextlib.nullcontext(list)

    def place(self, options, address=None):
        return None if address is None else StreamMessages(address)

    def messages(self, places):
        if places.place is None:
            raise InvalidArgument("messages of Redis are read by an address redis://HOST:PORT/STREAM")
        return places.place

    def erasure(self, request, positions):
        raise InvalidArgument("nothing of Redis is archived: delete the entry in the stream")


CONNECTOR = RedisConnector()
