"""RocketMQ's way: this project makes files of preset `rocketmq`, and reads them as RocketMQ's `IndexStoreFile` does.

An unsealed file is mapped. The slot names the newest item, and each item the one before it. A lookup in a compacted
file reads two ranges, the slot's 8 bytes and its array. No file has a filter, nothing is checked, and keys with an
equal 31-bit hash are not distinguished. Python code follows the chain here. RocketMQ's own code takes 1.2 us for the
chain and 9 for the two reads. Figures of writing are this project's, too.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.memory import disk_bytes
from tests.benchmarks.messages import TOPIC
from tests.benchmarks.peers.ours import files_of
from tests.benchmarks.peers.protocol import Peer
from tiered_index import IndexService, __version__
from tiered_index.format.keys.hashing import key_hash
from tiered_index.format.layout import HEADER_SIZE, SLOT_SIZE
from tiered_index.format.names import INDEX_SUFFIX

_HEAD = struct.Struct(">i")
_SLOT = struct.Struct(">ii")
# hash, topic, queue, offset, size, difference in seconds; an unsealed item also has the previous item's index
_ITEM = struct.Struct(">iiiqii")
_CHAINED = struct.Struct(">iiiqiii")


class RocketMq(Peer):
    """The service writes the files. The first lookup closes the service and opens the files."""

    name = "RocketMQ's way"
    tells_keys_apart = False
    survives_reading = False

    @classmethod
    def version(cls) -> str:
        return f"file format of 5.5.1; tiered_index {__version__}"

    def open(self) -> None:
        self._settings = files_of(self, "rocketmq")
        self._slots = self._settings["slots"]
        self._index: IndexService[Any] | None = None
        self._maps: list[mmap.mmap] = []
        self._compacted: list[int] = []
        if not self._files("unsealed") and not self._files("uploaded"):
            self._serve()

    def _serve(self) -> IndexService[Any]:
        if self._index is None:
            self._release()
            self._index = IndexService.open(
                root=self.folder / "root", storage=f"file://{self.folder / 'storage'}", **self._settings
            )
        return self._index

    def _files(self, state: str) -> list[Path]:
        return sorted((self.folder / "root" / state).glob(f"*{INDEX_SUFFIX}"))

    def _walk(self) -> None:
        """Close the service, so that it writes slot tables, and open the files."""
        if self._index is not None:
            self._index.close()
            self._index = None
        if not self._maps and not self._compacted:
            for path in self._files("unsealed"):
                with path.open("rb") as file:
                    self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            self._compacted = [
                os.open(path, os.O_RDONLY) for state in ("compacted", "uploaded") for path in self._files(state)
            ]

    def put_batch(self, prepared: Any) -> None:
        index = self._serve()
        index.put_batch(prepared)
        index.flush()

    def lookup(self, key: str) -> Any:
        if not self._maps and not self._compacted:
            self._walk()
        wanted = key_hash(TOPIC, key, "mask")
        at = HEADER_SIZE + SLOT_SIZE * (wanted % self._slots)
        items = []
        for data in self._maps:
            (index,) = _HEAD.unpack_from(data, at)
            while index > 0:
                *item, index = _CHAINED.unpack_from(data, HEADER_SIZE + SLOT_SIZE * self._slots + _CHAINED.size * index)
                if item[0] == wanted:
                    items.append(tuple(item))
        for file in self._compacted:
            position, length = _SLOT.unpack(os.pread(file, SLOT_SIZE, at))
            if length:
                items += [item for item in _ITEM.iter_unpack(os.pread(file, length, position)) if item[0] == wanted]
        return items

    def lookup_many(self, keys: list[str]) -> Any:
        return [self.lookup(key) for key in keys]

    def settle(self) -> None:
        index = self._serve()
        index.seal()
        index.run_lifecycle()

    def close(self) -> None:
        if self._index is not None:
            self._index.close()
        self._release()

    def _release(self) -> None:
        for data in self._maps:
            data.close()
        for file in self._compacted:
            os.close(file)
        self._maps, self._compacted = [], []

    def stored_bytes(self) -> int:
        return disk_bytes(self.folder / "storage")

    def offsets(self, answer: Any) -> list[int]:
        return [item[3] for item in answer]

    def offsets_by_key(self, keys: Sequence[str], answer: Any) -> list[list[int]]:
        return [self.offsets(each) for each in answer]
