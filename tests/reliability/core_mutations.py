"""Changes bytes and corrects their checksums, then compares the compiled core with NumPy on each changed file.

    python -m tests.reliability.core_mutations --all
    python -m tests.reliability.core_mutations --kind packed --first 70000 --count 5000

Each change depends only on its seed. To continue a stopped campaign, use `--first`; a failure names the command that
repeats it. A lookup must have NumPy's answer or a typed error. Each file is in memory of exactly its size, so
`python -m tests.support.native --mutations` (AddressSanitizer) detects a read behind it.
"""

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.reliability import resealed
from tests.reliability.tally import Tally, main
from tests.support.core import compiled_core, using
from tiered_index.base.call import UNBOUNDED
from tiered_index.base.kernels import compiled_views, crc32
from tiered_index.errors import CorruptFile, TieredIndexError
from tiered_index.format import compacted as compaction
from tiered_index.format import shard
from tiered_index.format.compacted import Compaction
from tiered_index.format.journal import Journal
from tiered_index.format.keys.hashing import lookup_numbers
from tiered_index.format.layout import NATIVE, ROCKETMQ, Layout, SlotMap
from tiered_index.format.metadata import Metadata
from tiered_index.format.packed import PackingOptions
from tiered_index.format.schema import row_form
from tiered_index.format.shard import ShardWriter, answer_sorted
from tiered_index.format.trailer import GROUP_DTYPE, TAIL_SIZE, Directory, Trailer, parse_trailer
from tiered_index.format.unsealed import UnsealedTable
from tiered_index.service.read.answers.batch import LookupBatch, Matches, OrderedRows, in_core
from tiered_index.service.read.answers.rows import PreparedLookup
from tiered_index.service.read.files.compacted import LocalBytes
from tiered_index.service.read.files.file_search import collected, search_file
from tiered_index.service.read.files.unsealed import UnsealedFile
from tiered_index.storage.base import OpenObject
from tiered_index.types import Lookup

T = 1_700_000_000
_TOTAL = 1_000_000
TOPICS = {0: "t", 2**30: "u", 2: "t"}
# two of them have the same Java hash; others have a negative one
KEYS = ("Aa", "BB", "ключ", *(f"key{number}" for number in range(30)))
_FAMILY = {"native": NATIVE, "rocketmq": ROCKETMQ, "table": NATIVE}
KINDS = (*_FAMILY, "unsealed")
# number of seeds that use the same file
_OF_ONE_FILE = 50


class InMemory(LocalBytes):
    """A compacted file in memory of exactly its size, without a mapping."""

    def __init__(self, data: bytes, trailer: Trailer | None = None) -> None:
        self.file = "file"
        room = np.frombuffer(data, np.uint8).copy()
        self.data = memoryview(room)  # type: ignore[assignment, arg-type]
        self.size_bytes = len(data)
        self.words = room[: len(room) // 8 * 8].view(np.uint64)
        self._trailer = parse_trailer(data, self.file, len(data)) if trailer is None else trailer
        if self._trailer.tail.filter_length % 32:
            raise CorruptFile(self.file, "the filter is not made of blocks of 32 bytes")
        self._in_core = None


class _Source:
    """Supplies the core with a changed file as from a storage, whose bytes are in the page cache."""

    crc32 = staticmethod(crc32)

    def __init__(self, file: InMemory) -> None:
        self._file, self._metadata = file, file.trailer().metadata
        self.seconds = self._metadata.second_min, self._metadata.second_max

    def in_core(self) -> Any:
        """Return the core's file."""
        schema, slots = self._metadata.layout.schema, self._metadata.slot_map
        file = compiled_views().LocalFile(row_form(schema), None, None, 0, 0, slots.base)
        return file.from_source(self, *self.seconds, (slots.split, slots.join, 0, slots.slots))

    def open(self, file: Any, _call: object, _reads: bool) -> int:
        """See `LocalFile.from_source`."""
        return -1 if self._file.trailer().give_to(file) is None else 0

    def block(self, at: int, size: int, crc: int, _: object) -> Any:
        """See `LocalFile.from_source`."""
        data = bytes(self._file.data[at : at + size])
        return data if len(data) == size and crc32(data) == crc else None

    def miss(self, *_: object) -> None:
        """Ignore a miss."""

    def open_now(self) -> OpenObject:
        """See `LocalFile.from_source`."""
        with tempfile.TemporaryFile() as file:
            file.write(self._file.data)
            file.flush()
            return OpenObject(os.dup(file.fileno()))


def _try_stored(random: Random, file: InMemory, schema: Any) -> bool:
    """Compare lookups through a view of a stored file with NumPy's; return whether rows were compared."""
    source = _Source(file)
    view = compiled_views().View(row_form(schema), [(source.in_core(), *source.seconds)], ["file"])
    batch = _batch(random)
    batch.allow_partial = True
    with using(None):
        matches = _outcome(lambda: collected(search_file(file, batch)))
    if isinstance(matches, str):
        return False
    damaged = {number for numbers, _ in matches.damage for number in numbers.tolist()}
    expected = _many(lambda _: matches, batch, schema, file.trailer().metadata)()
    search = in_core(view, batch, batch.under("mask")[0].key_hash, stored=True)
    owners, rows, left, *_ = search.find(0, len(batch))
    # one slot is the whole file here, so nothing but pairs can be left
    away = damaged | set(np.frombuffer(left, np.int64)[1::2].tolist())
    answers = _many(
        lambda _: Matches(np.frombuffer(owners, np.int64), np.frombuffer(rows, schema.row)), batch, schema
    )()
    for number in range(len(batch)):
        assert number in away or answers[number] == expected[number], (
            f"lookup {number} in a view: {answers[number]!r:.200}, and NumPy {expected[number]!r:.200}"
        )
    return len(away) < len(batch) and any(answers)


def _entries(random: Random, layout: Layout, count: int) -> Any:
    rng = np.random.default_rng(random.randrange(2**32))
    numbers = [lookup_numbers("t", KEYS[number]) for number in rng.integers(0, len(KEYS), count)]
    columns = {name: rng.integers(0, 3, count) for name in ("topic_id", "queue_id", "size")}
    columns["topic_id"] = np.array([*TOPICS])[columns["topic_id"]]
    columns["offset"] = np.sort(rng.integers(0, 10**6, count))
    columns["fingerprint"] = np.array([fingerprint for *_, fingerprint in numbers], np.uint32)
    hashes, seconds = np.array([key_hash for key_hash, *_ in numbers], np.int32), T + columns["offset"] // 2_000
    table = UnsealedTable(layout, T * 1000)
    batch = table.prepare(hashes, seconds * 1000, columns)
    table.commit(batch)
    return table, batch.entries


@lru_cache(16)
def whole_file(kind: str, number: int) -> tuple[bytes, Trailer]:
    """Return a file of `KEYS`, and its trailer. Some files have many slot groups, and groups in blocks."""
    random, family = Random(f"{kind} {number}"), _FAMILY[kind]
    layout = Layout(family, family.schema, random.choice([1, 7, 64]), 2_000)
    count = random.choice([1, 9, 60, 60, 200, 700])
    group_bytes = random.choice([256, 2048, compaction.GROUP_BYTES])
    with pytest.MonkeyPatch.context() as patch:
        for module in (compaction, shard):
            patch.setattr(module, "GROUP_BYTES", group_bytes)
            patch.setattr(module, "BLOCK_BYTES", 4 * group_bytes)
        _, entries = _entries(random, layout, count)
        if kind == "table":
            slots = SlotMap(layout.slots)
            items = np.zeros(count, layout.schema.item)
            for name in items.dtype.names or ():
                items[name] = entries[name]
            items = items[answer_sorted(items, T + items["time_diff_s"].astype(np.int64), slots, layout.schema)]
            options = PackingOptions.of(items, TOPICS, 10**6)
            times = T * 1000, T * 1000 + 3_599_999
            writer = ShardWriter(layout, slots, (0, slots.slots), *times, count, options)
            parts = [writer.begin(), bytes(writer.add(items))]
            data = b"".join([*parts, writer.finish("table", "", "", TOPICS, {"table": "table"})])
        else:
            compacted = Compaction(entries, layout, T * 1000, T * 1000 + 1_000_000)
            about = {"source_positions": {}, "lane": "main", "offset_space": "", "writer": ""}
            data = b"".join(compacted.pieces(file_id="file", topics=tuple(TOPICS.items()), **about))
    return data, parse_trailer(data, "file", len(data))


def _changed_body(random: Random, data: bytes, whole: Trailer) -> InMemory:
    """Change bytes of a slot group or block, and correct its checksums."""
    room = bytearray(data)
    tail = whole.tail
    at = tail.directory_position
    groups = np.frombuffer(room, GROUP_DTYPE, len(whole.directory.groups), at + 8)
    blocks = np.frombuffer(room, whole.directory.blocks.dtype, len(whole.directory.blocks), at + 8 + groups.nbytes)
    group = groups[random.randrange(len(groups))]
    start, length = int(group["offset"]), int(group["length"])
    # mostly headers of packed runs
    reach = random.choice([min(length, 60), length])
    for _ in range(random.choice([1, 1, 2, 5]) if reach else 0):
        some = [0, 1, 64, 65, 127, 128, 255, random.randrange(256)]
        room[start + random.randrange(reach)] = random.choice(some)
    group["crc32"] = crc32(room[start : start + length])
    for block in blocks[int(group["first_block"]) :][: int(group["blocks"])]:
        block["crc32"] = crc32(room[int(block["offset"]) : int(block["offset"]) + int(block["length"])])
    del groups, blocks, group
    directory = bytes(room[at : at + tail.directory_length])
    tail = tail._replace(directory_crc32=crc32(directory))
    room[-TAIL_SIZE:] = tail.encode()
    # the metadata is unchanged
    return InMemory(bytes(room), Trailer(tail, Directory.decode(directory, "file"), whole.metadata))


def _drawn_lookup(random: Random) -> PreparedLookup:
    low, high = sorted((T + random.randrange(-10, 600), random.choice([T + random.randrange(600), 2**40])))
    topic, key = random.choice(["t"] * 8 + ["u", "absent"]), random.choice([*KEYS, "absent"])
    return PreparedLookup(topic, key, *lookup_numbers("t", key), low, high, random.choice([1, 3, 64, 2_000]))


def _outcome(search: Callable[[], Any]) -> Any:
    try:
        return search()
    except TieredIndexError as error:
        return type(error).__name__


def first_rows(rows: Any, schema: Any, limit: int) -> Any:
    """Return the first `limit` distinct rows of one lookup."""
    ordered = OrderedRows(1, [Matches(np.zeros(len(rows), np.int64), rows)], schema)
    return ordered.first(np.array([limit])).rows


def _single(file: Any, lookup: PreparedLookup, schema: Any) -> Any:
    return lambda: first_rows(file(LookupBatch.of_one(lookup)).rows, schema, lookup.max_count + 1).tobytes()


def _many(file: Any, batch: LookupBatch, schema: Any, metadata: Metadata | None = None) -> Any:
    """Return the search of a file for a batch. It has only lookups that overlap the file's interval."""
    within = np.ones(len(batch), bool) if metadata is None else batch.within(metadata)

    def answers() -> list[bytes]:
        matches = file(batch)
        most = batch.max_count.tolist()
        return [
            first_rows(matches.rows[matches.lookups == number], schema, most[number] + 1).tobytes()
            if within[number] and (matches.lookups == number).any()
            else b""
            for number in range(len(batch))
        ]

    return answers


def _compare(core: ModuleType, what: str, make: Callable[[], Any]) -> bool:
    """Compare the results of the core and of NumPy. Return whether they are rows."""
    with using(core):
        outcome = _outcome(make)
    with using(None):
        expected = _outcome(make)
    assert outcome == expected, f"{what}: {outcome!r:.300}, and NumPy {expected!r:.300}"
    return not isinstance(outcome, str) and any(outcome)


def _batch(random: Random) -> LookupBatch:
    prepared = [_drawn_lookup(random) for _ in range(random.choice([1, 5]))]
    lookups = [
        Lookup(lookup.topic, lookup.key, max(0, lookup.second_min * 1000), None, lookup.max_count)
        for lookup in prepared
    ]
    return LookupBatch(lookups)


def try_compacted(core: ModuleType, kind: str, seed: int) -> bool:
    """Look up in a compacted file or the shard of a window table; return whether rows were compared."""
    random = Random(f"{kind} {seed}")
    data, whole = whole_file(kind, seed // _OF_ONE_FILE)
    try:
        if random.random() < 0.2:
            file = InMemory(resealed.compacted(random, data))
        else:
            file = _changed_body(random, data, whole)
    except TieredIndexError:
        return False
    schema, lookup = file.trailer().metadata.layout.schema, _drawn_lookup(random)
    # the keys of changed items are not in the filter
    file._trailer = replace(file._trailer, tail=file._trailer.tail._replace(filter_length=0))
    has_rows = _compare(core, "search", _single(file.search, lookup, schema))
    if random.random() < 0.2:
        stored = _single(lambda prepared: collected(search_file(file, prepared)), lookup, schema)
        has_rows |= _compare(core, "stored search", stored)
    if random.random() < 0.1:
        has_rows |= _try_stored(random, file, schema)
    if random.random() < 0.1:
        batch, metadata = _batch(random), file.trailer().metadata
        _compare(core, "search of a batch", _many(file.search, batch, schema, metadata))
        stored_many = _many(lambda many: collected(search_file(file, many)), batch, schema, metadata)
        _compare(core, "stored search of a batch", stored_many)
    return has_rows


def try_unsealed(core: ModuleType, kind: str, seed: int) -> bool:
    """Look up in an unsealed file with arbitrary entries and chains. Return whether rows were compared."""
    random = Random(f"{kind} {seed}")
    family = random.choice([NATIVE, ROCKETMQ])
    table, data = _unsealed(family, seed // _OF_ONE_FILE)
    size, layout = table.layout.schema.entry.itemsize, table.layout
    room, heads = data.copy(), table.heads.copy()
    for _ in range(random.choice([1, 1, 3])):
        place = layout.entry_position(random.randrange(1, table.count + 1))
        # the link is the last column
        place += random.choice([size - 4 + random.randrange(4), *(random.randrange(size - 4) for _ in range(4))])
        room[place] = random.choice([0, 1, 127, 128, 255, random.randrange(256)])
    if random.random() < 0.2:
        wrong = [0, -1, layout.items - 1, layout.items, 2**31 - 1, -(2**31), 7]
        heads[random.randrange(len(heads))] = random.choice(wrong)
    file = UnsealedFile.__new__(UnsealedFile)
    changed = UnsealedTable(layout, T * 1000)
    changed.count, changed.heads = table.count, heads
    ids: dict[str, frozenset[int]] = {}
    for topic_id, name in TOPICS.items():
        ids[name] = ids.get(name, frozenset()) | {topic_id}
    with using(core):
        core_file = compiled_views().LocalFile(row_form(layout.schema), room, ids, 0, T, layout.slots)
    core_file.within(T - 2**31, T + 2**31)
    about = {
        "table": changed,
        "layout": layout,
        "schema": layout.schema,
        "where": "f",
        "journal": Journal("f", layout, T * 1000, "main", 0, "custom", topics=dict(TOPICS)),
        "_begin_s": T,
        "second_min": T - 2**31,
        "second_max": T + 2**31,
        "_ids": ids,
        "_map": memoryview(room),
        "_in_core": core_file.with_chains(heads, layout.items_position, layout.items),
    }
    vars(file).update(about)

    def search(batch: LookupBatch) -> Matches:
        return file.search(batch, UNBOUNDED)

    # a scan searches files with a wrong chain, and finds entries that no chain reaches
    broken, has_rows = _is_broken(file), False
    for lookup in (_drawn_lookup(random), _drawn_lookup(random)):
        if not broken:
            has_rows |= _compare(core, "search", _single(search, lookup, layout.schema))
        else:
            with using(core):
                _outcome(_single(search, lookup, layout.schema))
    if random.random() < 0.2:
        batch = _batch(random)
        with using(core):
            _outcome(_many(search, batch, layout.schema))
        if not broken:
            _compare(core, "search of a batch", _many(search, batch, layout.schema))
    return has_rows


def _is_broken(file: UnsealedFile) -> bool:
    """Return whether a chain of a file does not descend, or belongs to another slot."""
    layout, table = file.layout, file.table
    entries = np.frombuffer(file._map, layout.schema.entry, layout.items, layout.items_position)
    following = entries["previous"].astype(np.int64)
    index = table.heads.astype(np.int64)
    for _ in range(layout.items + 1):
        index = index[index != 0]
        if not len(index):
            return False
        if (index < 0).any() or (index >= layout.items).any() or (following[index] >= index).any():
            return True
        index = following[index]
    return True


@lru_cache(8)
def _unsealed(family: Any, number: int) -> tuple[UnsealedTable, Any]:
    random = Random(f"unsealed {family.name} {number}")
    layout = Layout(family, family.schema, random.choice([1, 7, 64]), random.choice([61, 300]))
    table, entries = _entries(random, layout, random.choice([1, 30, 60]))
    body = (
        table.header().pack() + b"".join(table.slot_pieces()) + bytes(layout.schema.entry.itemsize) + entries.tobytes()
    )
    return table, np.frombuffer(body.ljust(layout.unsealed_size, b"\0"), np.uint8)


def run(core: ModuleType, counts: dict[str, int], first: int = 0, *, shows: bool = False) -> Tally:
    """Try the given number of seeds of each kind, from `first` on."""
    tally = Tally("core_mutations")
    for kind, count in counts.items():
        for seed in range(first, first + count):
            try:
                tally.tried[f"with rows, of {kind}"] += (try_unsealed if kind == "unsealed" else try_compacted)(
                    core, kind, seed
                )
            except Exception as error:  # noqa: BLE001 - every exception is a finding
                again = f"python -m tests.reliability.core_mutations --kind {kind} --first {seed} --count 1"
                tally.fail_by(error, again)
            tally.tried[f"changes of {kind}"] += 1
            if shows and seed % 10_000 == 9_999:
                print(f"{kind}: {seed + 1:,}, {len(tally.failures)} failures", file=sys.stderr, flush=True)
            if len(tally.failures) >= 40:
                return tally
    return tally


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=20_000, help="changes in all")
    parser.add_argument("--all", action="store_true", help=f"{_TOTAL:,} of them")
    parser.add_argument("--first", type=int, default=0, help="the first seed of each kind")
    parser.add_argument("--kind", action="append", default=[], choices=KINDS, help="only these kinds of files")


def _run(options: argparse.Namespace) -> Tally:
    logging.getLogger("tiered_index").setLevel(logging.CRITICAL)
    kinds = options.kind or KINDS
    each = -(-(_TOTAL if options.all else options.count) // len(kinds))
    return run(compiled_core(), dict.fromkeys(kinds, each), options.first, shows=True)


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", _run, _add_arguments))
