"""Lookups over many local files gather filters, stop early in chains, and run batches in several threads."""

import copy
import itertools

import numpy as np
import pytest

from tests.reliability.core_mutations import InMemory
from tests.support.batches import batch
from tests.support.core import compiled_core, using
from tests.support.rounds import upload
from tiered_index.format.compacted import Compaction, filter_of
from tiered_index.format.hashing import lookup_numbers
from tiered_index.format.layout import NATIVE, Layout
from tiered_index.format.schema import row_form
from tiered_index.format.trailer import parse_trailer
from tiered_index.format.unsealed import UnsealedTable
from tiered_index.kernels import compiled_views
from tiered_index.service.read.batch import LookupBatch, in_core
from tiered_index.service.read.file_view import LocalView
from tiered_index.service.read.rows import PreparedLookup
from tiered_index.service.read.unsealed import UnsealedFile
from tiered_index.types import Lookup

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


def file_of(number, keys=None):
    """Return the compacted file of second `number`, in memory that a test can change."""
    keys = keys or [f"of{number}", *(["third"] if number % 3 == 0 else []), *(f"{number}-{n}" for n in range(90))]
    compaction = Compaction(entries_of(keys, number), LAYOUT, T * 1000, (T + number) * 1000, packed=True)
    about = {"source_positions": {}, "lane": "main", "offset_space": "", "writer": ""}
    data = b"".join(compaction.pieces(file_id=f"file{number}", topics=((0, "t"),), **about))
    return InMemory(data, parse_trailer(data, "file", len(data)))


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


def test_slices_of_few_files_take_half_the_memory(fresh):
    of_33, of_32 = (warm(view_of(part)).bytes_together for part in (fresh[:33], fresh[33:65]))
    assert of_32 < 0.6 * of_33
    files = [file_of(number) for number in range(15)]
    view = view_of(files)
    for number in range(40):
        find(view, f"warm{number}")
    assert not view.bytes_together


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
    compaction = Compaction(entries, layout, T * 1000, T * 1000, packed=True)
    about = {"source_positions": {}, "lane": "main", "offset_space": "", "writer": ""}
    data = b"".join(compaction.pieces(file_id="file", topics=((0, "t"),), **about))
    file = InMemory(data)
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


@pytest.mark.parametrize("together", [False, True])
def test_a_batch_has_the_rows_of_its_lookups(fresh, together):
    view = warm(view_of(fresh)) if together else view_of(fresh)
    lookups = [Lookup("t", key, max_count=2 + number % 9) for number, key in enumerate(KEYS)]
    lookups += [Lookup("other", "third"), Lookup("t", "third", (T + 30) * 1000, (T + 50) * 1000)]
    asking = LookupBatch(lookups)
    batch_in_core = in_core(view, asking, asking.key_hash)
    assert batch_in_core.left == []
    counts = np.zeros(len(fresh), np.int64)
    matched = []
    for span in itertools.pairwise((0, 30, 31, len(lookups))):
        owners, rows, left, numbers = batch_in_core.find(*span)
        assert not left
        counts += np.frombuffer(numbers, np.int64).reshape(-1, 5)[:, 0]
        table = np.frombuffer(rows, LAYOUT.schema.row)
        numbers = np.frombuffer(owners, np.int64)
        matched += zip(numbers.tolist(), table["second"].tolist(), table["offset"].tolist(), strict=True)
    wanted = [
        (number, *row)
        for number, lookup in enumerate(lookups)
        if lookup.topic == "t"
        for row in expected(ALL, lookup.key, *((T + 30, T + 50) if lookup.begin_ms else ()), most=len(ALL))
    ]
    assert matched == wanted and counts.sum() == len(wanted)
    for bad in ((-1, 1), (0, len(lookups) + 1)):
        with pytest.raises(ValueError, match="fewer lookups"):
            batch_in_core.find(*bad)


def put(index, count, key="k", first=0, step=1, topic="t"):
    numbers = range(first, first + count)
    times = [(T + step * number) * 1000 for number in numbers]
    index.put_batch(batch(count, topic=topic, key=key, offset=numbers, timestamp_ms=times))
    index.flush()


def steps(index, key="k", most=64, low=0):
    (handle,) = index.files()
    lookup = PreparedLookup("t", key, *lookup_numbers("t", key), low, NEVER, most)
    matches = LocalView(handle.layout.schema, [handle]).find(LookupBatch.of_one(lookup))
    assert matches is not None
    return matches.steps


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


def test_a_large_batch_has_the_answers_of_numpy(open_index):
    """Several threads answer its parts. The core leaves a slot group of blocks to the search of the file."""
    core = compiled_core()
    index = open_index(items=12_000, slots=50, query_threads=4)
    for number in range(4):
        for key in range(40):
            put(index, 3, f"k{key}", 100 * number + 3 * key)
        if number < 3:
            index.seal()
            index.run_lifecycle() if number else None
    put(index, 9_000, "giant")
    upload(index)
    lookups = [("t", key) for key in ("giant", "none", *(f"k{key}" for key in range(40)))] * 40
    with using(core):
        answers = index.query_many(lookups, max_count=30)
    with using(None):
        reference = index.query_many(lookups, max_count=30)
    assert [answer.items for answer in answers] == [answer.items for answer in reference]
    assert len(answers[0]) == 30 and len(answers[5]) == 12
    reports = [{report.file: report.outcome for report in results.explain.files} for results in (answers, reference)]
    assert reports[0] == reports[1] and answers.explain.files_read == len(reports[0])


def test_a_later_view_takes_over_gathered_filters(fresh):
    view = warm(view_of(fresh[1:]))
    size, bytes_of_files = view.bytes_together, sum(file.trailer().tail.filter_length for file in fresh[1:])
    assert bytes_of_files / 2 < size < 4 * bytes_of_files
    # a new file is added, and the oldest files are removed
    later = view_of(fresh[:-5])
    assert later.bytes_together == size
    for key in KEYS:
        assert rows_of(find(later, key)) == expected(ALL[:-5], key)
    # most files are removed, so the view checks the others' filters one by one
    few = view_of(fresh[70:90])
    assert few.bytes_together == 0
    assert rows_of(find(few, "third")) == expected(ALL[70:90], "third")


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


def test_repeats_in_a_long_chain_leave_the_answer_whole(open_index):
    core = compiled_core()
    index = open_index(slots=1, items=9_000)
    for _ in range(3):
        put(index, 500)
    with using(core):
        answer = index.query("t", "k", max_count=100)
        (many,) = index.query_many([("t", "k")], max_count=100)
    assert [item.offset for item in answer] == [item.offset for item in many] == list(range(499, 399, -1))
