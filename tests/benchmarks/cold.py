"""Suite `cold`: cold lookups compared with RocketMQ's way of reading (`machine.cold`). It makes the tables of
docs/cold-path.md.

Three tables need no storage, and are not made with `--storage`: the requests of new readers, and those of `query_many`
by the number of keys. The third has the false matches of lookups (entries of other keys with an equal hash).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.benchmarks.machine.cold import StoredFiles, cold_specs, make_files, measure_cold, open_reader
from tests.benchmarks.machine.figures import Meter, Suite, Table
from tests.benchmarks.machine.reading import require_answers
from tests.benchmarks.machine.setting import ABSENT, TOPIC, Setting, absent_keys, key_array, keys_of, require, scratch
from tiered_index.config import IndexConfig
from tiered_index.format.hashing import code_units, hash_batch
from tiered_index.format.layout import Layout
from tiered_index.storage.base import WrapperStorage
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.types import Lookup

_FEW_ITEMS = 20_000
# files, and entries of each, that new readers look keys up in
_UNMERGED, _ENTRIES_EACH = 240, (20_000, 80_000)
_FEW_UNMERGED, _FEW_ENTRIES_EACH = 24, (500,)
_CURVE_FILES = 10
_CURVE_KEYS = (1, 10, 100, 1_000, 10_000)
_GAPS = (IndexConfig(environment=False).coalesce_gap_bytes, 0)
_BATCH = 250_000
_SHARE = 20
_LOW_BITS = 8


def _run(setting: Setting, folder: Path, meter: Meter) -> None:
    measure_cold(setting, folder, meter)
    if setting.storage is not None:
        return
    items = setting.layout.items
    keys = [count for count in _CURVE_KEYS if count <= max(100, items // 10)]
    few = setting.quick or items < _FEW_ITEMS
    meter.tables.append(_first_table(setting, folder, few=few))
    with scratch(folder) as place:
        meter.tables.append(_curve_table(make_files(setting, _curve_layout(setting), _CURVE_FILES, place), keys))
    meter.tables.append(_fingerprint_table(min(items, 1_000_000) if few else 20_000_000))


COLD = Suite("cold", cold_specs, _run)
"""The suite makes its files once. Each round uses other keys."""


def curve_space_bytes(setting: Setting) -> int:
    """Return the disk space in bytes that the files for `query_many` need, stored and local."""
    return 2 * _curve_layout(setting).unsealed_size * _CURVE_FILES


def _curve_layout(setting: Setting) -> Layout:
    preset, schema, items = setting.layout.preset, setting.layout.schema, setting.layout.items
    slots, most = (12_500, 50_000) if setting.quick else (1_000_000, 4_000_000)
    return Layout(preset, schema, min(slots, max(1, items // 4)), min(most, items))


def _first_table(setting: Setting, folder: Path, *, few: bool) -> Table:
    """Return the requests and MiB that new readers of unmerged files need to open, and for their first two lookups."""
    rows: list[tuple[Any, ...]] = []
    unmerged = _FEW_UNMERGED if few else _UNMERGED
    for entries in _FEW_ENTRIES_EACH if few else _ENTRIES_EACH:
        layout = Layout(setting.layout.preset, setting.layout.schema, entries // 4, entries + 1)
        with scratch(folder) as place:
            files = make_files(setting, layout, unmerged, place)
            for kind, keys, found in (
                ("none", absent_keys(np.arange(2)), 0),
                ("one", [files.key_in_one(7, number) for number in (1, 2)], 1),
                ("all", [files.key_in_all(number) for number in (1, 2)], files.count),
            ):
                metered = MeteredStorage(LocalStorage(files.objects))
                with open_reader(metered) as reader:
                    spent = [(metered.total.requests, metered.total.bytes_read)]
                    for key in keys:
                        require_answers(
                            setting, len(reader.query(TOPIC, key, max_count=2 * files.count)), found, "answers"
                        )
                        spent.append((metered.total.requests, metered.total.bytes_read))
                steps = zip(((0, 0), *spent), spent, strict=False)
                cells = [
                    cell for before, after in steps for cell in (after[0] - before[0], (after[1] - before[1]) / 2**20)
                ]
                rows.append((entries, kind, *cells))
    columns = ("entries of a file", "key in", "open: requests", "MiB", "first lookup: requests", "MiB")
    title = f"a new reader of {unmerged} files"
    return Table(title, (*columns, "second lookup: requests", "MiB"), tuple(rows))


def _curve_table(files: StoredFiles, keys: Sequence[int]) -> Table:
    """Return the requests and MiB of `query_many` for each number of keys and each setting.

    Keys are drawn at random. Each is in one of the files. The wrapped storage reads ranges as an object store does,
    because batches on a local storage read each slot group on its own.
    """
    own = (files.layout.capacity - files.shared) * files.count
    drawn = keys_of(np.random.default_rng(7).choice(own, max(keys), replace=False))
    columns = ["keys"]
    rows: dict[int, list[Any]] = {count: [count] for count in keys}
    for cache, filters in ((None, "no filters"), (files.cache, "filters cached")):
        for gap in _GAPS:
            columns += [f"requests ({filters}, gap {gap >> 10} KiB)", "MiB"]
            with open_reader(WrapperStorage(LocalStorage(files.objects)), cache, coalesce_gap_bytes=gap) as reader:
                # reads the directories, and no filters
                reader.topics()
                for count in keys:
                    answers = reader.query_many([Lookup(topic=TOPIC, key=key) for key in drawn[:count]])
                    found = int(answers.counts.sum())
                    require(found if files.layout.schema.keyed else min(found, count), count, "answers of query_many")
                    rows[count] += [answers.explain.requests, answers.explain.bytes / (1 << 20)]
    layout = files.layout
    title = (
        f"query_many on {files.count} files of {layout.slots:,} slots and {layout.items:,} items, each key in "
        f"one of them"
    )
    return Table(title, tuple(columns), tuple(map(tuple, rows.values())))


def _fingerprint_table(keys: int) -> Table:
    """Return the false matches in a file of `keys` keys, and their expected number. Memory: 24 bytes per key.

    It hashes all keys of the file, and looks up a twentieth as many absent keys in the sorted hashes. A hash has 31
    bits, a fingerprint 32. Pairs with equal hash and equal fingerprint are too rare to count. So it also counts the
    file's pairs of equal hash whose fingerprints have equal lowest eight bits: one in 256 if the two hashes are
    independent.
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
    both = int(np.count_nonzero(marks[places] == np.repeat(wanted_marks, met)))
    pairs = np.flatnonzero(hashes[1:] == hashes[:-1])
    alike = int(np.count_nonzero((marks[pairs] ^ marks[pairs + 1]) & ((1 << _LOW_BITS) - 1) == 0))
    files = 1_000
    rows: list[tuple[Any, ...]] = [
        (f"equal {what}", found, found / sample, keys / 2**bits, keys / 2**bits * files)
        for what, found, bits in (
            ("hash (RocketMQ's files)", len(places), 31),
            ("hash and fingerprint (native files)", both, 63),
        )
    ]
    of_pairs = f"{_LOW_BITS} equal bits of fingerprint, in {len(pairs):,} pairs of keys with equal hash"
    rows.append((of_pairs, alike, None, len(pairs) / 2**_LOW_BITS, None))
    title = f"false matches per lookup and file of {keys:,} keys ({sample:,} absent keys looked up)"
    columns = ("entries of other keys", "found", "per lookup and file", "expected", f"per lookup in {files:,} files")
    return Table(title, columns, tuple(rows))


def _hashed(first: int, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
    parts = []
    for start in range(first, first + count, _BATCH):
        numbers = np.arange(start, min(start + _BATCH, first + count))
        parts.append(hash_batch([TOPIC], np.zeros(len(numbers), np.int64), code_units(key_array(numbers))))
    return np.concatenate([hashes for hashes, _ in parts]), np.concatenate([marks for _, marks in parts])
