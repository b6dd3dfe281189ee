"""The setting of a benchmark run: geometry and amounts, the messages, and the index of a suite.

Amounts follow from the number of items, messages from their numbers, so that a suite can make any of them again. Each
message has one key of 24 to 36 characters and one topic of 12. There are ten messages per millisecond of store time.
Any thread may use `WatchedDisk`, and one thread the rest.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tests.support.storage_faults import FaultStorage
from tiered_index.config import IndexConfig
from tiered_index.errors import StorageUnavailable
from tiered_index.format.layout import Layout
from tiered_index.format.names import DATA_PREFIX, INDEX_SUFFIX
from tiered_index.service.index import IndexService
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import Disk
from tiered_index.storage.local.storage import LocalStorage

TOPIC = "TopicOrder01"
START_MS = 1_700_000_000_000
ABSENT = 1 << 40
"""Numbers from this one on are never put."""
_PER_MS = 10
_SHORTEST, _LONGEST = 24, 36
_HEX = np.frombuffer(b"".join(b"%02X" % value for value in range(256)), np.uint16)
_SALTS = (0, 0x5851F42D4C957F2D, 0x14057B7EF767814F)


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return splitmix64's finaliser of each number: a bijection, so different numbers stay different."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def key_array(numbers: npt.NDArray[np.int64]) -> pa.Array:
    """Return the keys of messages as an Arrow string array.

    A key is the first 24 to 36 of 48 hexadecimal digits: three mixed words. The first word alone identifies the number.
    A batch is written as one matrix of characters. The first ones of each row are kept: 36 bytes per key, twice.
    """
    count = len(numbers)
    words = np.empty((count, len(_SALTS)), ">u8")
    for column, salt in enumerate(_SALTS):
        words[:, column] = _mixed(numbers.astype(np.uint64) + np.uint64(salt))
    digits = _HEX[words.view(np.uint8).reshape(count, -1)[:, : _LONGEST // 2]].view(np.uint8)
    lengths = _SHORTEST + words[:, 2].astype(np.uint64) % (_LONGEST - _SHORTEST + 1)
    text = digits[np.arange(_LONGEST) < lengths[:, None]]
    offsets = np.zeros(count + 1, np.int32)
    offsets[1:] = np.cumsum(lengths)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(text))


def keys_of(numbers: npt.NDArray[np.int64]) -> list[str]:
    """Return the keys of messages as Python text."""
    return key_array(numbers).to_pylist()  # type: ignore[no-any-return]


def absent_keys(numbers: npt.NDArray[np.int64]) -> list[str]:
    """Return the given number of keys that no message has."""
    return keys_of(numbers + ABSENT)


def batch(numbers: npt.NDArray[np.int64], keys: Any = None, **others: npt.NDArray[Any]) -> pa.RecordBatch:
    """Return messages as `put_batch` takes them. `keys` and `others` replace the messages' own columns."""
    count = len(numbers)
    columns = {
        "topic": pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([TOPIC])),
        "queue_id": pa.array(numbers % 8),
        "key": key_array(numbers) if keys is None else keys,
        "offset": pa.array(numbers * 1000),
        "size": pa.array(np.full(count, 512)),
        "timestamp_ms": pa.array(START_MS + numbers // _PER_MS),
        **{name: pa.array(values) for name, values in others.items()},
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def numbers_of(count: int, below: int, seed: int) -> npt.NDArray[np.int64]:
    """Return `count` message numbers below a bound, drawn at random."""
    return np.random.default_rng(seed).integers(0, below, count)


_FULL_ITEMS = 20_000_000
_BATCH = 250_000
FLUSH_ENTRIES = 1_000_000
"""The entries between two flushes: those of a few tenths of a second at full speed, half of the buffer."""


@dataclass
class Setting:
    """Geometry of the files, and the amounts that each of `rounds` rounds measures.

    `storage` is the URI that suite `cold` reads from, if any.
    """

    layout: Layout
    rounds: int
    quick: bool = field(kw_only=True)
    storage: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        items, quick = self.layout.items, self.quick
        self.singles = min(200_000 if quick else 1_000_000, items)
        self.lookups = min(5_000 if quick else 20_000, items)
        self.many = min(50_000 if quick else 100_000, items)
        self.small_files = min(1_000, max(10, items // 200))
        self.pause_files = 2
        self.pause_rows = min(1_000, max(1, items // 100))
        self.pause_seal_s = min(5.0, max(0.5, items / 1_000_000))
        self.idle_s = min(1.0 if quick else 3.0, items / 100_000)
        self.log_messages = min(100_000 if quick else 500_000, items)

    @property
    def entries(self) -> int:
        """Entries of a full file."""
        return self.layout.capacity

    @property
    def is_full(self) -> bool:
        """Whether files have the size to which the goals of whole files, and Java's figures, apply."""
        return self.layout.items >= _FULL_ITEMS

    @property
    def space_bytes(self) -> int:
        """Disk space of the suite that takes most: files, the reserved next one, and their copies in the storage."""
        return max((4 + self.pause_files) * 2 * self.layout.unsealed_size, 64 << 20, self.log_messages << 10)

    def with_files_of(self, entries: int) -> Setting:
        """Return this setting with small files, with one slot per entry."""
        layout = self.layout
        return replace(self, layout=Layout(layout.preset, layout.schema, entries, entries + 1))

    def open(
        self, folder: Path, *, disk: Disk | None = None, storage: Storage | None = None, **changes: Any
    ) -> IndexService:
        """Open the index in `folder`. Its storage is a folder too. Its workers don't run, whatever `changes` say."""
        layout = self.layout
        settings = {
            "root": folder / "root",
            "storage": f"file://{folder / 'storage'}",
            "preset": layout.preset.name,
            "slots": layout.slots,
            "items": layout.items,
            "background": False,
            **changes,
        }
        return IndexService.open(IndexConfig.load(**settings), disk=disk, storage_backend=storage)

    def describe(self) -> dict[str, Any]:
        """Return geometry and amounts, JSON-ready."""
        layout = self.layout
        return {
            "preset": layout.preset.name,
            "slots": layout.slots,
            "items": layout.items,
            "entries": self.entries,
            "unsealed_file_bytes": layout.unsealed_size,
            "batch_rows": _BATCH,
            "flush_entries": FLUSH_ENTRIES,
            "rounds": self.rounds,
            "single_puts": self.singles,
            "lookups": self.lookups,
            "query_many_keys": self.many,
            "small_files": self.small_files,
            "pause_files": self.pause_files,
            "pause_batch_rows": self.pause_rows,
            "pause_seal_after_s": self.pause_seal_s,
            "commit_log_messages": self.log_messages,
            "storage": self.storage,
        }


_FULL_FILES, _QUICK_FILES, _FEW_FILES = 1_000, 100, 10


@dataclass(frozen=True)
class ColdAmounts:
    """The amounts of suite `cold`. `lookups`: files in range -> lookups of each kind in a round."""

    quick: bool
    layout: Layout
    files: int
    lookups: Mapping[int, int]

    @classmethod
    def of(cls, setting: Setting) -> ColdAmounts:
        """Return the amounts of a setting."""
        preset, schema, items = setting.layout.preset, setting.layout.schema, setting.layout.items
        few = items < 20_000
        small = min(items, 5_000 if setting.quick else 20_000)
        lookups = (
            {1: 2, 10: 1} if few else {1: 3, 10: 2, 100: 1} if setting.quick else {1: 30, 10: 20, 100: 8, 1_000: 2}
        )
        return cls(
            quick=setting.quick,
            layout=Layout(preset, schema, max(1, small // 4), small),
            files=_FEW_FILES if few else _QUICK_FILES if setting.quick else _FULL_FILES,
            lookups=lookups,
        )

    @property
    def space_bytes(self) -> int:
        """Disk space of the stored files, and of one life cycle's local files."""
        return 2 * self.layout.unsealed_size * self.files


class WatchedDisk(Disk):
    """The real disk. It counts each state that a file reached durably, and calls `reached` with it."""

    def __init__(self, reached: Callable[[str], None] | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._reached = reached

    def rename(self, source: Path, target: Path) -> None:
        """Do as the disk does: an unsealed file begins so."""
        super().rename(source, target)
        if target.suffix == INDEX_SUFFIX and target.parent == source.parent and target.parent.name == "unsealed":
            self._note(target)

    def publish(self, temporary: Path, target: Path) -> None:
        """Do as the disk does: a file is compacted or uploaded so."""
        super().publish(temporary, target)
        if target.suffix == INDEX_SUFFIX:
            self._note(target)

    def _note(self, target: Path) -> None:
        self.counts[target.parent.name] += 1
        if self._reached is not None:
            self._reached(target.parent.name)


def fill(index: IndexService, first: int, count: int, put: Any = None, flush: Any = None) -> None:
    """Put messages and make them durable, `FLUSH_ENTRIES` at a time. The calls run inside the contexts `put` and
    `flush`.
    """
    put, flush = put or contextlib.nullcontext(), flush or contextlib.nullcontext()
    waiting = 0
    for start in range(first, first + count, _BATCH):
        rows = batch(np.arange(start, min(start + _BATCH, first + count)))
        with put:
            waiting += index.put_batch(rows)
        if waiting >= FLUSH_ENTRIES:
            with flush:
                index.flush()
            waiting = 0
    with flush:
        index.flush()


def without_uploads(folder: Path) -> FaultStorage:
    """Return the index's storage in a state in which it refuses index files, so that files stay compacted."""
    storage = FaultStorage(LocalStorage(folder / "storage"))
    storage.fail("put", times=None, name_prefix=DATA_PREFIX)
    return storage


def compact_only(index: IndexService) -> None:
    """Run the life cycle of an index `without_uploads` until everything sealed is compacted."""
    with contextlib.suppress(StorageUnavailable):
        index.run_lifecycle()


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Yield a new folder in `parent`, and delete it at the end."""
    with tempfile.TemporaryDirectory(prefix="tiered-index-bench-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def require(found: object, expected: object, what: str) -> None:
    """Raise an error if a measurement did not do its work: figures of wrong work are worthless."""
    if found != expected:
        raise RuntimeError(f"{what}: {found!r}, not {expected!r}")
