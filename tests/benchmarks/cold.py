"""Suite `cold`: cold lookups compared with RocketMQ's way of reading. It makes the tables of docs/cold-path.md.

RocketMQ's tiered `IndexStoreFile` reads a slot's 8 bytes and then the slot's array, in every file of the range. It has
no filter, and verifies nothing. Its storage provider decides how many files it reads in parallel. So the suite measures
two ways: file by file, and with as many parallel reads as a reader of this project has.

Two tables need no storage, and are not made with `--storage`: the requests of `query_many` by the number of keys, and
the false matches of lookups (entries of other keys with an equal hash).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.benchmarks.machine.cold import (
    COLD,
    LookupCost,
    Round,
    StoredFiles,
    make_files,
    measure_cold,
    open_reader,
    warm,
)
from tests.benchmarks.machine.figures import Meter, Table
from tests.benchmarks.machine.setting import ABSENT, TOPIC, Setting, key_array, keys_of, require, scratch
from tests.support.foreign_lookups import bare_slot_run
from tiered_index.config import IndexConfig
from tiered_index.format.hashing import code_units, hash_batch, key_hash, normal_hashes
from tiered_index.format.layout import HEADER_SIZE, SLOT_SIZE, Layout
from tiered_index.service.files.compacted import StorageBytes
from tiered_index.storage.base import Storage
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.types import Lookup

__all__ = ["COLD_BESIDE_ROCKETMQ", "curve_space_bytes"]

_SERIAL, _PARALLEL = "RocketMQ, file by file", "RocketMQ, in parallel"
# reading this many files one by one takes a minute: the suite does it once
_LONG = 1_000
_FEW_ITEMS = 20_000
_CURVE_FILES = 10
_CURVE_KEYS = (1, 10, 100, 1_000, 10_000)
_GAPS = (IndexConfig(environment=False).coalesce_gap_bytes, 0)
_BATCH = 250_000
_SHARE = 20
_LOW_BITS = 8


def _other_ways(measured: Round, files: Sequence[StorageBytes], turn: int, pool: Executor) -> None:
    """Measure one more lookup of a key in RocketMQ's way."""
    count, number, amounts = len(files), measured.number, measured.amounts
    key, _, _ = measured.key(count, "one")
    read = partial(
        _as_rocketmq, storage=measured.network, layout=measured.files.layout, files=files, topic=TOPIC, key=key
    )
    measured.timed((count, "one", _PARALLEL), number * 1_000 + turn, partial(read, pool), None)
    is_last = turn == amounts.lookups[count] - 1
    if is_last and (count <= 10 or not amounts.quick) and (count < _LONG or number == 0):
        measured.timed((count, "one", _SERIAL), number, partial(read, None), None)


def _run(setting: Setting, folder: Path, meter: Meter) -> None:
    measure_cold(setting, folder, meter, (_PARALLEL, _SERIAL), _other_ways)
    if setting.storage is not None:
        return
    items = setting.layout.items
    keys = [count for count in _CURVE_KEYS if count <= max(100, items // 10)]
    with scratch(folder) as place:
        meter.tables.append(_curve_table(make_files(setting, _curve_layout(setting), _CURVE_FILES, place), keys))
    few = setting.quick or items < _FEW_ITEMS
    meter.tables.append(_fingerprint_table(_count_matches(min(items, 1_000_000) if few else 20_000_000)))


COLD_BESIDE_ROCKETMQ = replace(COLD, run=_run)


def curve_space_bytes(setting: Setting) -> int:
    """Return the bytes of disk that the files for `query_many` need, stored and local."""
    return 2 * _curve_layout(setting).unsealed_size * _CURVE_FILES


def _curve_layout(setting: Setting) -> Layout:
    preset, schema, items = setting.layout.preset, setting.layout.schema, setting.layout.items
    slots, most = (12_500, 50_000) if setting.quick else (1_000_000, 4_000_000)
    return Layout(preset, schema, min(slots, max(1, items // 4)), min(most, items))


def _as_rocketmq(
    pool: Executor | None, storage: Storage, layout: Layout, files: Sequence[StorageBytes], topic: str, key: str
) -> LookupCost:
    """Look a key up in RocketMQ's way: in parallel with a pool, otherwise file by file."""
    hash31 = key_hash(topic, key)
    slot = hash31 % layout.slots

    def look(file: StorageBytes) -> LookupCost:
        name, size = file.stored.name, file.stored.size_bytes
        slot_item = storage.get_range(name, HEADER_SIZE + SLOT_SIZE * slot, SLOT_SIZE)
        position, length = bare_slot_run(slot_item, layout, name, size, slot)
        if not length:
            return LookupCost(0, 1, SLOT_SIZE)
        items = np.frombuffer(storage.get_range(name, position, length), layout.schema.item)
        return LookupCost(int(np.count_nonzero(normal_hashes(items["key_hash"]) == hash31)), 2, SLOT_SIZE + length)

    spent = list((pool.map if pool is not None and len(files) > 1 else map)(look, files))
    return LookupCost.of_gets(sum(s.found for s in spent), sum(s.requests for s in spent), sum(s.bytes for s in spent))


def _curve_table(files: StoredFiles, keys: Sequence[int]) -> Table:
    """Return the requests and MiB of `query_many` for each number of keys and each setting.

    Keys are drawn at random. Each is in one of the files.
    """
    own = (files.layout.capacity - files.shared) * files.count
    drawn = keys_of(np.random.default_rng(7).choice(own, max(keys), replace=False))
    columns, results = ["keys"], []
    for cache, filters in ((None, "no filters"), (files.cache, "filters cached")):
        for gap in _GAPS:
            columns += [f"requests ({filters}, gap {gap >> 10} KiB)", "MiB"]
            with open_reader(LocalStorage(files.objects), cache, coalesce_gap_bytes=gap) as reader:
                warm(reader, files)
                for count in keys:
                    answers = reader.query_many([Lookup(topic=TOPIC, key=key) for key in drawn[:count]])
                    found = int(answers.counts.sum())
                    require(found if files.layout.schema.keyed else min(found, count), count, "answers of query_many")
                    results.append((answers.explain.requests, answers.explain.bytes / (1 << 20)))
    rows: list[tuple[Any, ...]] = []
    for at, count in enumerate(keys):
        pairs = [results[place] for place in range(at, len(results), len(keys))]
        rows.append((count, *(value for pair in pairs for value in pair)))
    layout = files.layout
    title = (
        f"query_many on {files.count} files of {layout.slots:,} slots and {layout.items:,} items, each key in "
        f"one of them"
    )
    return Table(title, tuple(columns), tuple(rows))


@dataclass(frozen=True)
class _Matches:
    """False matches of `sample` lookups of absent keys in a file of `keys` keys, and the file's pairs of equal hash."""

    keys: int
    sample: int
    equal_hash: int
    equal_both: int
    pairs: int
    pairs_low_bits: int

    @property
    def expected_hash(self) -> float:
        """Expected entries with equal hash per lookup. The hash has 31 bits."""
        return self.keys / 2**31

    @property
    def expected_both(self) -> float:
        """Expected entries with equal hash and equal fingerprint per lookup."""
        return self.keys / 2**63


def _count_matches(keys: int) -> _Matches:
    """Return the false matches in a file of `keys` keys. It needs 24 bytes of memory per key.

    It hashes all keys of the file, and looks up a twentieth as many absent keys in the sorted hashes. Pairs with equal
    hash and equal fingerprint are too rare to count. So it also counts the file's pairs of equal hash whose
    fingerprints have equal lowest eight bits: one in 256 if the two hashes are independent.
    """
    hashes, marks = _hashed(0, keys)
    order = np.argsort(hashes, kind="stable")
    hashes, marks = hashes[order], marks[order]
    del order
    sample = max(1, keys // _SHARE)
    wanted, wanted_marks = _hashed(ABSENT, sample)
    first, last = np.searchsorted(hashes, wanted, "left"), np.searchsorted(hashes, wanted, "right")
    met = last - first
    places = np.repeat(first, met) + np.arange(int(met.sum())) - np.repeat(np.cumsum(met) - met, met)
    equal = np.flatnonzero(hashes[1:] == hashes[:-1])
    low = (1 << _LOW_BITS) - 1
    return _Matches(
        keys=keys,
        sample=sample,
        equal_hash=len(places),
        equal_both=int(np.count_nonzero(marks[places] == np.repeat(wanted_marks, met))),
        pairs=len(equal),
        pairs_low_bits=int(np.count_nonzero((marks[equal] ^ marks[equal + 1]) & low == 0)),
    )


def _fingerprint_table(matches: _Matches) -> Table:
    """Return the counts with their expected values."""
    files = 1_000
    return Table(
        title=f"false matches per lookup and file of {matches.keys:,} keys ({matches.sample:,} absent keys looked up)",
        columns=("entries of other keys", "found", "per lookup and file", "expected", f"per lookup in {files:,} files"),
        rows=(
            (
                "equal hash (RocketMQ's files)",
                matches.equal_hash,
                matches.equal_hash / matches.sample,
                matches.expected_hash,
                matches.expected_hash * files,
            ),
            (
                "equal hash and fingerprint (native files)",
                matches.equal_both,
                matches.equal_both / matches.sample,
                matches.expected_both,
                matches.expected_both * files,
            ),
            (
                f"{_LOW_BITS} equal bits of fingerprint, in {matches.pairs:,} pairs of keys with equal hash",
                matches.pairs_low_bits,
                None,
                matches.pairs / 2**_LOW_BITS,
                None,
            ),
        ),
    )


def _hashed(first: int, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
    parts = []
    for start in range(first, first + count, _BATCH):
        numbers = np.arange(start, min(start + _BATCH, first + count))
        parts.append(hash_batch([TOPIC], np.zeros(len(numbers), np.int64), code_units(key_array(numbers))))
    return np.concatenate([hashes for hashes, _ in parts]), np.concatenate([marks for _, marks in parts])
