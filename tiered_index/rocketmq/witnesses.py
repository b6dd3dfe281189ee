"""What a follower remembers of a log to notice that it was rewritten: fingerprints of messages that it has put.

After a crash of its host a broker may cut off messages that others have read already, and write others in their place. Nothing in the log
says so; but then a message that was read isn't there any more. A `Trail` holds the last message before each position that can become
durable, and ever fewer of older ones, so that the place where the log still is what it was can be found again.

The trail is kept in `followers/<hash of the source name>.json` in the index's root, written before what it describes is put: whichever
position is durable after a crash has its witness. One thread uses a trail.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import zlib
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from tiered_index.errors import MALFORMED, CorruptFile
from tiered_index.rocketmq.commitlog import Fingerprint
from tiered_index.rocketmq.segments import list_segments, pread
from tiered_index.service.root import FOLLOWERS, disk_error
from tiered_index.storage.disk import TEMPORARY_PREFIX, Disk

__all__ = ["Trail", "Verdict", "Witness", "stored_bytes"]

_VERSION = 1
_MANY = 64
_SPARSE = 4
# a witness goes where the gap that it leaves is at most this part of its distance from the newest


class Verdict(Enum):
    """What became of a message that was read."""

    SAME = "same"
    GONE = "gone"
    """Its segment is deleted, as brokers do with old ones: nothing can be told."""
    CHANGED = "changed"
    """Something else is in its place, or the log ends before it."""


class Witness(NamedTuple):
    """The last message before position `end`; `messages` were put since the witness before."""

    end: int
    offset: int
    size: int
    crc: int
    """CRC-32 of its stored bytes."""
    messages: int

    @classmethod
    def of(cls, end: int, offset: int, data: bytes, messages: int) -> Witness:
        """Return the witness whose stored bytes are `data`."""
        return cls(end, offset, len(data), zlib.crc32(data), messages)

    @property
    def fingerprint(self) -> Fingerprint:
        """What identifies the message."""
        return Fingerprint(self.offset, self.size, self.crc)

    def look(self, folder: Path) -> Verdict:
        """Compare with what is in the commit log now."""
        segments = list_segments(folder)
        if segments and self.offset < segments[0].start:
            return Verdict.GONE
        data = stored_bytes(folder, self.offset, self.size)
        if data is None:
            return Verdict.GONE if segments and self.offset < segments[-1].start else Verdict.CHANGED
        return Verdict.SAME if Fingerprint(self.offset, len(data), zlib.crc32(data)) == self.fingerprint else Verdict.CHANGED


def stored_bytes(folder: Path, offset: int, size: int) -> bytes | None:
    """Return the bytes [offset, offset + size) of the commit log, fewer where the segment ends before, None where no segment has them."""
    for segment in list_segments(folder):
        if segment.start <= offset < segment.end:
            try:
                return pread(segment.path, min(size, segment.end - offset), offset - segment.start)
            except FileNotFoundError:
                return None
    return None


@dataclass
class Trail:
    """The witnesses of one source, ascending. `continue_at` is set while a part of the log is put again: a restart begins there."""

    path: Path
    source: str
    disk: Disk
    witnesses: list[Witness] = field(default_factory=list)
    continue_at: int | None = None

    @classmethod
    def load(cls, root: Path, source: str, disk: Disk) -> Trail:
        """Return what is kept in a root, an empty trail where there is nothing. Raises `CorruptFile`."""
        trail = cls(root / FOLLOWERS / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.json", source, disk)
        try:
            document: dict[str, Any] = json.loads(trail.path.read_bytes())
            if document["follower"] != _VERSION or document["source"] != source:
                raise ValueError(f"version {document['follower']}, source {document['source']!r}")
            trail.witnesses = [Witness(*map(int, fields)) for fields in document["witnesses"]]
            trail.continue_at = None if document["continue_at"] is None else int(document["continue_at"])
        except FileNotFoundError:
            pass
        except OSError as error:
            raise disk_error(error, f"reading {trail.path}") from error
        except MALFORMED as error:
            problem = f"not the memory of {source} ({error}); without this file the log is followed unchecked from the durable position"
            raise CorruptFile(str(trail.path), problem) from error
        return trail

    def save(self) -> None:
        """Write the trail durably. Raises as `disk_error` says."""
        document = {"follower": _VERSION, "source": self.source, "witnesses": self.witnesses, "continue_at": self.continue_at}
        temporary = self.path.parent / (TEMPORARY_PREFIX + secrets.token_hex(8))
        try:
            if not self.path.parent.is_dir():
                self.disk.make_folder(self.path.parent)
                self.disk.sync_folder(self.path.parent.parent)
            self.disk.write_file(temporary, [json.dumps(document).encode()])
            self.disk.publish(temporary, self.path)
        except OSError as error:
            raise disk_error(error, f"writing {self.path}") from error

    def cut(self, position: int) -> None:
        """Forget what lies behind a position."""
        self.witnesses = [witness for witness in self.witnesses if witness.end <= position]

    def add(self, witness: Witness, durable: int) -> None:
        """Add the newest witness. Those at or before the durable position become fewer with their distance from the newest."""
        self.witnesses.append(witness)
        settled = [w for w in self.witnesses if w.end <= durable]
        if len(settled) < _MANY:
            return
        kept = settled[:1]
        for place in range(1, len(settled) - 1):
            one, later = settled[place], settled[place + 1]
            if later.end - kept[-1].end <= (witness.end - later.end) // _SPARSE:
                settled[place + 1] = later._replace(messages=one.messages + later.messages)
            else:
                kept.append(one)
        self.witnesses[: len(settled)] = [*kept, settled[-1]]

    def last_same(self, folder: Path) -> Witness | None:
        """Return the newest witness that still is what it was."""
        return next((w for w in reversed(self.witnesses) if w.look(folder) is Verdict.SAME), None)

    def messages_behind(self, position: int) -> int:
        """Return how many messages were put behind a position, by the witnesses."""
        return sum(w.messages for w in self.witnesses if w.end > position)
