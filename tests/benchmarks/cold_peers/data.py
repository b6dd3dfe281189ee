"""The entries of the comparison in object storage, and the right answers.

Entries cover 30 days, evenly. Nearly every key has four or five entries, about a week apart (a quarter of all keys'
entries). Every hundredth entry has one of 20 hot keys. An entry's number defines the entry.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tests.benchmarks.messages import absent_keys, batch, key_array, keys_of

HOT_KEYS = 20
_DAYS = 30
_HOT_EVERY = 100
_HOT = 1 << 41
_KEYS_A_THOUSAND = 225
# a multiple of 30 days, so that one table of 30 days holds everything
_BEGIN_MS = 660 * _DAYS * 86_400_000
_SPAN_MS = _DAYS * 86_400_000


@dataclass(frozen=True)
class Data:
    """`entries` entries, in `file_count` files."""

    entries: int
    file_count: int = 240

    @property
    def keys(self) -> int:
        """The number of keys that are not hot."""
        return self.entries * _KEYS_A_THOUSAND // 1000

    def files(self) -> Iterator[pa.RecordBatch]:
        """Yield all entries in order of time, one file at a time."""
        for file in range(self.file_count):
            numbers = np.arange(self.entries * file // self.file_count, self.entries * (file + 1) // self.file_count)
            yield self._batch(numbers)

    def _batch(self, numbers: npt.NDArray[np.int64]) -> pa.RecordBatch:
        hot = numbers % _HOT_EVERY == 0
        keys = np.where(hot, _HOT + numbers // _HOT_EVERY % HOT_KEYS, numbers % self.keys)
        numbered = {"queue_id": (numbers % 8).astype(np.int32), "size": (400 + numbers % 97).astype(np.int32)}
        return batch(numbers, key_array(keys), **numbered, timestamp_ms=self._second(numbers) * 1000)

    def _second(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return (_BEGIN_MS + numbers * (_SPAN_MS // 1000) // self.entries * 1000) // 1000

    def drawn(self, count: int, seed: int) -> npt.NDArray[np.int64]:
        """Return the numbers of `count` different keys with entries. Draws of two seeds share no key while there are
        enough keys.
        """
        order = np.random.default_rng(0).permutation(self.keys)
        return np.roll(order, -seed * count)[:count]

    texts = staticmethod(keys_of)
    absent = staticmethod(absent_keys)

    @staticmethod
    def hot(number: int) -> str:
        return keys_of(np.array([_HOT + number]))[0]

    def expected(self, key_number: int) -> list[list[int]]:
        """Return [second, offset, queue] of the entries of the key with this number, newest first."""
        numbers = np.arange(key_number, self.entries, self.keys)
        return self._rows(numbers[numbers % _HOT_EVERY != 0])

    def expected_hot(self, number: int, count: int) -> list[list[int]]:
        """Return [second, offset, queue] of the newest `count` entries of a hot key, newest first."""
        return self._rows(np.arange(number * _HOT_EVERY, self.entries, _HOT_EVERY * HOT_KEYS))[:count]

    def _rows(self, numbers: npt.NDArray[np.int64]) -> list[list[int]]:
        newest = numbers[::-1]
        return np.stack([self._second(newest), newest * 1000, newest % 8], axis=1).tolist()  # type: ignore[no-any-return]
