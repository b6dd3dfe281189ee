"""Writes a store as a broker does, for tests, demos and benchmarks.

A store has segments with blank tails, consume queues (`QueueWriter`, files of a fixed size filled with zeros),
checkpoint and classic index. For the same messages, hosts and times, the bytes equal the broker's. `put` collects in
memory. `flush` writes the commit log before the consume queues, so that a concurrent reader finds every message that a
queue names. Nothing is synced: this is no broker. One thread uses a writer.
"""

import contextlib
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tests.support.classic_writer import ClassicIndex, ClassicIndexFile, load_classic_index
from tests.support.stored_messages import format_properties, message_size
from tiered_index.base.clock import Clock, SystemClock
from tiered_index.connectors.rocketmq.classic import Geometry
from tiered_index.connectors.rocketmq.log import layout
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import KEYS, TAGS, UNIQ_KEY, Host
from tiered_index.connectors.rocketmq.log.message import Message, body_crc, problem_of_values
from tiered_index.connectors.rocketmq.log.segments import segment_name
from tiered_index.connectors.rocketmq.log.store import ENTRY_BYTES, StoreDirectory
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.keys.hashing import java_string_hash
from tiered_index.storage.disk import Disk

CHECKPOINT_BYTES = 4_096
ENTRIES_PER_FILE = 300_000
_DELAY_LEVELS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)

# The bytes of one entry: commit log offset, size and tags code.
pack_entry = struct.Struct(">qiq").pack


def tags_code(topic: str, properties: Mapping[str, str], store_ms: int) -> int:
    """Return the consume queue's tags code: the hash of the tags, or the delivery time (ms) of a delayed message."""
    level = properties.get("DELAY", "")
    if topic == "SCHEDULE_TOPIC_XXXX" and level.isdecimal() and int(level) > 0:
        return store_ms + 1000 * _DELAY_LEVELS_S[min(int(level), len(_DELAY_LEVELS_S)) - 1]
    return java_string_hash(properties.get(TAGS, ""))


def checkpoint_bytes(*numbers: int) -> bytes:
    """Return a checkpoint: the times (ms) up to which log, queues and index are flushed, and two offsets."""
    return struct.pack(">5q", *numbers, *[0] * (5 - len(numbers))).ljust(CHECKPOINT_BYTES, b"\0")


def open_sized(disk: Disk, path: Path, size_bytes: int) -> int:
    """Open a file for writing, and make it with `size_bytes` if it is missing; return its descriptor."""
    try:
        descriptor = disk.create(path)
    except FileExistsError:
        return disk.open_rw(path)
    disk.truncate(descriptor, size_bytes)
    return descriptor


def write_sized(disk: Disk, path: Path, size_bytes: int, data: bytes | bytearray, position: int = 0) -> None:
    """Write `data` at a position of a file that `open_sized` opens."""
    descriptor = open_sized(disk, path, size_bytes)
    try:
        disk.pwrite(descriptor, data, position)
    finally:
        disk.close(descriptor)


@dataclass(slots=True)
class QueueWriter:
    """The queue in `folder`, with `entries_per_file` entries per file."""

    folder: Path
    entries_per_file: int
    disk: Disk
    # The queue offset of the next entry.
    next: int = 0
    pending: list[bytes] = field(default_factory=list)

    def append(self, offset: int, size: int, code: int) -> None:
        """Add an entry; `flush` writes it."""
        self.pending.append(pack_entry(offset, size, code))
        self.next += 1

    def flush(self) -> None:
        """Write the added entries. After an `OSError` of the disk, the next call writes the rest."""
        if self.pending:
            self.folder.mkdir(parents=True, exist_ok=True)
        file_bytes = self.entries_per_file * ENTRY_BYTES
        while self.pending:
            entry = self.next - len(self.pending)
            place = entry % self.entries_per_file
            part = self.pending[: self.entries_per_file - place]
            path = self.folder / segment_name(entry // self.entries_per_file * file_bytes)
            write_sized(self.disk, path, file_bytes, b"".join(part), place * ENTRY_BYTES)
            del self.pending[: len(part)]


_HIDDEN = (layout.TRANSACTION_PREPARED, layout.TRANSACTION_ROLLBACK)
_FLUSH_BYTES = 1 << 23
_LOCALHOST = Host("127.0.0.1", 10911)


class Put(NamedTuple):
    """The place of a message: commit log offset, size in bytes, and its place in its queue."""

    offset: int
    size: int
    queue_offset: int


def index_name_of(now_ms: int) -> str:
    """Return an index file's name for its creation time, yyyyMMddHHmmssSSS (UTC; the broker uses its time zone)."""
    born = datetime.fromtimestamp(now_ms // 1000, UTC)
    return f"{born:%Y%m%d%H%M%S}{now_ms % 1000:03d}"


class StoreWriter:
    """Appends messages to the store in `root`. It makes a missing store, and recovers an existing one.

    `segment_bytes` and `queue_entries` are the sizes of files. With `index`, it keeps a classic index of that geometry
    in memory, and `flush` writes it; use it for small ones. Recovery cuts off a torn tail, and writes queues again from
    the whole commit log. With `cut`, it cuts at that offset at the latest, and only moves the place of the next write,
    as brokers do. Later bytes stay until they are overwritten (RocketMQ's `MappedFileQueue.truncateDirtyFiles`). Raises
    `InvalidArgument` for values that don't fit, and `OSError` as the disk does.
    """

    def __init__(
        self,
        root: Path,
        *,
        segment_bytes: int = 1 << 30,
        queue_entries: int = ENTRIES_PER_FILE,
        index: Geometry | None = None,
        index_name: Callable[[], str] | None = None,
        store_host: Host = _LOCALHOST,
        clock: Clock | None = None,
        disk: Disk | None = None,
        cut: int | None = None,
    ) -> None:
        if segment_bytes < 256 or queue_entries < 1:
            raise InvalidArgument("a segment has at least 256 bytes and a queue's file at least one entry")
        self.root, self.store_host = root, store_host
        self.segment_bytes, self.queue_entries = segment_bytes, queue_entries
        self._clock = clock or SystemClock()
        self._disk = disk or Disk()
        self._queues: dict[tuple[str, int], QueueWriter] = {}
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._descriptor: int | None = None
        self._written = 0
        self._offset = 0
        self._last_ms = 0
        self._index: ClassicIndex | None = None
        self._dirty: dict[str, ClassicIndexFile] = {}
        root.mkdir(parents=True, exist_ok=True)
        for name in ("commitlog", "consumequeue", *(["index"] if index else [])):
            self._disk.make_folder(root / name)
        if index:
            old = load_classic_index(root / "index", index)
            files = [ClassicIndexFile(bytearray(file.data), index, file=Path(file.file).name) for file in old.files]
            self._index = ClassicIndex(index, files, index_name or self._new_index_name)
        self._recover(cut)
        (root / "abort").touch()

    @property
    def next_offset(self) -> int:
        """The commit log offset after the last message."""
        return self._offset

    def put(
        self,
        topic: str,
        queue_id: int,
        body: bytes = b"",
        *,
        keys: str | Iterable[str] = (),
        tags: str | None = None,
        uniq_key: str | None = None,
        properties: str | Mapping[str, str] | None = None,
        sys_flag: int = 0,
        flag: int = 0,
        born_ms: int | None = None,
        born_host: Host = _LOCALHOST,
        store_ms: int | None = None,
        store_host: Host | None = None,
        reconsume_times: int = 0,
        prepared_offset: int = 0,
    ) -> Put:
        """Append one message and return its place; `flush` makes it visible.

        `keys` are joined by spaces (text is taken as it is). Text in `properties` is stored unchanged; `keys`, `tags`
        and `uniq_key` must then be left out. `body` is stored unchanged; if `sys_flag` says so, it must be compressed
        (`compress` gives both). Times are epoch milliseconds, now by default. If it raises `InvalidArgument`, nothing
        is appended.
        """
        if isinstance(properties, str):
            if keys or tags or uniq_key:
                raise InvalidArgument("properties given as text already say keys, tags and unique key")
            text, named = properties, layout.parse_properties(properties)
        else:
            joined = keys if isinstance(keys, str) else " ".join(keys)
            all_properties = ((KEYS, joined), (UNIQ_KEY, uniq_key), *(properties or {}).items(), (TAGS, tags))
            named = {name: value for name, value in all_properties if value}
            text = format_properties(named)
        store_ms = self._clock.now_ms() if store_ms is None else store_ms
        if problem := problem_of_values(topic, queue_id, store_ms):
            raise InvalidArgument(problem)
        if "/" in topic or "\0" in topic or topic in (".", ".."):
            raise InvalidArgument(f"topic {topic!r} can't name a folder of consume queues")
        store_host = store_host or self.store_host
        sys_flag &= ~(layout.BORN_V6 | layout.STORE_V6)
        sys_flag |= layout.BORN_V6 if len(layout.pack_host(born_host)) > 8 else 0
        sys_flag |= layout.STORE_V6 if len(layout.pack_host(store_host)) > 8 else 0
        topic_bytes, stored = len(topic.encode()), text.encode()
        magic = layout.MAGIC_V1 if topic_bytes <= layout.MAX_TOPIC_V1_BYTES else layout.MAGIC_V2
        size = message_size(sys_flag, magic, topic_bytes, len(body), len(stored))
        self._make_room(size)
        hidden = sys_flag & layout.TRANSACTION_MASK in _HIDDEN
        message = Message(
            topic=topic,
            queue_id=queue_id,
            queue_offset=0 if hidden else self._queue(topic, queue_id).next,
            physical_offset=self._offset,
            size=size,
            magic=magic,
            body_crc=body_crc(body),
            flag=flag,
            sys_flag=sys_flag,
            born_ms=store_ms if born_ms is None else born_ms,
            born_host=born_host,
            store_ms=store_ms,
            store_host=store_host,
            reconsume_times=reconsume_times,
            prepared_offset=prepared_offset,
            raw_body=body,
            raw_properties=stored,
        )
        self._pending.append(message.encode())
        self._pending_bytes += size
        self._offset += size
        self._dispatch(message, named)
        self._index_keys(message, named)
        if self._pending_bytes >= _FLUSH_BYTES:
            self._write_segment()
        return Put(message.physical_offset, size, message.queue_offset)

    def flush(self) -> None:
        """Write the put messages: commit log, then consume queues, then changed index files."""
        self._write_segment()
        for queue in self._queues.values():
            queue.flush()
        for name, file in self._dirty.items():
            write_sized(self._disk, self.root / "index" / name, len(file.data), file.data)
        self._dirty.clear()

    def close(self, checkpoint: bytes | None = None) -> None:
        """Flush, write the checkpoint (default: of the store's contents), and remove the mark of an unclean end."""
        self.flush()
        if self._descriptor is not None:
            self._disk.close(self._descriptor)
            self._descriptor = None
        full = [file.header.end_ms for file in self._index.files if file.is_full] if self._index else []
        checkpoint = checkpoint or checkpoint_bytes(self._last_ms, self._last_ms, max(full, default=0))
        write_sized(self._disk, self.root / "checkpoint", CHECKPOINT_BYTES, checkpoint)
        self._disk.unlink(self.root / "abort")

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # segments

    def _make_room(self, size: int) -> None:
        """End the segment with a blank if the message, with a blank after it, doesn't fit."""
        if size + layout.BLANK_BYTES > self.segment_bytes:
            raise InvalidArgument(f"a message of {size:,} bytes doesn't fit a segment of {self.segment_bytes:,}")
        left = self.segment_bytes - self._offset % self.segment_bytes
        if size + layout.BLANK_BYTES > left:
            self._pending.append(left.to_bytes(4, "big") + layout.BLANK.to_bytes(4, "big"))
            self._write_segment()
            if self._descriptor is not None:
                self._disk.close(self._descriptor)
            self._descriptor, self._written = None, 0
            self._offset += left

    def _write_segment(self) -> None:
        if not self._pending:
            return
        data = b"".join(self._pending)
        if self._descriptor is None:
            start = self._offset // self.segment_bytes * self.segment_bytes
            self._descriptor = open_sized(self._disk, self.root / "commitlog" / segment_name(start), self.segment_bytes)
        self._disk.pwrite(self._descriptor, data, self._written)
        self._written += len(data)
        self._pending.clear()
        self._pending_bytes = 0

    # consequences of a message

    def _queue(self, topic: str, queue_id: int) -> QueueWriter:
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            folder = self.root / "consumequeue" / topic / str(queue_id)
            queue = self._queues[topic, queue_id] = QueueWriter(folder, self.queue_entries, self._disk)
        return queue

    def _dispatch(self, message: Message, named: Mapping[str, str]) -> None:
        """Record a message, with its properties `named`, in its queue."""
        queue = self._queue(message.topic, message.queue_id)
        self._last_ms = max(self._last_ms, message.store_ms)
        if message.is_visible:
            queue.append(message.physical_offset, message.size, tags_code(message.topic, named, message.store_ms))

    def _index_keys(self, message: Message, named: Mapping[str, str]) -> None:
        if self._index is None:
            return
        known = len(self._index.files)
        keys, place = named.get(KEYS, ""), (message.physical_offset, message.store_ms)
        self._index.put(message.topic, named.get(UNIQ_KEY), keys, *place, message.sys_flag)
        for file in self._index.files[max(known - 1, 0) :]:
            self._dirty[file.file] = file

    def _new_index_name(self) -> str:
        """Return a name after all others. Files fill faster here than a millisecond clock ticks."""
        newest = self._index.files[-1].file if self._index and self._index.files else ""
        now_ms = self._clock.now_ms()
        while (name := index_name_of(now_ms)) <= newest:
            now_ms += 1
        return name

    # after a crash

    def _recover(self, cut: int | None) -> None:
        reader = CommitLogReader(self.root / "commitlog")
        segments = reader.segments()
        if not segments:
            return
        self._offset = segments[0].start
        with contextlib.suppress(CorruptFile):  # a broker, too, cuts its log at the first message that it can't read
            for message in reader.messages(closed=StoreDirectory.open(self.root).is_closed):
                if cut is not None and message.physical_offset >= cut:
                    break
                self._again(message)
                self._offset = message.physical_offset + message.size
        segment = next((s for s in segments if s.start <= self._offset < s.end), None)
        for later in segments:
            if later.start > self._offset:
                self._disk.unlink(later.path)
        if segment is None:
            return
        self._written = self._offset - segment.start
        self._descriptor = self._disk.open_rw(segment.path)
        if cut is None:
            self._disk.truncate(self._descriptor, self._written)
        self._disk.truncate(self._descriptor, self.segment_bytes)

    def _again(self, message: Message) -> None:
        queue = self._queue(message.topic, message.queue_id)
        if message.is_visible and not queue.pending:
            queue.next = message.queue_offset
        named = message.properties
        self._dispatch(message, named)
        files = self._index.files if self._index else []
        # an index file is written with all keys of a message, or none
        if not files or message.physical_offset > files[-1].header.end_offset:
            self._index_keys(message, named)
