"""The messages of the suites on one machine, made from their numbers, so that a suite can make any of them again.

Each message has one key of 24 to 36 characters and one topic of 12. There are ten messages per millisecond of store
time. Pure.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

TOPIC = "TopicOrder01"
START_MS = 1_700_000_000_000
ABSENT = 1 << 40
"""Numbers from this one on are never put."""
FLUSH_ENTRIES = 1_000_000
"""The entries between two flushes: those of a few tenths of a second at full speed, half of the buffer."""
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
    """Return as many keys that no message has."""
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


def drawn(count: int, below: int, seed: int) -> npt.NDArray[np.int64]:
    """Return `count` message numbers below a bound, drawn at random."""
    return np.random.default_rng(seed).integers(0, below, count)
