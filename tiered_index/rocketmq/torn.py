"""What is no whole message at the end of a live log: where it is, what it is, and whether it is still what it was. Stateless.

Telling it from damage takes a search through the rest of the segment. As long as nothing there changes, the search would find the same.
"""

from __future__ import annotations

import contextlib
import zlib
from typing import NamedTuple

from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.commitlog import CommitLogReader
from tiered_index.rocketmq.layout import BLANK_BYTES, MAGIC_V1, MAGIC_V2, MIN_MESSAGE_BYTES
from tiered_index.rocketmq.segments import list_segments
from tiered_index.rocketmq.store import StoreDirectory
from tiered_index.rocketmq.witnesses import stored_bytes

__all__ = ["TornTail", "is_followed", "torn_tail"]

_MAGICS = (MAGIC_V1.to_bytes(4, "big"), MAGIC_V2.to_bytes(4, "big"))
_HEAD_BYTES = 36
# of a message, up to its physical offset
_PAGE = 4_096
_MAX_BYTES = 1 << 23
# twice what brokers take as a message: a size that lies isn't followed further


class TornTail(NamedTuple):
    """Commit log offsets [begin, end) hold something that is no whole message; `seen` is what was seen of them and of what is behind."""

    begin: int
    end: int
    seen: tuple[object, ...] = ()
    is_half: bool = True
    """Whether a message begins there: half of one, or one whose body contradicts its CRC. Else they are bytes that a broker left where it
    cut its log, and will write over: it zeroes nothing."""

    @property
    def what(self) -> str:
        """What it is, in words."""
        return "half a message" if self.is_half else "older bytes"


def is_followed(store: StoreDirectory, torn: TornTail) -> bool:
    """Return whether a whole message begins exactly where the one that seems to be there ends: damage, where nobody writes here."""
    size = int.from_bytes((stored_bytes(store.commitlog, torn.begin, BLANK_BYTES) or b"")[:4], "big", signed=True)
    if not torn.is_half or size < MIN_MESSAGE_BYTES:
        return False
    try:
        CommitLogReader(store.commitlog).read(torn.begin + size)
    except CorruptFile:
        return False
    return True


def torn_tail(store: StoreDirectory, position: int) -> TornTail:
    """Look at what stands at a position where no whole message was found.

    Writing to a mapped file needn't change its time, so the bytes count as well: those of the message that seems to be there, and the end
    of the log.
    """
    segments = list_segments(store.commitlog)
    head = stored_bytes(store.commitlog, position, BLANK_BYTES, segments) or b""
    claimed = min(max(int.from_bytes(head[:4], "big", signed=True), 0), _MAX_BYTES)
    data = stored_bytes(store.commitlog, position, claimed + _PAGE, segments) or b""
    files = []
    for segment in segments[-3:]:
        with contextlib.suppress(OSError):  # deleted meanwhile
            files.append((segment.start, segment.file_size, segment.path.stat().st_mtime_ns))
    written = len(data.rstrip(b"\0"))
    is_half = written < _HEAD_BYTES or (data[4:8] in _MAGICS and int.from_bytes(data[28:_HEAD_BYTES], "big") == position)
    return TornTail(position, position + written, (zlib.crc32(data), len(data), store.log_end(), *files), is_half)
