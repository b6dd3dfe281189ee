"""Lookups over many local files gather filters, stop early in chains, and run batches in several threads."""

import copy
import itertools

import numpy as np
import pytest

from tests.reliability.core_mutations import InMemory
from tests.support.batches import batch
from tests.support.core import compiled_core
from tests.support.rounds import compact_only
from tiered_index.base.kernels import compiled_views
from tiered_index.errors import CorruptFile
from tiered_index.format.compacted import Compaction, filter_of
from tiered_index.format.keys.hashing import lookup_numbers
from tiered_index.format.layout import NATIVE, Layout
from tiered_index.format.schema import row_form
from tiered_index.format.trailer import TAIL_SIZE, Tail, parse_trailer
from tiered_index.format.unsealed import UnsealedTable
from tiered_index.service.read.answers.batch import LookupBatch
from tiered_index.service.read.answers.rows import PreparedLookup
from tiered_index.service.read.files.compacted import LocalBytes
from tiered_index.service.read.files.file_view import LocalView
from tiered_index.service.read.files.unsealed import UnsealedFile

T = 1_700_000_000
NEVER = 2**40
LAYOUT = Layout(NATIVE, NATIVE.schema, 16, 400)
# keys of one file each, of every third file, and of none
ALL = tuple(reversed(range(170)))
KEYS = [*(f"of{number}" for number in range(0, 170, 7)), "third", *(f"no{number}" for number in range(60))]


def entries_of(keys, second):
    columns = {name: np.zeros(len(keys), np.int64) for name in ("topic_id", "queue_id")}
    numbers = [lookup_numbers("t", key) for key in keys]
    columns["offset"] = columns["size"] = 1_000 * second + np.arange(len(keys))
    columns["fingerprint"] = np.array([fingerprint for *_, fingerprint in numbers], np.uint32)
    hashes = np.array([key_hash for key_hash, *_ in numbers], np.int32)
    times = np.full(len(keys), (T + second) * 1000, np.int64)
    return UnsealedTable(LAYOUT, T * 1000).prepare(hashes, times, columns).entries


def compacted(entries, layout, number):
    """Return a compacted file of second `number`, in memory that a test can change."""
    compaction = Compaction(entries, layout, T * 1000, (T + number) * 1000)
    about = {"source_positions": {}, "lane": "main", "offset_space": "", "writer": ""}
    data = b"".join(compaction.pieces(file_id=f"file{number}", topics=((0, "t"),), **about))
    return InMemory(data, parse_trailer(data, "file", len(data)))


def file_of(number):
    keys = [f"of{number}", *(["third"] if number % 3 == 0 else []), *(f"{number}-{n}" for n in range(90))]
    return compacted(entries_of(keys, number), LAYOUT, number)


@pytest.fixture(scope="module")
def files():
    """170 files of several sizes, a second each, the newest first."""
    compiled_core()
    return [file_of(number) for number in ALL]


@pytest.fixture
def fresh(files):
    """The same files, before any lookup uses their filters."""
    return [InMemory(bytes(file.data), file.trailer()) for file in files]


def view_of(files):
    core = compiled_views()
    seconds = [file.trailer().metadata.second_max for file in files]
    spans = [(file.in_core(), second, second) for file, second in zip(files, seconds, strict=True)]
    return core.View(row_form(LAYOUT.schema), spans, [f"label{second}" for second in seconds])


def find(view, key, low=0, high=NEVER, most=64, topic="t"):
    key_hash, masked_hash, fingerprint = lookup_numbers("t", key)
    matches = view.find(topic, key_hash, masked_hash, fingerprint, low, high, most)
    assert matches is not None and not matches.has_left
    return matches


def expected(numbers, key, low=0, high=NEVER, most=64):
    """Return (second, offset) of the answers in the files of these numbers."""
    rows = [(T + number, 1_000 * number) for number in numbers if key == f"of{number}"]
    if key == "third":
        rows = [(T + number, 1_000 * number + 1) for number in numbers if number % 3 == 0]
    return [row for row in rows if low <= row[0] <= high][:most]


def rows_of(matches, most=64):
    rows = np.frombuffer(matches.rows, LAYOUT.schema.row)
    return list(zip(rows["second"].tolist(), rows["offset"].tolist(), strict=True))[:most]


def warm(view):
    """Look up absent keys, so that the view checks its filters."""
    for number in range(40):
        find(view, f"warm{number}")
    assert view.bytes_together
    return view


# slices have words of half the size up to 32 files
@pytest.mark.parametrize("count", [170, 32, 17])
def test_filters_that_are_asked_together_change_no_answer(fresh, count):
    view, numbers = view_of(fresh[:count]), ALL[:count]
    for key in KEYS:
        assert rows_of(find(view, key)) == expected(numbers, key)
    assert view.bytes_together
    for key, most in itertools.product(KEYS, (1, 5, 64)):
        assert rows_of(find(view, key, most=most), most) == expected(numbers, key, most=most)
        bounds = T + numbers[-1] + 3, T + 160, most
        assert rows_of(find(view, key, *bounds), most) == expected(numbers, key, *bounds)


def test_slices_of_many_large_files_take_at_most_64_mib():
    """The filters of 170 files with 400,000 keys have 85 MiB. The files share their bytes."""
    compiled_core()
    keys = 400_000
    random = np.random.default_rng(6)
    columns = {name: np.zeros(keys, np.int64) for name in ("topic_id", "queue_id")}
    columns["offset"] = columns["size"] = np.arange(keys)
    columns["fingerprint"] = random.integers(0, 2**32, keys, np.uint32)
    hashes, times = random.integers(0, 2**31, keys).astype(np.int32), np.full(keys, T * 1000, np.int64)
    layout = Layout(NATIVE, NATIVE.schema, 16_000, keys + 1)
    entries = UnsealedTable(layout, T * 1000).prepare(hashes, times, columns).entries
    file = compacted(entries, layout, 0)
    files = [copy.copy(file) for _ in range(170)]
    view = warm(view_of(files))
    assert sum(file.trailer().tail.filter_length for file in files) > 64 << 20
    assert 32 << 20 < view.bytes_together <= 64 << 20


@pytest.mark.parametrize("count", [170, 20])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_a_filter_that_changes_in_the_map_hides_no_key(fresh, is_gathered, count):
    fresh = fresh[:count]
    view = view_of(fresh)
    # the filters are checked, but not gathered yet
    find(view, "no1")
    if is_gathered:
        warm(view)
    for file in fresh:
        tail = file.trailer().tail
        np.frombuffer(file.data, np.uint8)[tail.position : tail.directory_position] = 0
    for key in KEYS[:26]:
        assert rows_of(find(view, key)) == expected(ALL[:count], key)


def put(index, count, key="k", first=0, step=1, topic="t"):
    numbers = range(first, first + count)
    times = [(T + step * number) * 1000 for number in numbers]
    index.put_batch(batch(count, topic=topic, key=key, offset=numbers, timestamp_ms=times))
    index.flush()


def steps(index, key="k", most=64, low=0):
    (handle,) = index.files()
    lookup = PreparedLookup("t", key, *lookup_numbers("t", key), low, NEVER, most)
    rows = LocalView(handle.layout.schema, [handle]).find(LookupBatch.of_one(lookup))
    assert rows is not None
    return rows.noted.steps


@pytest.mark.parametrize("settings", [{}, {"preset": "rocketmq"}, {"preset": "rocketmq", "hash": "mask"}])
def test_a_sealed_file_has_the_filter_of_its_compacted_form(open_index, faulty, settings):
    compiled_core()
    index = open_index(items=900, slots=5, storage_backend=faulty, **settings)
    for key in range(150):
        put(index, 5, f"k{key}", 5 * key)
    index.seal()
    (handle,) = index.files()
    assert isinstance(handle, UnsealedFile) and steps(index, "none") > 100
    handle.make_filter()
    assert sum(steps(index, f"none{number}") == 0 for number in range(100)) > 90
    assert [item.offset for item in index.query("t", "k7")] == list(range(39, 34, -1))
    lookups = [("t", f"k{number}") for number in range(160)]
    assert [len(answer) for answer in index.query_many(lookups)] == [5] * 150 + [0] * 10
    entries = handle.entries()
    index.run_lifecycle()
    (handle,) = index.files()
    tail = handle.local.trailer().tail
    assert handle.local.data[tail.position : tail.directory_position] == filter_of(entries, index.schema)


def test_files_that_join_and_leave_a_slice_keep_their_answers(fresh):
    """One file has a damaged filter, and is never in a slice."""
    tail = fresh[21].trailer().tail
    np.frombuffer(fresh[21].data, np.uint8)[tail.position : tail.directory_position] ^= 0xFF
    of_files = [f"of{number}" for number in (*ALL[:30], *ALL[::9])]
    # files join, leave, and come back
    for begin, end in ((10, 40), (10, 45), (18, 120), (0, 170), (10, 40)):
        view = view_of(fresh[begin:end])
        for key in (*of_files, "third"):
            assert rows_of(find(view, key)) == expected(ALL[begin:end], key)
        assert view.bytes_together


def test_a_filter_with_part_of_a_block_is_damage(open_index, faulty):
    index = open_index(storage_backend=faulty)
    put(index, 9)
    compact_only(index, faulty)
    (path,) = (index.config.root / "compacted").iterdir()
    data = path.read_bytes()
    tail = Tail.decode(data, path.name, len(data))
    odd = tail._replace(filter_length=tail.filter_length - 1, directory_length=tail.directory_length + 1)
    path.write_bytes(data[:-TAIL_SIZE] + odd.encode())
    with pytest.raises(CorruptFile, match="not made of blocks of 32 bytes"):
        LocalBytes(path)
