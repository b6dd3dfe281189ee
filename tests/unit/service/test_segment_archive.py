"""Only the index's writer archives segments. A record names each archived segment once, and the segment is complete."""

import zlib
from itertools import product

import pytest
from msgspec import structs

from tests.support.later import sweep
from tests.support.log_records import GENESIS, open_log, segments_of
from tiered_index import IndexReader
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound, StorageUnavailable, WriterFenced
from tiered_index.format.segments.archived import HEAD_BYTES
from tiered_index.service.log.records import ArchivedSegment, LogRecord
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.segments import Segments, inline_catalog
from tiered_index.storage.memory import MemoryStorage


def names(storage, prefix="segments/"):
    return [info.name for info in storage.list(prefix)]


def content(size, seed=1):
    return bytes((at * seed + at // 251) % 256 for at in range(size))


def archive(index, data, start=0, store="s", modified_ms=None):
    return index.archive(store, start, len(data), lambda at, length: data[at : at + length], modified_ms)


def test_a_segment_is_uploaded_once(open_index, faulty):
    index = open_index(storage_backend=faulty)
    data = content(1000)
    assert archive(index, data, start=500) is True
    (segment,) = index.archived()
    assert (segment.store, segment.start, segment.end, segment.crc32) == ("s", 500, 1500, zlib.crc32(data))
    assert segments_of(index.log_state) == [segment]
    assert index.segment_archive.table(segment).pieces.tolist() == [zlib.crc32(data)]
    puts, number = faulty.calls("put"), index.log_state.number
    assert archive(index, data, start=500) is False
    assert (faulty.calls("put"), index.log_state.number) == (puts, number)
    assert archive(index, data, start=500, store="t") is True  # another store's segment
    assert [s.store for s in index.archived()] == ["s", "t"]
    assert index.archived("t")[0].store == "t"
    assert index.archived("u") == ()


def test_a_segment_that_was_rewritten_is_named(index, clock):
    """A younger file is compared whole, and an older one by its head."""
    data = content(HEAD_BYTES) * 2
    archive(index, data, 500)
    published_ms = index.archived()[0].published_ms
    assert published_ms == clock.now_ms()
    others = (content(len(data), 2), data[:-1], data + b"x")
    for other, modified_ms in (
        *product(others, (0, None)),
        *product([data[:-1] + b"!"], (None, published_ms, published_ms + 1)),
    ):
        with pytest.raises(CorruptFile, match=r"00000000000000000500 of s: .*segments/s/.*rewritten"):
            archive(index, other, 500, modified_ms=modified_ms)
    for modified_ms in (None, 10**15):
        assert archive(index, data, 500, modified_ms=modified_ms) is False
    read = []

    def reading(at, length):
        read.append((at, length))
        return data[at : at + length]

    assert index.archive("s", 500, len(data), reading, published_ms - 1) is False
    assert read == [(0, HEAD_BYTES)]
    assert len(index.archived()) == 1


def rewritten(index, data, rewritten_ms):
    return index.archive("s", 0, len(data), lambda at, length: data[at : at + length], 0, rewritten_ms)


def test_a_segment_that_is_known_to_be_rewritten_replaces_its_copy_by_one_record(open_index, storage, clock):
    index = open_index("a")
    old, new = content(HEAD_BYTES) * 2, content(HEAD_BYTES) + content(HEAD_BYTES, 3)
    archive(index, old)
    (before,) = index.archived()
    with pytest.raises(CorruptFile, match="rewritten"):  # the copy is younger
        rewritten(index, content(HEAD_BYTES, 3) * 2, before.published_ms - 1)
    assert rewritten(index, old, before.published_ms) is False
    number = index.log_state.number
    with IndexReader.open(storage_backend=storage) as reader:
        clock.advance(5)
        assert rewritten(index, new, before.published_ms) is True  # head and time equal those of the copy
        assert index.log_state.number == number + 1
        (after,) = index.archived()
        assert reader.segment_archive.read(before, 0, len(old)) == old  # a reader behind the log still has the old copy
        assert index.segment_archive.read(after, 0, len(new)) == new
        reader.refresh()
        assert reader.archived() == (after,)
    assert rewritten(index, new, before.published_ms) is False
    with pytest.raises(CorruptFile, match="rewritten"):
        rewritten(index, content(HEAD_BYTES, 5) * 2, before.published_ms)
    with pytest.raises(CorruptFile, match="another size"):
        rewritten(index, new[:-1], clock.now_ms())
    sweep(storage, open_log(storage, clock))
    assert names(storage) == [after.name]


def test_a_segment_that_overlaps_another_one_or_has_no_place_is_refused(index):
    archive(index, content(1000), start=500)
    for start, size in ((400, 101), (1499, 10), (600, 10), (0, 5000)):
        with pytest.raises(CorruptFile, match="overlaps"):
            archive(index, content(size), start=start)
    assert archive(index, content(100), start=400)
    assert archive(index, content(100), start=1500)
    for start, size in ((-1, 5), (0, 0)):
        with pytest.raises(InvalidArgument):
            index.archive("s", start, size, lambda at, length: b"")


def sending(index, what):
    """Return a function that sends a file or a segment (again), and one that returns its names in the log."""
    if what == "segments/":
        return lambda: archive(index, content(1000)), lambda: [segment.name for segment in index.archived()]
    index.put("t", 0, "k", 1, 1, 1_700_000_000_000)
    index.seal()
    return index.run_lifecycle, lambda: list(index.log_state.objects)


@pytest.mark.parametrize("what", ["segments/", "data/"])
@pytest.mark.parametrize("operation", ["put", "head"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_upload_leaves_nothing_and_is_repeated(open_index, faulty, what, operation, when):
    send, named = sending(open_index(storage_backend=faulty), what)
    faulty.fail(operation, when=when, name_prefix=what)
    with pytest.raises(StorageUnavailable):
        send()
    assert (names(faulty, what), named()) == ([], [])
    assert send()
    assert len(named()) == 1 and names(faulty, what) == named()


@pytest.mark.parametrize("size", [1000, 9 << 20])
@pytest.mark.parametrize("error", [StorageUnavailable, FileNotFoundError])
def test_a_segment_that_ends_early_or_raises_leaves_nothing(open_index, faulty, size, error):
    index = open_index(storage_backend=faulty)

    def reading(at, length):
        if at + length == size and error is FileNotFoundError:
            raise error("cut meanwhile")
        return bytes(length - (at + length == size))

    with pytest.raises(error, match="cut meanwhile"):
        index.archive("s", 0, size, reading)
    assert (names(faulty), index.archived()) == ([], ())


@pytest.mark.parametrize("what", ["segments/", "data/"])
def test_an_object_that_arrived_cut_short_is_not_recorded(open_index, storage, monkeypatch, what):
    whole = MemoryStorage.put

    def cut(self, name, data):
        whole(self, name, data[:-1] if name.startswith(what) else data)

    send, named = sending(open_index(storage_backend=storage), what)
    monkeypatch.setattr(MemoryStorage, "put", cut)
    with pytest.raises(StorageUnavailable, match="after its upload"):
        send()
    assert (names(storage, what), named()) == ([], [])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_record_of_unknown_outcome_is_there_once(open_index, faulty, when):
    """Of a new segment, and of one in the place of another."""
    index = open_index(storage_backend=faulty)
    faulty.fail("put_if_absent", when=when, name_prefix="log/")
    with pytest.raises(StorageUnavailable):
        archive(index, content(1000))
    puts = faulty.calls("put")
    assert archive(index, content(1000)) is (when == "before")
    # a new checkpoint, but no second object: the uploaded one is used
    assert faulty.calls("put") == puts + (when == "before")
    (before,) = index.archived()
    assert names(faulty) == [before.name]
    for data in (content(1000, 3), content(1000, 5)):
        with pytest.raises(StorageUnavailable):
            faulty.fail("put_if_absent", when=when, name_prefix="log/")
            rewritten(index, data, before.published_ms + 10**9)
    assert rewritten(index, data, before.published_ms + 10**9) is (when == "before")
    (after,) = index.archived()
    assert index.segment_archive.read(after, 0, 1000) == data


def test_queue_offsets_replace_a_segment_whose_record_had_an_unknown_outcome(open_index, faulty):
    index, data = open_index("a", storage_backend=faulty), content(1000)
    faulty.fail("put_if_absent", when="after", name_prefix="log/")
    with pytest.raises(StorageUnavailable):
        archive(index, data)
    (old,) = names(faulty)
    assert index.archive("s", 0, 1000, lambda at, length: data[at : at + length], queues=lambda: b"offsets")
    (segment,) = index.archived()
    assert segment.name != old and index.segment_archive.queue_offsets(segment) == b"offsets"


def test_a_segment_that_a_job_replaced_meanwhile_stays_as_the_job_left_it(open_index, storage, clock):
    """Otherwise messages that the job erased would come back."""
    index, data = open_index("a"), content(1000)
    archive(index, data)
    (before,) = index.archived()
    erased = structs.replace(before, name=f"{before.name[:-5]}x.log", source=(before.crc32, before.head_crc32))

    def queues():
        log = open_log(storage, clock)
        log.append(
            "an erasure", None, lambda s: LogRecord(0, "erase", 0, "", 0, **Segments(s).change([erased], [before]))
        )
        return b"offsets"

    assert index.archive("s", 0, 1000, lambda at, length: data[at : at + length], queues=queues) is False
    assert index.archived() == (erased,) and names(storage) == [before.name]


def test_a_writer_that_was_taken_over_archives_nothing(open_index, faulty, clock):
    """It takes back an object that it was sending meanwhile."""
    old = open_index("a", storage_backend=faulty)
    data, opened = content(1000), []

    def taken_over(at, length):
        clock.advance(3600)
        opened.append(open_index("b", storage_backend=faulty))
        return data[at : at + length]

    with pytest.raises(WriterFenced):
        old.archive("s", 0, len(data), taken_over)
    assert names(faulty) == [] and faulty.calls("put") > 0
    (new,) = opened
    archive(new, content(1000))
    with pytest.raises(WriterFenced):
        archive(old, content(1000), start=5000)
    assert names(faulty) == [new.archived()[0].name]


def test_a_lost_or_damaged_segment_is_damage_and_a_removed_one_is_not_there(index, storage):
    archive(index, content(1000))
    archive(index, content(1000, 3), start=2000)
    first, second = index.archived()
    stored = storage.get(first.name)
    # cut, another end, another segment
    for changed in (stored[:-1], stored[:-60] + bytes(60), storage.get(second.name)):
        storage.put(first.name, changed)
        with pytest.raises(CorruptFile, match=first.name):
            index.segment_archive.table(first)
    storage.delete_many([first.name])
    with pytest.raises(CorruptFile, match="storage does not"):
        index.segment_archive.read(first, 0, 5)
    log, epoch = index._session.log, index._session.epoch
    log.append("given up", epoch, lambda s: LogRecord(0, "remove", epoch, "", 0, **Segments(s).change([], [first])))
    with pytest.raises(ObjectNotFound):
        index.segment_archive.read(first, 0, 5)
    assert index.archived() == (second,)


@pytest.mark.parametrize("size", [1000, 2 * HEAD_BYTES])
@pytest.mark.parametrize("back_ms", [1, 3_600_000])
def test_a_segment_that_was_rewritten_before_its_record_is_sent_again(open_index, faulty, clock, size, back_ms):
    """The first upload arrived, but not its record. Then the broker cut its log, and wrote other messages there.

    Meanwhile the broker's clock may have gone back.
    """
    index = open_index(storage_backend=faulty)
    faulty.fail("put_if_absent", name_prefix="log/")
    old, new = content(size), content(size // 2) + content(size - size // 2, 3)
    with pytest.raises(StorageUnavailable):
        archive(index, old, modified_ms=clock.now_ms() - 1)
    clock.advance(60)
    assert archive(index, new, modified_ms=clock.now_ms() - back_ms)
    (segment,) = index.archived()
    assert index.segment_archive.read(segment, 0, size) == new


@pytest.mark.parametrize("again", ["a", "b"])
def test_a_place_is_archived_once(again):
    first, second = (ArchivedSegment(f"segments/s/0/{by}.log", "s", 0, 100, 1, 2, 152, 3) for by in ("a", again))
    added, again = (
        LogRecord(n, "archive", 1, "a", 5, catalogs=(inline_catalog([s]),)) for n, s in ((2, first), (3, second))
    )
    state = LogState(1, 1, GENESIS).apply(added, "x")
    with pytest.raises(CorruptFile, match="archived already"):
        state.apply(again, "x")
