"""`root/seen`: the newest record of the storage's log that this root knows, and the root's last attempts to append one.

With it a root detects that an older copy of its storage, or of the root itself, was restored. It is written before each
append, and before a local file is deleted or counts as published. Writes alternate between two slots of 512 bytes, each
with a CRC32: a crash damages at most one, and a full disk can still replace them. Threads: the log's appender and the
deletions, by a lock.
"""

from __future__ import annotations

import logging
import threading
import zlib

from msgspec import Struct
from msgspec.structs import asdict

from tiered_index.base.documents import Count, Crc32, decoded, encoded
from tiered_index.errors import CorruptFile
from tiered_index.service.root import Root, disk_error, disk_errors

SEEN = "seen"
_PLACE_BYTES = 512
# attempts since the record's number last grew: one of them may still be on its way to the storage. They fit in a slot
_ATTEMPTS_KEPT = 16
_log = logging.getLogger(__name__)


class Seen(Struct, frozen=True):
    """The newest known record of the log: its number and digest.

    `attempt` identifies the root's last appends, successful or not,
    with spaces between them. `serial` orders the notes.
    """

    number: Count = 0
    digest: str = ""
    attempt: str = ""
    serial: Count = 0

    @property
    def attempts(self) -> list[str]:
        """The root's last appends, oldest first."""
        return self.attempt.split()

    def encode(self) -> bytes:
        """Return the bytes of one slot."""
        document = asdict(self)
        crc32 = zlib.crc32(encoded(document))
        return encoded({**document, "crc32": crc32}).ljust(_PLACE_BYTES - 1) + b"\n"

    @classmethod
    def decode(cls, place: bytes, file: str) -> Seen:
        """Return the content of a slot. Raises `CorruptFile`."""
        stored = decoded(place, _StoredSlot, file, "the seen position of the log")
        seen = cls(stored.number, stored.digest, stored.attempt, stored.serial)
        computed = zlib.crc32(encoded(asdict(seen)))
        CorruptFile.unless_equal(file, "does not match its CRC32", stored.crc32, computed)
        return seen


class _StoredSlot(Struct):
    number: Count
    digest: str
    attempt: str
    serial: Count
    crc32: Crc32


class SeenFile:
    """The file `seen` of one root. Only the holder of the root's lock may call `note`."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.path = root.path / SEEN
        self._lock = threading.RLock()
        self.last = Seen()
        self._place = 0  # the slot to write next

    def read(self) -> Seen | None:
        """Return the last note; None: there is none, or it is damaged. Raises typed errors of the disk."""
        try:
            data = self.path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise disk_error(error, f"reading {self.path}") from error
        places = []
        for number in range(2):
            place = data[number * _PLACE_BYTES : (number + 1) * _PLACE_BYTES]
            try:
                seen = Seen.decode(place, str(self.path))
                places.append((seen.serial, number, seen))
            except CorruptFile as error:
                if place.strip():
                    _log.warning("%s", error)
        if not places:
            return None
        _, number, self.last = max(places)
        self._place = 1 - number
        return self.last

    def note(self, number: int, digest: str, attempt: str | None = None) -> None:
        """Note durably that record `number` was seen, unless a later one is known. `attempt`: the append that begins.

        Raises typed errors of the disk; the next call then writes the same slot.
        """
        with self._lock:
            known = self.last
            later = number > known.number
            if not later:
                number, digest = known.number, known.digest
            attempts = known.attempts
            if attempt is not None and attempt not in attempts:
                # earlier ones were puts of records up to the known number
                attempts = [*(attempts if number == known.number else ()), attempt][-_ATTEMPTS_KEPT:]
            elif not later:
                return
            seen = Seen(number, digest, " ".join(attempts), known.serial + 1)
            self._write(seen.encode())
            self.last, self._place = seen, 1 - self._place

    def _write(self, place: bytes) -> None:
        disk, what = self._root.disk, f"writing {self.path}"
        if not self.path.exists():
            self._root.write_file(self.path, [place, b" " * _PLACE_BYTES], what)
            self._place = 0
            return
        with disk_errors(what):
            descriptor = disk.open_rw(self.path)
            try:
                disk.pwrite(descriptor, place, self._place * _PLACE_BYTES)
                disk.sync(descriptor)
            finally:
                disk.close(descriptor)
