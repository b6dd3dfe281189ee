"""Writes the broker's classic index files, byte for byte as the broker does, for tests and the demo.

Files are sorted by their names, the times they were made. A new file inherits end offset and end timestamp of the
previous one. A message below the newest end offset is ignored (RocketMQ's `IndexFile`, `IndexService`). One thread uses
a writer.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiered_index.connectors.rocketmq.classic import (
    ENTRY,
    ENTRY_BYTES,
    HEADER_BYTES,
    SLOT_BYTES,
    ClassicHeader,
    Geometry,
    _header,
    classic_file_names,
    decode_header,
    infer_geometry,
)
from tiered_index.connectors.rocketmq.log.layout import TRANSACTION_MASK, TRANSACTION_ROLLBACK
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.keys.hashing import java_string_hash

_entry = struct.Struct(">iqii")
_slot = struct.Struct(">i")
_MAX_SECONDS = 2**31 - 1
DEFAULT_GEOMETRY = Geometry(5_000_000, 20_000_000)


def absolute_hash(text: str) -> int:
    """Return the absolute value of the Java hash of `text`, or 0 for the hash without one."""
    return abs(java_string_hash(text)) % 2**31


class ClassicIndexFile:
    """A classic index file in memory."""

    def __init__(self, data: bytes | bytearray, geometry: Geometry, *, file: str = "index file") -> None:
        """Read the header of a whole file's bytes. Raises `CorruptFile` if the file has another geometry."""
        if len(data) != geometry.file_bytes:
            problem = f"size of a file of {geometry.slots:,} slots and {geometry.items:,} items"
            raise CorruptFile(file, problem, expected=geometry.file_bytes, found=len(data))
        self.data = data if isinstance(data, bytearray) else bytearray(data)
        self.geometry = geometry
        self.file = file
        self.header = decode_header(bytes(data[:HEADER_BYTES]), file)
        if self.header.index_count > geometry.items:
            raise CorruptFile(file, "more entries than items", offset=36, expected=f"at most {geometry.items:,}")

    def entries(self) -> npt.NDArray[np.void]:
        """Return a copy of all entries (`ENTRY`, n), in order of insertion."""
        return np.frombuffer(
            self.data, ENTRY, self.header.index_count - 1, self.geometry.entries_at + ENTRY_BYTES
        ).copy()

    @classmethod
    def create(
        cls, geometry: Geometry, *, end_offset: int = 0, end_ms: int = 0, file: str = "index file"
    ) -> "ClassicIndexFile":
        """Return a new file that inherits end offset and end timestamp of the previous file (0: there is none)."""
        if geometry.slots < 1 or geometry.items < 2 or geometry.file_bytes > 2**31 - 1:
            raise InvalidArgument(f"{geometry} can't be: at least 1 slot and 2 items, and a file below 2 GiB")
        made = cls(bytearray(geometry.file_bytes), geometry, file=file)
        time, offset = max(end_ms, 0), max(end_offset, 0)
        made._set(ClassicHeader(time, time, offset, offset, 0, 1))
        return made

    @property
    def is_full(self) -> bool:
        """Whether the file refuses the next `put_key`."""
        return self.header.index_count >= self.geometry.items

    def _set(self, header: ClassicHeader) -> None:
        _header.pack_into(self.data, 0, *header)
        self.header = header

    def put_key(self, key: str, offset: int, store_ms: int) -> bool:
        """Add an entry for `key` (`topic#key`) as Java does; return False if the file is full."""
        header = self.header
        if self.is_full:
            return False
        hashed = absolute_hash(key)
        slot_at = HEADER_BYTES + SLOT_BYTES * (hashed % self.geometry.slots)
        (newest,) = _slot.unpack_from(self.data, slot_at)
        if not 0 < newest <= header.index_count:
            newest = 0
        late = store_ms - header.begin_ms
        # toward zero as in Java, then bounded by the field; a negative difference counts as 0
        seconds = min(late // 1000, _MAX_SECONDS) if header.begin_ms > 0 and late > 0 else 0
        _entry.pack_into(
            self.data, self.geometry.entries_at + ENTRY_BYTES * header.index_count, hashed, offset, seconds, newest
        )
        _slot.pack_into(self.data, slot_at, header.index_count)
        first = header.index_count <= 1
        self._set(
            ClassicHeader(
                store_ms if first else header.begin_ms,
                store_ms,
                offset if first else header.begin_offset,
                offset,
                header.slots_in_use + (newest == 0),
                header.index_count + 1,
            )
        )
        return True


@dataclass(slots=True)
class ClassicIndex:
    """Index files in the order of their names. New files have the `geometry`, and `new_name` names them."""

    geometry: Geometry = DEFAULT_GEOMETRY
    files: list[ClassicIndexFile] = field(default_factory=list)
    new_name: Callable[[], str] = lambda: "index file"

    def put(
        self, topic: str, uniq_key: str | None, keys: str | None, offset: int, store_ms: int, sys_flag: int
    ) -> None:
        """Index one message as the broker does (`buildIndex`).

        `keys` is the text of the KEYS property. Rolled-back messages are left out, prepared ones aren't. A key that
        equals the unique key or another key is put again, because RocketMQ's bytes depend on it.
        """
        newest = self._writable()
        if offset >= newest.header.end_offset and sys_flag & TRANSACTION_MASK != TRANSACTION_ROLLBACK:
            for key in ([] if uniq_key is None else [uniq_key]) + [key for key in (keys or "").split(" ") if key]:
                if not newest.put_key(f"{topic}#{key}", offset, store_ms):
                    newest = self._writable()
                    newest.put_key(f"{topic}#{key}", offset, store_ms)

    def _writable(self) -> ClassicIndexFile:
        """Return the newest file, or a new one if it is full."""
        newest = self.files[-1] if self.files else None
        if newest is not None and not newest.is_full:
            return newest
        inherited = {} if newest is None else {"end_offset": newest.header.end_offset, "end_ms": newest.header.end_ms}
        made = ClassicIndexFile.create(self.geometry, file=self.new_name(), **inherited)
        self.files.append(made)
        return made


def load_classic_index(folder: Path, geometry: Geometry | None = None) -> ClassicIndex:
    """Read all index files of a folder. Raises `CorruptFile`, `StorageMisconfigured`."""
    files = []
    for path in (folder / name for name in classic_file_names(folder)):
        data = bytearray(path.read_bytes())
        files.append(ClassicIndexFile(data, geometry or infer_geometry(data, str(path)), file=str(path)))
    return ClassicIndex(geometry or (files[-1].geometry if files else DEFAULT_GEOMETRY), files)
