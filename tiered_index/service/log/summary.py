"""The summary: directories and filters of many stored files in one object, which saves readers a request per file.

It is a cache beside the checkpoints, and always valid, because objects never change under a name. A missing or damaged
summary only costs requests. The process that appends a record renews it if it lacks enough objects, or has a removed
object. So no filter keeps erased keys. SPEC.md section 9.

Threads: the log serialises renewals of one process; `decode` and `encode` are pure.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiered_index.documents import COUNT, checked, load, rows_of, text
from tiered_index.errors import CorruptFile, DiskFull, InvalidArgument, ObjectNotFound, StorageError
from tiered_index.format.names import CHECKPOINT_PREFIX, checkpoint_name, is_summary, summary_name
from tiered_index.kernels import crc32
from tiered_index.service.log.records import StoredObject, verified_trailer
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import ObjectInfo, Storage
from tiered_index.storage.pools import each

EAGER_BYTES = 1 << 20
"""Largest summary that is read together with the checkpoint."""
# most objects that a summary may lack; each costs a reader one request
_LACKING = 8
# most objects that one append reads, and how many of them one thread reads
_MOST_READ, _READ_BY_ONE = 1_000, 8
_THREADS = 16
_MOST_BYTES = 16 << 20
# larger filters are left out, and so are objects with a larger directory
_FILTER_BYTES = 256 << 10
_DIRECTORY_BYTES = 512 << 10
_MAGIC = b"TIDXSUM1"
_HEAD = struct.Struct(">8sI")
_CRC = struct.Struct(">I")
_log = logging.getLogger(__name__)

_INDEX = rows_of(text(), COUNT, COUNT)

Part = tuple[int, bytes | memoryview]
"""The last bytes of an object, and their position in it: the begin of its filter or directory."""


class Index(NamedTuple):
    """The index of a summary: its bytes, and their meaning."""

    data: bytes
    rows: Sequence[tuple[str, int, int]]

    @classmethod
    def of(cls, parts: Mapping[str, Part]) -> Index:
        """Return the index of these parts."""
        rows = [(name, position, len(data)) for name, (position, data) in parts.items()]
        return cls(json.dumps(rows).encode(), rows)


def encode(parts: Mapping[str, Part], index: Index | None = None) -> bytes:
    """Return the bytes of a summary of objects, by name, with their `index`."""
    index = index or Index.of(parts)
    body = b"".join([_HEAD.pack(_MAGIC, len(index.data)), index.data, *(data for _, data in parts.values())])
    return body + _CRC.pack(crc32(body))


def decode(data: bytes, name: str, known: Index | None = None) -> dict[str, Part]:
    """Return the parts of a summary, by name of their object. Raises `CorruptFile`.

    An index that is `known` is not parsed again.
    """
    view = memoryview(data)
    try:
        (expected,) = _CRC.unpack(view[-_CRC.size :])
        CorruptFile.unless_equal(name, "summary's CRC32 does not match", expected, crc32(view[: -_CRC.size]))
        magic, length = _HEAD.unpack(view[: _HEAD.size])
        CorruptFile.unless_equal(name, "not a summary", _MAGIC, magic)
        at = _HEAD.size + length
        parts: dict[str, Part] = {}
        index = bytes(view[_HEAD.size : at])
        if known is None or known.data != index:
            known = Index(index, checked(_INDEX, load(index, name, "summary"), name, "summary"))
        for of, position, size in known.rows:
            parts[of] = position, view[at : at + size]
            at += size
    except struct.error as error:
        raise CorruptFile(name, f"summary can't be read: {error}") from error
    CorruptFile.unless_equal(name, "summary has another length", len(view) - _CRC.size, at)
    return parts


def _position(stored: StoredObject) -> int | None:
    """Return the begin of an object's part; None: a summary has no part of it."""
    if stored.size_bytes - stored.directory_position > _DIRECTORY_BYTES:
        return None
    return stored.trailer_position if stored.filter_length <= _FILTER_BYTES else stored.directory_position


def _wanted(state: LogState) -> dict[str, StoredObject]:
    """Return the objects that a summary should have, the newest first."""
    wanted: dict[str, StoredObject] = {}
    left = _MOST_BYTES
    for stored in reversed(state.objects.values()):
        position = _position(stored)
        if position is not None:
            left -= stored.size_bytes - position
            if left < 0:
                break
            wanted[stored.name] = stored
    return wanted


@dataclass(eq=False)
class Summary:
    """The summaries of one log. Readers use the newest."""

    storage: Storage
    listed: list[ObjectInfo] = field(default_factory=list)
    """The listed summaries by name, the newest last."""
    # names of the objects in the newest summary; None: it was not read
    _covered: frozenset[str] | None = None
    # objects that could not be read, which this process does not try again
    _unread: set[str] = field(default_factory=set)
    # of the last summary that was written here
    _index: Index | None = None
    # the last state for which it was not due, and how many objects it lacked
    _compared: LogState | None = None
    _lacking: int = 0

    @property
    def newest(self) -> ObjectInfo | None:
        """The newest summary that was listed or written."""
        return self.listed[-1] if self.listed else None

    def newer(self, number: int) -> list[str]:
        """Return the names of the listed summaries that are newer than record `number`."""
        return [info.name for info in self.listed if info.name >= checkpoint_name(number + 1)]

    def renew(self, state: LogState) -> None:
        """Write a summary of `state` if the present one lacks too many objects, or has a removed one."""
        if self._has_few_more(state):
            return
        wanted = _wanted(state)
        try:
            if self._covered is None:
                self._covered = frozenset(self._parts())
            if not self._is_due(state, wanted):
                self._compared = state
                return
            # another process may have written one
            self.listed = [info for info in self.storage.list(CHECKPOINT_PREFIX) if is_summary(info.name)]
            if self.newer(state.number):
                # another process has written a newer one
                self._covered = None
                return
            if left := [info.name for info in self.listed[:-1]]:
                # delete leftovers first: without that permission there would be ever more
                self.storage.delete_many(left)
                self.listed = self.listed[-1:]
            kept = {name: part for name, part in self._parts().items() if name in wanted}
            lacking = [stored for name, stored in wanted.items() if name not in kept and name not in self._unread]
            read = self._read(lacking[:_MOST_READ])
            kept |= {name: part for name, part in read.items() if part is not None}
            self._unread.update(name for name, part in read.items() if part is None)
            old = [info.name for info in self.listed]
            if kept:
                self._index = Index.of(kept)
                name, data = summary_name(state.number, state.digest), encode(kept, self._index)
                self.storage.put(name, data)
                self.listed = [ObjectInfo(name, len(data), 0)]
                old = [one for one in old if one != name]
            if old:
                self.storage.delete_many(old)
            self._covered = frozenset(kept)
        except (StorageError, CorruptFile, DiskFull) as error:
            self._covered = None
            _log.warning("the summary of directories was not renewed; the next record renews it: %s", error)

    def _has_few_more(self, state: LogState) -> bool:
        """Return whether the only change since the last comparison is a few new files, too few for a new summary."""
        compared = self._compared
        changed = state.changed_since(compared) if compared is not None and self._covered is not None else None
        if compared is None or changed is None or any(file not in state.files for file in changed):
            return False
        are_new = len(state.objects) == len(compared.objects) + len(changed)
        return are_new and self._lacking + len(changed) < _LACKING

    def _is_due(self, state: LogState, wanted: Mapping[str, StoredObject]) -> bool:
        assert self._covered is not None
        known = self._covered | self._unread
        lacking = [stored for name, stored in wanted.items() if name not in known]
        self._lacking = len(lacking)
        # a window table has many entries, and is made rarely
        is_behind = len(lacking) >= _LACKING or any(stored.shard for stored in lacking)
        return is_behind or not self._covered <= state.objects.keys()

    def _parts(self) -> dict[str, Part]:
        if self.newest is None:
            return {}
        try:
            return decode(self.storage.get(self.newest.name), self.newest.name, self._index)
        except (ObjectNotFound, CorruptFile) as error:
            _log.warning("ignoring a summary of directories: %s", error)
            return {}

    def _read(self, lacking: Sequence[StoredObject]) -> dict[str, Part | None]:
        """Return the parts of these objects in their order, read by several threads.

        None: the object is missing or damaged. Raises `StorageError`.
        """
        parts: dict[str, Part | None] = dict.fromkeys(stored.name for stored in lacking)
        failed: list[StorageError] = []

        def read(stored: StoredObject) -> None:
            if failed:
                return  # each request would wait for a storage that is away
            try:
                parts[stored.name] = self._part(stored)
            except StorageError as error:
                failed.append(error)
                raise

        each(lacking, read, min(_THREADS, len(lacking) // _READ_BY_ONE))
        return parts

    def _part(self, stored: StoredObject) -> Part | None:
        position = _position(stored)
        assert position is not None
        try:
            data = self.storage.get_range(stored.name, position, stored.size_bytes - position)
            verified_trailer(stored, data)
        # `InvalidArgument`: the object is shorter than the log says
        except (ObjectNotFound, CorruptFile, InvalidArgument) as error:
            _log.warning("%s is not in the summary: %s", stored.name, error)
            return None
        return position, data
