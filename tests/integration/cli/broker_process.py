"""A broker for tests, in a separate process. It writes messages into a store, in pieces that a kill can tear.

    python -m tests.integration.cli.broker_process STORE_DIR MESSAGES SEGMENT_BYTES

It ends after the given number of messages. Numbers continue after those in the store. After every burst, a line on
stdout has the number of messages that this process has written.
"""

import os
import sys
import time
from pathlib import Path

from tests.support.store_writer import StoreWriter
from tiered_index.storage.base import Bytes
from tiered_index.storage.disk import Disk

_PIECE_BYTES = 333
_BURST = 40


class PiecesDisk(Disk):
    """Writes piece by piece, so that a reader or a kill in between finds half a message."""

    def pwrite(self, descriptor: int, data: Bytes, position: int) -> None:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), _PIECE_BYTES):
            super().pwrite(descriptor, view[begin : begin + _PIECE_BYTES], position + begin)
            os.sched_yield()


def main(folder: str, messages: str, segment_bytes: str) -> None:
    writer = StoreWriter(Path(folder), segment_bytes=int(segment_bytes), queue_entries=500, disk=PiecesDisk())
    for number in range(int(messages)):
        offset = writer.next_offset
        topic = "orders" if number % 3 else "payments"
        writer.put(
            topic,
            number % 4,
            b"b" * (offset % 200),
            keys=(f"k{offset % 41}", f"own-{offset}"),
            uniq_key=f"U{offset:031X}",
            store_ms=time.time_ns() // 1_000_000,
        )
        if number % _BURST == _BURST - 1:
            writer.flush()
            print(number + 1, flush=True)
            time.sleep(0.005)
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
