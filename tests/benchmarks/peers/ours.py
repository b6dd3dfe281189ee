"""This index, with its default settings. Its storage is a folder beside the root."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.memory import disk_bytes
from tests.benchmarks.messages import TOPIC
from tests.benchmarks.peers.protocol import Peer
from tiered_index import IndexReader, IndexService, __version__, merge
from tiered_index.format.layout import PRESETS
from tiered_index.format.names import INDEX_SUFFIX

_SMALL_FILES = 8


def files_of(peer: Peer, preset: str) -> dict[str, Any]:
    """Return a peer's preset and geometry: the preset's own, or less, so that files become nearly full. With `small`,
    there are eight files.
    """
    wanted = peer.entries // _SMALL_FILES if peer.small else peer.entries * 9 // 8
    items = min(max(wanted, 1_000), PRESETS[preset].items)
    return {"preset": preset, "items": items, "slots": items // 4}


class Ours(Peer):
    """`put_batch` and `flush`. When settled, everything is compacted and uploaded.

    The result is one file with a local copy, or several files that are merged into a table of 30 days.
    """

    name = "tiered_index"

    @property
    def _storage(self) -> Path:
        return self.folder / "storage"

    @classmethod
    def version(cls) -> str:
        return __version__

    def open(self) -> None:
        self._index: Any = IndexService.open(
            root=self.folder / "root", storage=f"file://{self._storage}", **files_of(self, "native")
        )

    def put_batch(self, prepared: Any) -> None:
        self._index.put_batch(prepared)
        self._index.flush()

    def lookup(self, key: str) -> Any:
        return self._index.query(TOPIC, key).items

    def lookup_many(self, keys: list[str]) -> Any:
        answers = self._index.query_many([(TOPIC, key) for key in keys])
        return answers.starts, answers.rows

    def settle(self) -> None:
        self._index.seal()
        self._index.run_lifecycle()
        stored = list(self._storage.rglob(f"*{INDEX_SUFFIX}"))
        if len(stored) > 1:
            merge(f"file://{self._storage}", window="30d")
            for path in stored:  # `tiered-index orphans --yes` does this a day later
                path.unlink()
            self.close()
            self.open()

    def reader(self) -> Peer:
        return _OursElsewhere(self.folder, self.entries)

    def close(self) -> None:
        self._index.close()

    def stored_bytes(self) -> int:
        return disk_bytes(self._storage)

    def offsets(self, answer: Any) -> list[int]:
        return [item.offset for item in answer]

    def offsets_by_key(self, keys: Sequence[str], answer: Any) -> list[list[int]]:
        starts, rows = answer
        return [rows["offset"][starts[at] : starts[at + 1]].tolist() for at in range(len(keys))]


class _OursElsewhere(Ours):
    """A reader of the storage's folder without the writer's root, as in another process."""

    def open(self) -> None:
        self._index = IndexReader.open(f"file://{self._storage}")
