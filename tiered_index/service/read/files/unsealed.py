"""An unsealed file on disk: the flusher appends batches, lookups read it, and a seal ends it.

Disk space is allocated in steps, before entries are written there; the rest of the file is a hole. So a small index is
small, and a full disk is noticed before an entry is accepted. An append writes the entries (pwrite), fdatasync, the
journal record, fdatasync. Then the batch is visible. After an error the file accepts no more entries: the kernel may
have dropped data of a failed sync, although it still shows them. Threads: one writer (`append`, `seal`, `close`), and
any number of searches. The map is read-only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.base.kernels import compiled_views, crc32
from tiered_index.errors import CorruptFile
from tiered_index.format.compacted import filter_of
from tiered_index.format.journal import BatchRecord, Journal, encode_batch, encode_open, encode_seal
from tiered_index.format.keys.hashing import HASH_RULES
from tiered_index.format.layout import Layout, read_header
from tiered_index.format.names import UNSEALED
from tiered_index.format.schema import row_form
from tiered_index.format.topic_documents import NO_DOCUMENTS, Documents, newest_documents
from tiered_index.format.unsealed import UnsealedTable, entries_view, walk_chains
from tiered_index.service.log.records import max_positions
from tiered_index.service.read.answers.batch import LookupBatch
from tiered_index.service.read.files.hot_rows import HotRows
from tiered_index.service.read.files.snapshot import label_of, unmap
from tiered_index.service.root import Deletions, Root, disk_error
from tiered_index.storage.disk import map_file, taken_bytes

Array = npt.NDArray[Any]
# for a longer chain the hash column is scanned, whose cost is bounded by the file's size
_CHAIN_LIMIT = 256
_VERIFY_CHUNK = 1 << 24
_log = logging.getLogger(__name__)


STEP_BYTES = 8 << 20
"""Bytes of a file that are allocated at a time."""


def _steps(layout: Layout, size_bytes: int) -> int:
    """Return `size_bytes` rounded up to whole steps, at most the size of the file."""
    return min(layout.unsealed_size, -(-size_bytes // STEP_BYTES) * STEP_BYTES)


def first_bytes(layout: Layout) -> int:
    """Return the bytes that are allocated before a file is created: header, slot table and the first entries."""
    return _steps(layout, layout.entry_position(2))


def entries_ahead(layout: Layout) -> int:
    """Return the number of entries for which space is allocated ahead: few, so that one entry needs only one step."""
    return STEP_BYTES // 32 // layout.schema.entry.itemsize


class Reserve:
    """Allocated disk space for the beginning of the next file, under a temporary name."""

    def __init__(self, root: Root, layout: Layout) -> None:
        self.path = root.temporary()
        self._disk = root.disk
        self.descriptor = self._disk.create(self.path)
        with contextlib.ExitStack() as undo:
            undo.callback(self.discard)
            self._disk.allocate(self.descriptor, first_bytes(layout))
            if first_bytes(layout) < layout.unsealed_size:
                # the rest is a hole, because readers expect the full size
                self._disk.truncate(self.descriptor, layout.unsealed_size)
            undo.pop_all()

    def discard(self) -> None:
        """Close and delete the file."""
        self._disk.close(self.descriptor)
        with contextlib.suppress(OSError):
            self._disk.unlink(self.path)

    def abandon(self) -> None:
        """Close the descriptor and leave the file."""
        self._disk.close(self.descriptor)


SHOWN_EVERY_MS = 10_000
"""Longest delay of header and slot table of a file of preset rocketmq behind its entries, without the flush."""


class UnsealedEntries(HotRows):
    """The durable entries of an unsealed file, by its `journal`. A search follows the chains of its `table`.

    `sequence` orders the files of a root by creation. `lane` is ``main`` or ``quarantine``.
    """

    place = UNSEALED
    """Whether a job compacted it: the storage has it, or a table into which it was merged."""

    def __init__(self, path: Path, journal: Journal, table: UnsealedTable, mapped: mmap.mmap) -> None:
        self.path = path
        self.journal = journal
        self.table = table
        self.layout, self.schema, self.where = journal.layout, journal.layout.schema, str(path)
        self.hash = journal.layout.hash
        self.file_id = journal.file_id
        self.lane = journal.lane
        self.sequence = journal.sequence
        self.sealed = journal.sealed
        self._ids: dict[str, frozenset[int]] = {}
        for topic_id, name in journal.topics.items():
            self._name(topic_id, name)
        self._begin_s = journal.begin_ms // 1000
        # the smallest and the greatest second of the entries
        self.second_min, self.second_max = journal.seconds or (self._begin_s, self._begin_s)
        self._map = mapped
        self._in_core: Any = None

    @property
    def count(self) -> int:
        """The number of durable entries."""
        return self.journal.count

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, with the journal."""
        try:
            return taken_bytes(self.path.stat()) + self.journal.valid_length
        except OSError:
            return self.layout.unsealed_size + self.journal.valid_length

    def let_go(self) -> None:
        """Close the map, when no search uses the file. Idempotent."""
        self._in_core = None
        unmap(self._map)

    def entries(self) -> Array:
        """Return the durable entries (structured, in the map), each batch verified against its journal record."""
        journal = replace(self.journal, batches=list(self.journal.batches))
        return verified_entries(self._map, journal, str(self.path))

    def snapshot(self) -> tuple[Array, int, dict[int, str]]:
        """Return the `entries` so far, the second to which their times are relative, and the topic names by id."""
        entries = self.entries()  # first, because more names are harmless
        return entries, self._begin_s, dict(self.journal.topics)

    @property
    def known_topics(self) -> Collection[str]:
        """The names of the file's topics."""
        return self._ids

    def _put_in_core(self) -> None:
        """Let the compiled core search the file. Its map has the whole file."""
        if (core := compiled_views()) is not None:
            layout, rule = self.layout, HASH_RULES.index(self.hash)
            made = core.LocalFile(row_form(layout.schema), self._map, self._ids, rule, self._begin_s, layout.slots)
            self._in_core = made.with_chains(self.table.heads, layout.items_position, layout.items)
            if self.table.count:
                self._append_in_core(1, self.seconds_of(entries_view(self._map, layout, self.table.count)))

    def _append_in_core(self, first: int, seconds: npt.NDArray[np.int64]) -> None:
        """Tell the core the seconds of entries from number `first` on, before they are in the table."""
        if self._in_core is not None:
            self._in_core.within(self.second_min, self.second_max)
            self._in_core.appended(first, seconds)

    def in_core(self) -> Any:
        """Return the compiled core's `LocalFile` of this file, which gets later entries, too; None: no core."""
        return self._in_core if compiled_views() is not None else None

    def walked(self, batch: LookupBatch) -> tuple[Array, npt.NDArray[np.int64]] | None:
        """See `HotRows.walked`."""
        layout, wanted = self.layout, batch.overlapping(self.second_min, self.second_max)
        walked = walk_chains(self._map, layout, self.table.heads, batch.key_hash, wanted, _CHAIN_LIMIT)
        if walked is None:
            return None
        return np.frombuffer(self._map, layout.schema.entry, layout.items, layout.items_position)[walked[0]], walked[1]

    def columns(self) -> Array:
        """Return the entries that a search scans. They were verified before they came into the table."""
        return entries_view(self._map, self.layout, self.table.count)

    def topic_pairs(self, topics: Iterable[str] | None = None) -> list[tuple[int, str]]:
        """Return the ids and names of all topics of the file."""
        # a copy, because another thread may add a topic
        return list(self.journal.topics.items())

    def _name(self, topic_id: int, name: str) -> None:
        self.journal.topics[topic_id] = name
        self._ids[name] = self._ids.get(name, frozenset()) | {topic_id}

    def seconds_of(self, entries: Any) -> npt.NDArray[np.int64]:
        """Return the epoch seconds of entries."""
        seconds: npt.NDArray[np.int64] = self._begin_s + entries["time_diff_s"].astype(np.int64)
        return seconds


class UnsealedFile(UnsealedEntries):
    """An unsealed file of a writer, which also writes its `journal`."""

    def __init__(
        self, root: Root, journal: Journal, table: UnsealedTable, descriptor: int, journal_descriptor: int
    ) -> None:
        mapped = map_file(descriptor, root.path, journal.layout.unsealed_size)
        super().__init__(root.index_path(UNSEALED, journal.file_id), journal, table, mapped)
        self._root = root
        self._disk = root.disk
        self.journal_path = root.journal_path(self.file_id)
        self.label = label_of(self)
        self.failed = False  # an append or a seal was not completed.
        self._is_blank = not journal.batches  # the journal has only its first record.
        self._shown: tuple[int, int] | None = None  # entries in header and slot table on disk, and their time, ms
        self._descriptor: int | None = descriptor
        # the known end of allocated disk space; allocating more than once is harmless
        self._allocated = self.layout.entry_position(journal.count + 1)
        self._journal_descriptor: int | None = journal_descriptor
        # the filter of the keys, after the file is sealed
        self.filter_bytes = b""
        self._put_in_core()

    @classmethod
    def begin(cls, root: Root, reserve: Reserve, journal: Journal) -> UnsealedFile:
        """Make a file of reserved space: write header and journal, then rename both, the journal first."""
        disk, file_id = root.disk, journal.file_id
        table = UnsealedTable(journal.layout, journal.begin_ms)
        record = encode_open(journal)
        journal.valid_length = len(record)
        temporary = root.temporary()
        journal_descriptor = disk.create(temporary)
        try:
            disk.pwrite(journal_descriptor, record, 0)
            disk.sync(journal_descriptor)
            disk.pwrite(reserve.descriptor, table.header().pack(), 0)
            disk.sync(reserve.descriptor)
            disk.rename(temporary, root.journal_path(file_id))
            disk.rename(reserve.path, root.index_path(UNSEALED, file_id))
            disk.sync_folder(root.folder(UNSEALED))
            file = cls(root, journal, table, reserve.descriptor, journal_descriptor)
            file._allocated = first_bytes(journal.layout)
            return file
        except BaseException:  # also for an interrupt, because an incomplete file must not look like a file
            disk.close(journal_descriptor)
            for path in (temporary, root.index_path(UNSEALED, file_id), root.journal_path(file_id)):
                with contextlib.suppress(OSError):  # the next start deletes the rest
                    disk.unlink(path)
            raise

    @classmethod
    def recover(cls, root: Root, journal: Journal, data: bytes) -> UnsealedFile:
        """Verify an existing file, rebuild its chains, and make its journal (`data`) durable."""
        path = root.index_path(UNSEALED, journal.file_id)
        with contextlib.ExitStack() as undo:
            descriptor = root.disk.open_rw(path)
            undo.callback(root.disk.close, descriptor)
            mapped = map_file(descriptor, root.path)
            try:
                entries = verified_entries(mapped, journal, str(path))
                table = UnsealedTable(journal.layout, journal.begin_ms)
                table.load(entries, journal.end_ms)
                del entries
            finally:
                unmap(mapped)
            journal_descriptor = root.disk.open_rw(root.journal_path(journal.file_id))
            undo.callback(root.disk.close, journal_descriptor)
            file = cls(root, journal, table, descriptor, journal_descriptor)
            # cut off a torn record, so that it can't look like damage before the next record
            root.disk.truncate(journal_descriptor, journal.valid_length)
            # Write the journal again: after a failed sync its last record may be only in the page cache, where a later
            # sync does not write it. Earlier records, and all entries, were synced before that record was written.
            root.disk.pwrite(journal_descriptor, data[: journal.valid_length], 0)
            root.disk.sync(journal_descriptor)
            undo.pop_all()
        if file.sealed:
            file.release()
        return file

    @property
    def accepts(self) -> bool:
        """Whether `append` may be called."""
        return self._descriptor is not None and not self.sealed and not self.failed and self.table.free > 0

    @property
    def ended(self) -> bool:
        """Whether the journal durably has the seal, so that the file can't accept entries after a restart."""
        return self.sealed and not self.failed

    def lacking(self, count: int) -> int:
        """Return the bytes to `allocate` before `count` more entries are appended."""
        wanted = self.layout.entry_position(self.table.count + 1 + min(count, self.table.free))
        return max(0, _steps(self.layout, wanted) - self._allocated) if wanted > self._allocated else 0

    def allocate(self, size_bytes: int) -> None:
        """Allocate `size_bytes` more. Raises `OSError`; the file is then unchanged."""
        assert self._descriptor is not None
        self._disk.allocate(self._descriptor, size_bytes, self._allocated)
        self._allocated += size_bytes

    def append(
        self,
        columns: Mapping[str, Array],
        names: Iterable[tuple[int, str]],
        positions: dict[str, int],
        interval: tuple[int, int] | None = None,
        documents: Documents = NO_DOCUMENTS,
    ) -> None:
        """Make a batch durable and visible. Space must be allocated (`lacking`).

        `columns` (native order, n rows that fit) have whole seconds. `names` are the (id, name) pairs of its topics.
        `interval` is the smallest and the greatest second, if known. `positions` and `documents` become durable with
        it. Raises `OSError`. After any error the file accepts no more entries.
        """
        seconds = columns["second"]
        fresh = [(topic_id, name) for topic_id, name in names if topic_id not in self.journal.topics]
        batch = self.table.prepare(columns["key_hash"], seconds, columns, 1000)
        assert self._descriptor is not None and self._journal_descriptor is not None
        low, high = interval or ((int(seconds.min()), int(seconds.max())) if len(seconds) else (0, 0))
        self.failed = True  # until the last line
        crc, at = 0, self.layout.entry_position(batch.first)
        for piece in batch.pieces():
            crc = crc32(piece, crc)
            self._disk.pwrite(self._descriptor, piece, at)
            at += len(piece)
        if len(batch):
            self._disk.sync(self._descriptor)
        record = BatchRecord(batch.first, len(batch), crc, low, high, batch.end_ms)
        log = encode_batch(record, positions, fresh, documents)
        self._is_blank = False
        self._disk.pwrite(self._journal_descriptor, log, self.journal.valid_length)
        self._disk.sync(self._journal_descriptor)
        for path, descriptor in ((self.journal_path, self._journal_descriptor), (self.path, self._descriptor)):
            # a stat of the path raises for a deleted file
            if not os.path.samestat(path.stat(), os.fstat(descriptor)):
                raise FileNotFoundError(errno.ENOENT, "another file replaced it while it was written", str(path))
        # in this order, an interrupt leaves only topics and seconds that are too wide, which is harmless
        for topic_id, name in fresh:
            self._name(topic_id, name)
        if len(batch):
            if self.table.count:
                low, high = min(low, self.second_min), max(high, self.second_max)
            self.second_min, self.second_max = low, high
            self.label.second_min, self.label.second_max = low, high
            # a column of one row is contiguous, but not aligned
            self._append_in_core(batch.first, np.require(seconds, np.int64, ["C", "A"]))
        self.table.commit(batch)
        self.journal.valid_length += len(log)  # before the next line, because `_cut` must keep the records in memory
        self.journal.batches.append(record)
        self.journal.positions = max_positions(self.journal.positions, positions)
        self.journal.documents = newest_documents(self.journal.documents, documents)
        self.failed = False

    def seal(self) -> None:
        """End the file: write header, slot table and the seal, and close the descriptors. Idempotent."""
        if self.sealed:
            return
        is_whole, self.failed = self._descriptor is not None and not self.failed, True
        try:
            if is_whole:
                assert self._journal_descriptor is not None
                record = encode_seal()
                self._write_table()
                self._disk.pwrite(self._journal_descriptor, record, self.journal.valid_length)
                self._disk.sync(self._journal_descriptor)
                self.journal.valid_length += len(record)
            else:
                self._cut()
        except OSError as error:
            raise disk_error(error, f"sealing {self.path}") from error
        finally:
            # a sealed file is only read through its map, and there may be thousands
            self.release()
            # last, because the life cycle may then compact the file
            self.sealed = True
        self.failed = not is_whole

    def _cut(self) -> None:
        """Replace the journal by its whole records: that of a failed append has entries that are not published with it.

        Best effort: without it a restart may refuse the root. The old journal is not synced again: its sync failed. If
        the disk has no room for another journal, the old one is cut, which a power cut may undo.
        """
        try:
            if self._journal_descriptor is not None:
                data = self.journal_path.read_bytes()
                is_own = os.path.samestat(self.journal_path.stat(), os.fstat(self._journal_descriptor))
                if is_own and len(data) > self.journal.valid_length:
                    try:
                        _rewrite(self._root, self.journal_path, data[: self.journal.valid_length])
                    except OSError:
                        self._disk.truncate(self._journal_descriptor, self.journal.valid_length)
        except OSError as error:
            _log.warning("%s may have the record of an append that failed: %s", self.journal_path, error)

    def show(self, now_ms: int) -> None:
        """Write header and slot table, without a sync, for RocketMQ, which does not read the journal.

        It does so only if there are new entries, and at most every `SHOWN_EVERY_MS`. Raises `OSError`.
        """
        if not self.accepts or (self._shown is not None and self._shown[0] == self.table.count):
            return
        if self._shown is None or abs(now_ms - self._shown[1]) >= SHOWN_EVERY_MS:
            self._put_table()
            self._shown = (self.table.count, now_ms)

    def _write_table(self) -> None:
        self._put_table()
        assert self._descriptor is not None
        self._disk.sync(self._descriptor)

    def _put_table(self) -> None:
        # the header first: a reader ignores a head beyond the header's count, and would lose the whole chain
        assert self._descriptor is not None
        header = self.table.header().pack()
        self._disk.pwrite(self._descriptor, header, 0)
        at = len(header)
        for piece in self.table.slot_pieces():
            self._disk.pwrite(self._descriptor, piece, at)
            at += len(piece)

    def close(self) -> None:
        """Write header and slot table of an unsealed file, and close the descriptors. It can still be read."""
        if self._descriptor is None:
            return
        try:
            if not self.sealed and not self.failed:
                self._write_table()
        except OSError as error:
            raise disk_error(error, f"closing {self.path}") from error
        finally:
            self.release()

    def release(self) -> None:
        """Close the descriptors and write nothing, as a crash would."""
        descriptors = (self._descriptor, self._journal_descriptor)
        self._descriptor = self._journal_descriptor = None
        for descriptor in descriptors:
            if descriptor is not None:
                self._disk.close(descriptor)

    def let_go(self) -> None:
        """Close the descriptors and the map, when no search uses the file. Idempotent."""
        self.release()
        super().let_go()

    def discard(self, deletions: Deletions) -> None:
        """Close and delete a file without durable entries, whose positions are also in another file. Idempotent."""
        self.let_go()
        if self._is_blank:
            deletions.unlink([self.path, self.journal_path])
            return
        drop_unbegun(self._root, self.file_id, encode_open(self.journal), deletions)

    def make_filter(self) -> None:
        """Make the filter of a sealed file, so that lookups skip chains. Raises `CorruptFile`.

        The compacted file has the same filter.
        """
        if self._in_core is not None and self.sealed and self.count and not self.filter_bytes:
            self.filter_bytes = filter_of(self.entries(), self.layout.schema)
            self._in_core.with_filter(self.filter_bytes)


def drop_unbegun(root: Root, file_id: str, begun: bytes, deletions: Deletions) -> None:
    """Delete a file whose entries, if any, are also in another file. `begun` is the first record of its journal.

    First that record durably replaces the journal: the journal may end in a record whose sync failed, and which would
    look like damage without its entries. If that fails, the file is kept.
    """
    path, journal_path = root.index_path(UNSEALED, file_id), root.journal_path(file_id)
    try:
        if journal_path.exists():
            _rewrite(root, journal_path, begun)
    except OSError as error:
        _log.warning("cannot delete the empty file %s now: %s", path, error)
        return
    deletions.unlink([path, journal_path])


def _rewrite(root: Root, journal_path: Path, data: bytes) -> None:
    """Durably replace a journal. Raises `OSError`."""
    temporary = root.temporary()
    try:
        root.disk.write_file(temporary, [data])
        root.disk.publish(temporary, journal_path)
    except OSError:
        with contextlib.suppress(OSError):
            root.disk.unlink(temporary)
        raise


def verified_entries(data: Any, journal: Journal, file: str, *, first_batch: int = 0) -> Array:
    """Return entries 1..count in `data`, verified by batch from `first_batch` on.

    Raises `CorruptFile` naming the batch's position.
    """
    layout = journal.layout
    header = read_header(data[:28], file)
    if header.begin_ms != journal.begin_ms or header.magic not in (layout.preset.begin_magic, layout.preset.end_magic):
        raise CorruptFile(
            file, "header contradicts the journal", offset=0, expected=journal.begin_ms, found=header.begin_ms
        )
    if len(data) < layout.entry_position(journal.count + 1):
        raise CorruptFile(
            file, "shorter than its journal says", expected=layout.entry_position(journal.count + 1), found=len(data)
        )
    view = memoryview(data)
    try:
        for batch in journal.batches[first_batch:]:
            start, stop = layout.entry_position(batch.first), layout.entry_position(batch.first + batch.count)
            crc = 0
            for at in range(start, stop, _VERIFY_CHUNK):
                crc = crc32(view[at : min(at + _VERIFY_CHUNK, stop)], crc)
            problem = f"entries {batch.first}..{batch.first + batch.count - 1} do not match their CRC32"
            CorruptFile.unless_equal(file, problem, batch.crc32, crc, offset=start)
    finally:
        view.release()
    return entries_view(data, layout, journal.count)
