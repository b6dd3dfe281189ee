"""A view answers what the NumPy reference answers, file by file, whatever the files hold; it reads no hostile bytes."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core import compiled_core, using
from tests.support.disk_faults import FaultDisk
from tiered_index import IndexService
from tiered_index.clock import ManualClock
from tiered_index.errors import TieredIndexError
from tiered_index.format.compacted import Compaction
from tiered_index.format.hashing import lookup_numbers
from tiered_index.format.layout import NATIVE, ROCKETMQ, Layout
from tiered_index.format.trailer import GROUP_DTYPE, TAIL_SIZE, Tail
from tiered_index.format.unsealed import UnsealedTable
from tiered_index.kernels import crc32
from tiered_index.service.answers.rows import PreparedLookup, first_answers
from tiered_index.service.files.compacted import open_local
from tiered_index.service.files.view import LocalView, notes_of
from tiered_index.storage.memory import MemoryStorage

T = 1_700_000_000
NEVER = 2**40
TOPICS = ("t", "u", "тема")
# of two of them Java's hashes are equal; of others they are negative
KEYS = ("Aa", "BB", "ключ", *(f"key{number}" for number in range(30)))


@pytest.fixture(scope="module")
def core():
    """The compiled core."""
    return compiled_core()


def put(index: IndexService, random_: random.Random, count: int) -> None:
    """Put entries that come in any order, of which some repeat others in all but their size."""
    numbers = [random_.randrange(200) for _ in range(count)]
    index.put_batch(
        {
            "topic": [random_.choice(TOPICS[:2]) for _ in numbers],
            "key": [random_.choice(KEYS[: random_.choice([3, len(KEYS)])]) for _ in numbers],
            "queue_id": [number % 3 for number in numbers],
            "offset": [number // 2 for number in numbers]
            if random_.random() < 0.5
            else random_.sample(range(10_000), count),
            "size": [random_.randrange(1, 4) for _ in numbers],
            "timestamp_ms": [(T + random_.randrange(600)) * 1000 for _ in numbers],
        }
    )


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    preset=st.sampled_from([{}, {"preset": "rocketmq"}, {"preset": "rocketmq", "hash": "mask"}]),
    steps=st.lists(st.sampled_from(["put", "put", "flush", "seal", "compact"]), min_size=1, max_size=9),
)
def test_lookups_answer_what_the_reference_does(core, tmp_path_factory, seed, preset, steps):
    random_, clock = random.Random(seed), ManualClock(T * 1000)
    given_ = {"slots": 5, "items": 150, "background": False, "clock": clock, "query_threads": 2, **preset}
    root, storage = tmp_path_factory.mktemp("root"), MemoryStorage(clock=clock)
    index = IndexService.open(root=root, storage_backend=storage, disk=FaultDisk(), **given_)
    try:
        for step in steps:
            if step == "put":
                put(index, random_, random_.randrange(1, 120))
            elif step == "flush":
                index.flush()
            else:
                index.seal()
                if step == "compact":
                    index.run_lifecycle()
        for _ in range(40):
            compare(core, index, random_)
    finally:
        index.abandon()


def compare(core: Any, index: IndexService, random_: random.Random) -> None:
    begin, end = (random_.choice([None, (T + random_.randrange(-50, 650)) * 1000]) for _ in range(2))
    if begin is not None and end is not None:
        begin, end = min(begin, end), max(begin, end)
    asked = random_.choice(TOPICS), random_.choice([*KEYS, "absent"]), begin, end, random_.choice([1, 2, 5, 64, 2**70])
    with using(core):
        found = index.query(*asked)
    with using(None):
        expected = index.query(*asked)
        assert found.items == expected.items
        assert found.unknown_topics == expected.unknown_topics
        if found.status != expected.status:
            # files whose order differs: one of both has not looked on, and can't know that nothing follows
            short = found if found.status == "truncated" else expected
            rest = index.query(*asked, short.cursor)
            assert {found.status, expected.status} == {"complete", "truncated"} and not rest.items
        else:
            assert found.cursor == expected.cursor
    if found.cursor is not None:
        following = index.query(*asked, found.cursor)
        with using(None):
            assert following.items == index.query(*asked, found.cursor).items
    reports = [{report.file: report.matched for report in one.explain.files} for one in (found, expected)]
    assert reports[0].keys() == reports[1].keys()
    if found.status == expected.status == "complete":
        assert reports[0] == reports[1]
        assert found.explain.files_read == expected.explain.files_read


def compacted(seed: int, family: Any, *, packed: bool) -> tuple[Layout, bytes, str]:
    """Return a compacted file of `KEYS`, some entries each."""
    layout, random_ = Layout(family, family.schema, 7, 2_000), np.random.default_rng(seed)
    count = 700
    numbers = [lookup_numbers("t", KEYS[number]) for number in random_.integers(0, len(KEYS), count)]
    columns = {name: random_.integers(0, 3, count) for name in ("topic_id", "queue_id", "size")}
    columns["offset"] = np.sort(random_.integers(0, 10**6, count))
    columns["fingerprint"] = np.array([fingerprint for *_, fingerprint in numbers], np.uint32)
    table = UnsealedTable(layout, T * 1000)
    hashes, seconds = np.array([key_hash for key_hash, *_ in numbers], np.int32), T + columns["offset"] // 2_000
    batch = table.prepare(hashes, seconds * 1000, columns)
    compaction = Compaction(batch.entries, layout, T * 1000, T * 1000 + 1_000_000, packed=packed)
    file_id = "001700000000000-0123456789ab"
    topics = ((0, "t"), (1, "u"), (2, "t"))
    about = {"source_positions": {}, "lane": "main", "offset_space": "", "writer": "", "topics": topics}
    return layout, b"".join(compaction.pieces(file_id=file_id, **about)), file_id


def damaged(data: bytes, random_: random.Random) -> bytes:
    """Return a file with bytes of another meaning, which match their checksums."""
    changed = bytearray(data)
    tail = Tail.decode(data, "file", len(data))
    directory = slice(tail.directory_position, tail.directory_position + tail.directory_length)
    count = int.from_bytes(data[directory.start : directory.start + 4], "big")
    groups = np.frombuffer(changed, GROUP_DTYPE, count, directory.start + 8)
    group = groups[random_.randrange(count)]
    if random_.random() < 0.15:
        name = random_.choice(GROUP_DTYPE.names or ())
        group[name] = random_.choice([0, 1, 2**31, 2**32 - 1, int(group[name]) ^ 1 << random_.randrange(31)])
    else:
        start, length = int(group["offset"]), int(group["length"])
        # headers of packed runs most of all
        reach = random_.choice([min(length, 60), length])
        for _ in range(random_.choice([1, 1, 2, 5]) if reach else 0):
            changed[start + random_.randrange(reach)] = random_.choice(
                [0, 1, 64, 65, 127, 128, 255, random_.randrange(256)]
            )
        group["crc32"] = crc32(changed[start : start + length])
    del group, groups
    sums = tail._replace(directory_crc32=crc32(changed[directory]))
    changed[-TAIL_SIZE:] = sums.encode(int.from_bytes(data[-TAIL_SIZE + 8 : -TAIL_SIZE + 12], "big"))
    return bytes(changed)


def asked(random_: random.Random) -> PreparedLookup:
    low, high = sorted((T + random_.randrange(-10, 600), random_.choice([T + random_.randrange(600), NEVER])))
    key = random_.choice(KEYS)
    return PreparedLookup("t", key, *lookup_numbers("t", key), low, high, random_.choice([1, 3, 64]))


def assert_same(view: LocalView, handle: Any, lookup: PreparedLookup) -> bool:
    """Compare a view of one file with NumPy; return whether the view has left the file to it."""
    found = view.find(lookup)
    if found is None or view.left(found) or not any(notes_of(found)):
        return True
    with using(None):
        rows = handle.search(lookup)
    schema = handle.layout.schema if hasattr(handle, "layout") else handle.metadata().layout.schema
    assert found.rows == first_answers(rows, schema, lookup.max_count + 1).tobytes()
    return False


KINDS = {"packed": (NATIVE, True), "plain": (NATIVE, False), "rocketmq": (ROCKETMQ, False)}


def fuzz_compacted(core: Any, folder: Path, kind: str, rounds: int, seed: int) -> int:
    """Look up in files of hostile bytes; return how many lookups the view has answered itself."""
    family, packed = KINDS[kind]
    random_, answered = random.Random(seed), 0
    _, data, file_id = compacted(seed, family, packed=packed)
    for number in range(rounds):
        path = folder / str(number % 2) / f"{file_id}"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(damaged(data, random_))
        try:
            handle = open_local(path)
        except TieredIndexError:
            continue
        view = LocalView(family.schema, [handle])
        answered += sum(not assert_same(view, handle, asked(random_)) for _ in range(3))
        handle.let_go()
    return answered


def fuzz_unsealed(core: Any, folder: Path, rounds: int, seed: int) -> int:
    """Look up in an unsealed file whose chains lead anywhere; return how many lookups the view has answered itself."""
    random_, answered = random.Random(seed), 0
    settled = {"slots": 7, "items": 300, "background": False, "clock": ManualClock(T * 1000)}
    index = IndexService.open(root=folder / "root", storage_backend=MemoryStorage(), disk=FaultDisk(), **settled)
    try:
        put(index, random_, 250)
        index.flush()
        (handle,) = index.files()
        size, heads = handle.layout.schema.entry.itemsize, handle.table.heads.copy()
        whole = handle.path.read_bytes()
        with handle.path.open("r+b", buffering=0) as stream:
            for _ in range(rounds):
                place = handle.layout.entry_position(random_.randrange(1, 251))
                place += random_.choice([size - 4 + random_.randrange(4), random_.randrange(size)])
                stream.seek(place)
                stream.write(bytes([random_.choice([0, 1, 127, 128, 255, random_.randrange(256)])]))
                handle.table.heads[random_.randrange(7)] = random_.choice([0, -1, 299, 300, 2**31 - 1, -(2**31), 7])
                view = LocalView(handle.layout.schema, [handle])
                answered += sum(not assert_same(view, handle, asked(random_)) for _ in range(3))
                stream.seek(place)
                stream.write(whole[place : place + 1])
                handle.table.heads[:] = heads
    finally:
        index.abandon()
    return answered


@pytest.mark.parametrize(("items", "walks"), [(300 * 32, True), (299 * 32, False)])
def test_a_chain_is_walked_if_it_is_short_beside_its_file(core, tmp_path, items, walks):
    settled = {"slots": 1, "items": items, "background": False, "storage_backend": MemoryStorage()}
    with IndexService.open(root=tmp_path / "root", disk=FaultDisk(), **settled) as index:
        for number in range(301):
            index.put("t", 0, "k", number, 1, T * 1000)
        index.flush()
        (handle,) = index.files()
        lookup = PreparedLookup("t", "k", *lookup_numbers("t", "k"), 0, NEVER, 999)
        view = LocalView(handle.layout.schema, [handle])
        found = view.find(lookup)
        assert found is not None and bool(view.left(found)) != walks
        found = index.query("t", "k", max_count=999)
        # other processes get the schema of what was looked up
        assert pickle.loads(pickle.dumps(handle.layout)) == handle.layout
        assert [item.offset for item in found] == list(range(300, -1, -1))
        assert [len(answer) for answer in index.query_many([("t", "k"), ("t", "no")], max_count=999)] == [301, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_no_bytes_of_a_compacted_file_are_read_outside_it(core, tmp_path, kind):
    assert fuzz_compacted(core, tmp_path, kind, 60, 1)


def test_no_chain_of_an_unsealed_file_leads_outside_it(core, tmp_path):
    assert fuzz_unsealed(core, tmp_path, 150, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "unsealed"])
def test_a_million_changes(core, tmp_path, kind):
    for seed in range(50):
        if kind == "unsealed":
            (tmp_path / str(seed)).mkdir()
            fuzz_unsealed(core, tmp_path / str(seed), 5_000, seed)
        else:
            fuzz_compacted(core, tmp_path, kind, 5_000, seed)
