"""A toy broker with an index in its process: an append-only log, and lookups of its messages by key.

    python broker.py FOLDER

Commands on stdin, one per line: `put TOPIC KEY BODY`, `find TOPIC KEY`, `quit`. Each reply is one line on stdout. A
`put` is acknowledged once the log has it on disk. After a crash the index continues at its durable position.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from tiered_index import IndexService
from tiered_index.errors import BackPressure

SOURCE = "log"


class Broker:
    """One log and its index. Threads: any. A lock puts appends, and so the puts of this one source, in order."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / "log", os.O_RDWR | os.O_CREAT, 0o644)
        self._lock = threading.Lock()
        self._end = self._cut_torn_tail()
        self._lines = open(folder / "log", "rb")  # noqa: SIM115 - closed by `close`
        # settings come only from these arguments, not from the environment of the process
        self.index = IndexService.open(
            root=folder / "index",
            storage=f"file://{folder.absolute() / 'cold'}",
            offset_space="commitlog",
            environment=False,
        )
        self._indexed = self.index.durable_position(SOURCE) or 0
        while self._indexed < self._end:
            self._index_log()
            time.sleep(0.01)

    def append(self, topic: str, key: str, body: str) -> int:
        """Write a message, sync it, index it, and return its offset."""
        record = {"topic": topic, "key": key, "body": body, "time_ms": int(time.time() * 1000)}
        line = json.dumps(record).encode() + b"\n"
        with self._lock:
            offset = self._end
            os.pwrite(self._descriptor, line, offset)
            os.fdatasync(self._descriptor)
            self._end += len(line)
            self._index_log()
        return offset

    def find(self, topic: str, key: str) -> list[str]:
        """Return the bodies of the messages with a key, newest first. Raises an error if the answer is not complete."""
        bodies = []
        for page in self.index.query_all(topic, key):
            for entry in page:
                record = json.loads(os.pread(self._descriptor, entry.size, entry.offset))
                # two keys may have one hash, so this compares the message's key
                if (record["topic"], record["key"]) == (topic, key):
                    bodies.append(record["body"])
        return bodies

    def close(self) -> None:
        """Flush the index, release its lock, and close the log."""
        self.index.close()
        self._lines.close()
        os.close(self._descriptor)

    def _index_log(self) -> None:
        """Put the lines after the indexed part of the log. If the index refuses them, the next call continues."""
        self._lines.seek(self._indexed)
        while self._indexed < self._end:
            line = self._lines.readline()
            record, behind = json.loads(line), self._indexed + len(line)
            place = {"offset": self._indexed, "size": len(line), "timestamp_ms": record["time_ms"]}
            try:
                self.index.put(record["topic"], 0, record["key"], **place, source=SOURCE, source_position=behind)
            except BackPressure:
                return
            self._indexed = behind

    def _cut_torn_tail(self) -> int:
        """Cut half a line that a crash left at the end of the log, and return the log's end."""
        size = os.fstat(self._descriptor).st_size
        whole = os.pread(self._descriptor, size, 0).rfind(b"\n") + 1
        os.ftruncate(self._descriptor, whole)
        return whole


def main() -> None:
    """Serve stdin until it ends, `quit`, or SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    broker = Broker(Path(sys.argv[1]))
    try:
        print("ready", flush=True)
        for line in sys.stdin:
            command, *words = line.rstrip("\n").split(maxsplit=3)
            if command == "put":
                print(broker.append(*words), flush=True)
            elif command == "find":
                print(json.dumps(broker.find(*words)), flush=True)
            else:
                break
    finally:
        broker.close()


if __name__ == "__main__":
    main()
