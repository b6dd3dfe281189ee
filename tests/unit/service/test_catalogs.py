"""Catalogs of segments: the log's segments are the same wherever they are named, and nothing names a deleted one."""

import json
from collections import Counter
from random import Random

import pytest
from msgspec import structs

from tests.support.copies import copier
from tests.support.damage import checked, flipped
from tests.support.later import Later, sweep
from tests.support.log_records import GENESIS
from tests.support.merging import BASE_MS
from tests.support.storage_faults import FaultStorage
from tiered_index.base.clock import ManualClock
from tiered_index.base.retention import Horizon, Retention
from tiered_index.errors import CorruptFile, InvalidArgument, StorageUnavailable
from tiered_index.format.names import linked_store, log_name
from tiered_index.format.segments.segment import ArchivedSegment, LinkedSegment
from tiered_index.service.jobs.copying import difference
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.jobs.expiry import record_expiry
from tiered_index.service.jobs.lost import give_up
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.jobs.repair import Repairs
from tiered_index.service.jobs.rewriting.job import JobOvertaken, publish
from tiered_index.service.jobs.segments import catalogs, uploads
from tiered_index.service.jobs.segments.catalogs import level_of, merge_catalogs, plan_catalogs, send_catalog
from tiered_index.service.jobs.segments.erase_segments import (
    FoundMessages,
    SegmentResult,
    SegmentRewrite,
    erase_messages,
)
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import SentObject
from tiered_index.service.log.records import LogRecord
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.segments import Segments
from tiered_index.storage.memory import MemoryStorage

STORES = ("a", "b", "c")


def a_segment(store, start, attempt=1, size=100, published_ms=3):
    name = f"segments/{store}/{start:020d}/{1:020d}-{attempt:016x}.log"
    return ArchivedSegment(name, store, start, size, attempt, 2, size + 52, published_ms)


def a_log(storage, clock=None):
    log = StorageLog(storage, clock or ManualClock(1_700_000_000_000))
    log.create(GENESIS)
    return log


def append(log, archive=(), removed=(), **fields):
    """Append a record that adds segments in itself, and retires others."""

    def make(state):
        segments = Segments(state, log.storage)
        change = segments.change(archive, removed) if archive or removed else {}
        return LogRecord(0, "archive", 0, "", 0, **change, **fields)

    return log.append("test", None, make)


def add_catalog(log, segments):
    catalog, _ = send_catalog(log, sorted(segments, key=lambda segment: segment.place))
    append(log, catalogs=(catalog,))
    return catalog


class Model:
    """The segments by place, and the horizon by store."""

    def __init__(self):
        self.segments, self.expired, self.ends = {}, {}, dict.fromkeys(STORES, 0)

    def shown(self, store=None):
        return [
            segment
            for place, segment in sorted(self.segments.items())
            if store in (None, segment.store) and segment.end > self.expired.get(segment.store, 0)
        ]

    def check(self, segments, random):
        assert list(segments) == self.shown()
        assert set(segments.stores) == {segment.store for segment in self.shown()}
        for store in STORES:
            mine = self.shown(store)
            assert list(segments.of(store)) == mine
            assert (segments.first(store), segments.last(store)) == ((mine[0], mine[-1]) if mine else (None, None))
            assert segments.end(store) == (mine[-1].end if mine else 0)
            for _ in range(5):
                offset = random.randrange(self.ends[store] + 200)
                holding = next((segment for segment in mine if segment.start <= offset < segment.end), None)
                assert segments.holding(store, offset) == holding
                assert segments.after(store, offset) == next(
                    (segment for segment in mine if segment.start > offset), None
                )
                end = offset + random.randrange(1, 300)
                overlapping = [segment for segment in mine if segment.start < end and segment.end > offset]
                assert segments.overlapping(store, offset, end) == (overlapping[-1] if overlapping else None)
        some = random.sample(self.shown(), min(3, len(self.shown())))
        assert segments.named([segment.name for segment in some]) == some
        assert all(segments.names_object(segment.name) for segment in self.shown())


@pytest.mark.parametrize("seed", range(12))
def test_segments_in_records_and_catalogs_equal_a_list(seed):
    """Segments are added in records and in catalogs, replaced, given up and expired; catalogs are merged meanwhile."""
    random, model, log = Random(seed), Model(), a_log(MemoryStorage())
    for attempt in range(1, 45):
        act = random.choice(("inline", "catalog", "catalog", "replace", "give up", "expire", "merge"))
        shown = model.shown()
        if act in ("inline", "catalog"):
            fresh = []
            for store in random.sample(STORES, random.randrange(1, 4)):
                for _ in range(random.randrange(1, 4)):
                    fresh.append(a_segment(store, model.ends[store] + random.choice([0, 0, 30]), attempt))
                    model.ends[store] = fresh[-1].end
            if act == "inline":
                append(log, archive=tuple(fresh))
            else:
                add_catalog(log, fresh)
            model.segments |= {new.place: new for new in fresh}
        elif act in ("replace", "give up") and shown:
            segment = random.choice(shown)
            fresh = (a_segment(*segment.place, attempt),) if act == "replace" else ()
            append(log, archive=fresh, removed=[segment])
            assert not Segments(log.state, log.storage).names_object(segment.name)
            del model.segments[segment.place]
            model.segments |= {new.place: new for new in fresh}
        elif act == "expire" and shown:
            segment = random.choice(shown)
            model.expired[segment.store] = max(segment.end, model.expired.get(segment.store, 0))
            append(log, expired=Expired(segments={segment.store: segment.end}))
        elif act == "merge":
            merge_catalogs(log, least=random.choice([1, 5]))
        model.check(Segments(log.state, log.storage), random)
        assert LogState.decode(log.state.encode(), "checkpoint") == log.state
    merge_catalogs(log)
    assert not log.state.inline and not log.state.retired and not plan_catalogs(log.state, log.storage)
    again = StorageLog(log.storage, log.clock)
    assert again.open() == log.state
    assert checked(log.storage, deep=False, check_objects=lambda _: None).findings == []


def run_of(store, first, end, attempt=1):
    return [a_segment(store, 100 * number, attempt) for number in range(first, end)]


def test_merges_are_not_kept_from_others_and_not_repeated():
    log = a_log(MemoryStorage())
    add_catalog(log, run_of("a", 0, 2))
    for number in range(catalogs.FULL_LEVEL):
        assert len(log.state.catalogs) == number + 1
        add_catalog(log, run_of("b", 10 * number, 10 * number + 10))
        merge_catalogs(log, least=5)
    assert [stored.rows.count for stored in log.state.catalogs.values()] == [2, 80]
    # a segment on both sides of what expired
    log = a_log(MemoryStorage())
    append(log, expired=Expired(segments={"a": 150}))
    add_catalog(log, run_of("a", 1, 5))
    assert [merge_catalogs(log), merge_catalogs(log)] == [0, 0]
    append(log, expired=Expired(segments={"a": 250}))
    assert [merge_catalogs(log), merge_catalogs(log)] == [1, 0]
    assert list(Segments(log.state, log.storage)) == run_of("a", 2, 5)


@pytest.mark.parametrize("seed", range(3))
def test_catalogs_are_few_and_each_segment_is_written_once_a_level(seed):
    random, log, ends, written = Random(seed), a_log(MemoryStorage()), Counter(), Counter()
    for _ in range(300):
        store, count = random.choice("ab"), random.choice([1, 1, 2, 9])
        fresh = run_of(store, ends[store], ends[store] + count)
        add_catalog(log, fresh) if store == "a" else append(log, archive=fresh)
        ends[store] += count
        before = set(log.state.catalogs)
        merge_catalogs(log, least=16)
        for name in log.state.catalogs.keys() - before:
            written.update(segment.place for segment in catalogs.read_catalog(log.storage, name))
        levels = Counter(level_of(stored.rows.count) for stored in log.state.catalogs.values() if stored.data is None)
        assert all(count < catalogs.FULL_LEVEL for count in levels.values())
    assert list(Segments(log.state, log.storage)) == [*run_of("a", 0, ends["a"]), *run_of("b", 0, ends["b"])]
    assert 1 < max(written.values()) <= level_of(ends.total()) + 1


def test_segments_that_overlap_are_refused_found_and_never_merged():
    log = a_log(MemoryStorage())
    add_catalog(log, [a_segment("a", 0), a_segment("a", 300)])
    add_catalog(log, [a_segment("b", 0), a_segment("a", 600)])
    with pytest.raises(CorruptFile, match="overlap"):
        add_catalog(log, [a_segment("b", 900), a_segment("a", 200)])
    # nothing writes such a record: a segment between two of a catalog
    append(log, archive=(a_segment("a", 50),))
    report = checked(log.storage, deep=False)
    assert [finding.file for finding in report.findings if "overlap" in finding.problem] == [a_segment("a", 50).name]
    with pytest.raises(CorruptFile, match="overlaps"):
        merge_catalogs(log)


@pytest.mark.parametrize("nth", range(1, 12))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fault_at_any_write_of_an_upload_in_a_catalog_loses_and_doubles_nothing(open_index, monkeypatch, nth, when):
    """Columnar segments are sent and named, again after each error; a catalog is in the way of neither."""
    monkeypatch.setattr(uploads, "MOST_INLINE", 2)
    monkeypatch.setattr(uploads, "FULL_LEVEL", 2)
    monkeypatch.setattr(catalogs, "FULL_LEVEL", 2)
    storage = FaultStorage(MemoryStorage())
    index = open_index(storage_backend=storage)
    index.run_lifecycle()
    places = [(f"kafka:c/t/{number}", start) for start in (0, 2, 4) for number in range(4)]
    file = b"PAR1" + b"x" * 50 + (8).to_bytes(4, "little") + b"PAR1"
    for operation in ("put", "put_if_absent", "write", "delete_many"):
        storage.fail(operation, nth=nth, when=when)
    for start in (0, 2, 4):
        for _ in range(6):
            of_round = [place for place in places if place[1] == start]
            try:
                sent = [place for place in of_round if index.send_columns(*place, 2, file)]
                if sent:
                    index.name_columns(sent)
                break
            except StorageUnavailable:
                pass
    storage.clear()
    log = StorageLog(storage, ManualClock(1_700_000_000_000))
    assert [segment.place for segment in Segments(log.open(), storage)] == sorted(places)
    sweep(storage, log)
    report = checked(storage)
    assert (report.findings, report.notes) == ([], [])


def test_what_changes_during_a_merge_is_as_the_log_says_after_it():
    """A segment in a line and one in a catalog are replaced between the plan of a merge and its record."""

    storage = FaultStorage(MemoryStorage())
    log, other = a_log(storage), StorageLog(storage, ManualClock(1_700_000_000_000))
    add_catalog(log, [a_segment("a", 0), a_segment("a", 100)])
    append(log, archive=(a_segment("b", 0), a_segment("b", 100)))
    other.open()

    def replace_both():
        for place in (("a", 100), ("b", 100)):
            old = Segments(other.state, storage).at(*place)
            append(other, archive=(a_segment(*place, attempt=9),), removed=[old])

    storage.meanwhile("put_if_absent", replace_both)
    assert merge_catalogs(log) == 1
    merged = Segments(log.refresh(), storage)
    attempts = [(segment.store, segment.start, segment.crc32) for segment in merged]
    assert attempts == [("a", 0, 1), ("a", 100, 9), ("b", 0, 1), ("b", 100, 9)]
    assert len(log.state.catalogs) - len(log.state.inline) == 1
    merge_catalogs(log)
    assert list(Segments(log.state, storage)) == list(merged) and not log.state.retired


def test_a_segment_that_is_replaced_during_a_merge_of_objects_stays_replaced():
    storage = FaultStorage(MemoryStorage())
    log, other = a_log(storage), StorageLog(storage, ManualClock(1_700_000_000_000))
    add_catalog(log, run_of("a", 0, 3))
    append(log, removed=[a_segment("a", 0)])
    other.open()
    fresh = a_segment("a", 100, attempt=9)
    storage.meanwhile("put_if_absent", lambda: append(other, archive=(fresh,), removed=[a_segment("a", 100)]))
    assert merge_catalogs(log) == 1
    assert list(Segments(log.refresh(), storage)) == [fresh, a_segment("a", 200)]
    assert [*log.state.retired["a"]] == [100]


def test_records_carry_few_catalogs_of_many_segments_and_no_upload():
    log = a_log(MemoryStorage())
    for number in range(40):
        append(log, archive=run_of("a", number, number + 1))
    assert list(Segments(log.state)) == run_of("a", 0, 40)
    assert [stored.rows.count for stored in log.state.inline] == [16, 16, 8]
    assert not list(log.storage.list("catalog/"))


@pytest.mark.parametrize("least", [1, 3])
def test_uploads_fill_catalogs_and_copies_orphans_and_expiry_know_them(life, monkeypatch, least):
    """The writer makes catalogs; old segments are deleted only after the grace; a copy has them all."""
    monkeypatch.setattr(uploads, "MOST_INLINE", 1)
    monkeypatch.setattr(uploads, "MOST_WAITING", least)
    monkeypatch.setattr(catalogs, "MOST_WAITING", least)
    data = bytes(range(256)) * 40

    def archive(number):
        life.index.archive("broker", number * len(data), len(data), lambda at, length: data[at : at + length], None)

    for number in range(5):
        archive(number)
    state = life.index.log_state
    assert state.catalogs and sum(stored.rows.count for stored in state.inline) < least
    assert [segment.start for segment in life.index.archived()] == [number * len(data) for number in range(5)]
    with life.reader() as reader:
        assert reader.archived() == life.index.archived()
        assert reader.segment_archive.verified(reader.archived()[3], 10, 100) == data[10:110]
    target = MemoryStorage()
    report = copier(life, target).run_once()
    copied = StorageLog(target, life.clock)
    assert list(Segments(copied.open(), target)) == list(life.index.archived())
    assert report.sent == len(list(target.list("segments/"))) + len(list(target.list("catalog/")))
    archive(5)
    assert copier(life, target).run_once().sent <= 3
    assert len(Segments(copied.refresh(), target)) == 6
    # expiry: hidden at once, deleted after the grace
    life.clock.advance(100)
    archive(6)
    record_expiry(life.log(), Retention(segments_age_s=50), life.clock.now_ms())
    life.index._lifecycle.refresh()
    assert [segment.start for segment in life.index.archived()] == [6 * len(data)]
    assert len(list(life.storage.list("segments/"))) == 7
    sweep(life.storage, life.log())
    assert [info.name for info in life.storage.list("segments/")] == [segment.name for segment in life.index.archived()]
    listed = {name for name, stored in life.log().state.catalogs.items() if stored.data is None}
    assert {info.name for info in life.storage.list("catalog/")} == listed
    assert checked(life.storage).findings == []


def test_linked_segments_are_listed_and_never_objects_of_the_index():
    log = a_log(MemoryStorage())
    link = LinkedSegment("s3://theirs/a.ndjson", "files:here/t/0", 0, 1000, "ndjson", 1000, '"e"', 3)
    add_catalog(log, [link, a_segment("a", 0)])
    segments = Segments(log.state, log.storage)
    assert (list(segments.linked()), len(segments), list(segments)) == ([link], 1, [a_segment("a", 0)])
    assert segments.segment("files:here/t/0", 999) == link
    assert segments.holding("files:here/t/0", 999) is None and not segments.names_object(link.name)
    append(log, expired=Expired(segments={"files:here/t/0": 1000}))
    merge_catalogs(log)
    assert not list(Segments(log.state, log.storage).linked())


@pytest.fixture
def linked_life(life):
    """An index with entries of `k`, `m` and others, and a file for each of their offsets; its uri is the offset."""
    life.put([(BASE_MS + n * 1000, "km"[n] if n < 2 else "other") for n in range(6)])
    life.publish()
    life.clock.advance(3600)
    items = [item for key in ("k", "m", "other") for item in life.index.query("t", key).items]
    links = [
        LinkedSegment(f"{item.offset}", linked_store("t", item.queue_id), item.offset, 1, "ndjson", 9, "e", 3,
                      times=(item.timestamp_ms, item.timestamp_ms))
        for item in items
    ]  # fmt: skip
    add_catalog(life.log(), links)
    append(life.log(), positions={link.store: max(two.end for two in links) for link in links})
    life.uris = {key: {f"{item.offset}" for item in life.index.query("t", key).items} for key in ("k", "m", "other")}
    return life


def linked_of(life, *keys, topic="t", **more):
    done = erase(life.storage, life.log(), EraseRequest(topic, keys, **more), life.clock, yes=True, now=True)
    return set(done.linked_remaining)


def test_the_certificate_names_linked_files_of_keys_that_are_partly_in_force(linked_life):
    life = linked_life
    assert linked_of(life, "k") == life.uris["k"]
    # the entries of `k` are gone: its files are among those of its topic and time, those of `m` are known
    before_ms = BASE_MS + 1000
    assert linked_of(life, "k", before_ms=before_ms) == life.uris["k"]
    assert linked_of(life, "m", "k") >= life.uris["m"] | life.uris["k"]
    assert linked_of(life, "m", "k", before_ms=before_ms) == life.uris["k"]


@pytest.mark.parametrize("how", ["expired", "erased with their queue", "lost"])
def test_the_certificate_names_linked_files_whose_entries_are_gone(linked_life, how):
    life = linked_life
    log = life.log()
    (queue,) = {item.queue_id for item in life.index.query("t", "k").items}
    if how == "expired":
        append(log, expired=Expired((Horizon(BASE_MS + 2000),)))
        life.later()
        life.merge()
        with life.reader() as reader:
            assert not reader.query("t", "k").items
    elif how == "lost":
        gone = next(iter(log.state.objects.values()))
        life.storage.delete_many([gone.name])
        give_up(life.storage, log, [gone.file])
    else:
        linked_of(life, queue_id=queue, before_ms=BASE_MS + 1000)
    named = linked_of(life, "k")
    assert named >= life.uris["k"]
    assert how == "lost" or named.isdisjoint(life.uris["other"])
    if how == "expired":
        assert linked_of(life, "other") == life.uris["k"] | life.uris["m"] | life.uris["other"]
    elif how != "lost":
        assert linked_of(life, queue_id=queue) >= life.uris["k"]


def test_the_certificate_names_linked_files_of_stores_without_a_topic_and_of_rows_that_are_not_uploaded(linked_life):
    life = linked_life
    some = LinkedSegment("theirs", "files:theirs", 0, 9, "ndjson", 9, "e", 3, times=(BASE_MS, BASE_MS))
    late = LinkedSegment("late", "files:theirs", 9, 9, "ndjson", 9, "e", 3, times=(BASE_MS + 10**9, BASE_MS + 10**9))
    other = LinkedSegment("other", linked_store("u", 0), 0, 9, "ndjson", 9, "e", 3)
    (store,) = {linked_store("t", item.queue_id) for item in life.index.query("t", "k").items}
    ahead = LinkedSegment("ahead", store, 10**6, 9, "ndjson", 9, "e", 3, is_open=True)
    add_catalog(life.log(), [some, late, other, ahead])
    for scope in ({"keys": ("k",)}, {}, {"queue_id": int(store[-1])}):
        keys = scope.pop("keys", ())
        named = linked_of(life, *keys, **scope)
        assert named >= life.uris["k"] | {"theirs", "ahead"}
        assert named.isdisjoint({"other", "late"})


def test_a_lost_catalog_is_restored_from_a_copy(life):
    add_catalog(life.log(), [a_segment("a", 0), a_segment("a", 100)])
    log, target = life.log(), MemoryStorage()
    (name,) = log.state.catalogs
    life.storage.put(a_segment("a", 0).name, b"of the lost catalog")
    target.put(name, life.storage.get(name))
    life.storage.delete_many([name])
    report = checked(life.storage)
    assert name in {finding.file for finding in report.findings}
    (repair,) = Repairs(life.storage, log, standby=target).run(report, yes=True)
    assert list(Segments(log.refresh(), life.storage)) == [a_segment("a", 0), a_segment("a", 100)]
    assert log.state.catalogs.keys() == {repair.replaced_by}


def harm(storage, name, damage):
    data = storage.get(name)
    storage.delete_many([name])
    if damage != "missing":
        storage.put(name, data[:60] if damage == "cut" else flipped(data, 30))


@pytest.mark.parametrize("damage", ["missing", "damaged", "cut"])
def test_segments_of_other_catalogs_are_checked_beside_damaged_ones(life, damage):
    log = life.log()
    places = {name: [(name, 0), ("m", 100 * at), ("z", 100 * at)] for at, name in enumerate(("a", "b", "c", "d"))}
    names = {key: add_catalog(log, [a_segment(*place) for place in of]) for key, of in places.items()}
    for key in ("a", "c"):
        harm(life.storage, names[key].name, damage)
    missing = {a_segment(*place).name for key in ("b", "d") for place in places[key]}
    # whether it is a stray is unknown: its catalog is damaged
    life.storage.put(a_segment("a", 0).name, b"bytes")
    report = checked(life.storage, deep=False)
    assert {finding.file for finding in report.findings} == missing | {names[key].name for key in ("a", "c")}
    assert len(report.findings) == len(missing) + 2
    assert all(any(names[key].name in note for note in report.notes) for key in ("a", "c"))


@pytest.mark.parametrize("damage", ["missing", "damaged", "cut"])
def test_a_catalog_that_is_given_up_takes_its_segments_with_it_and_nothing_else(life, damage):
    """Places of its segments are named, others are not. Checks, sweeps, copies, merges and erasures succeed."""
    log = life.log()
    lost = add_catalog(log, [a_segment("a", 0), a_segment("a", 100), a_segment("b", 0)])
    add_catalog(log, [a_segment("a", 200), a_segment("c", 0)])
    segments = Segments(log.state, life.storage)
    append(log, archive=(a_segment("a", 100, 2),), removed=[segments.at("a", 100)])
    for segment in Segments(log.state, life.storage):
        life.storage.put(segment.name, b"bytes")
    life.clock.advance(2 * 86400)
    with pytest.raises(InvalidArgument, match="whole"):
        give_up(life.storage, log, [lost.name])
    harm(life.storage, lost.name, damage)
    planned = give_up(life.storage, log, [lost.name], dry_run=True)
    assert lost.name in log.refresh().catalogs
    done = give_up(life.storage, log, [lost.name])
    assert done == planned == give_up(life.storage, log, [lost.name])
    # a segment that was replaced is not lost
    places = [(loss.range.source, loss.range.begin, loss.range.end, loss.count) for loss in done]
    assert places == [("a", 0, 200, 1), ("b", 0, 100, 1)]
    shown = [a_segment("a", 100, 2), a_segment("a", 200), a_segment("c", 0)]
    assert StorageLog(life.storage, life.clock).open() == log.state == LogState.decode(log.state.encode(), "checkpoint")
    segments = Segments(log.state, life.storage)
    assert list(segments) == shown and not log.state.retired
    assert segments.given_up("a", 99).catalog == segments.given_up("b", 0).catalog == lost.name
    assert segments.given_up("a", 200) is segments.given_up("c", 0) is None
    # what only the lost catalog listed is deleted a day after it was given up
    alone = a_segment("b", 0).name
    for days, left in ((0.5, True), (2, False)):
        later = Later(life.storage, round(days * 86400))
        delete_orphans(later, find_orphans(later, log))
        assert (alone in {info.name for info in life.storage.list("segments/")}) is left
    change = difference(LogState(), log.state, "copy:x")
    assert LogState().apply(change, "copy").given_up == log.state.given_up
    report = checked(life.storage, deep=False, check_objects=lambda _: None)
    assert report.findings == []
    assert f"{lost.name} was given up: messages of up to 2 segments of 2 logs are lost" in report.notes
    assert merge_catalogs(log) == 1 and list(Segments(log.state, life.storage)) == shown
    # what expired is not told as lost
    record_expiry(log, Retention(segments_age_s=1), life.clock.now_ms())
    erased = erase(life.storage, log, EraseRequest("t"), life.clock, yes=True, now=True)
    assert any("1 lost catalogs" in text for text in erased.unchecked)
    notes = [note for note in checked(life.storage, deep=False).notes if "given up" in note]
    assert notes == [f"{lost.name} was given up: messages of up to 1 segments of 1 logs are lost"]


@pytest.mark.parametrize(
    ("kind", "remaining", "left_out", "is_sound"),
    [
        ("catalogs", 3, 1, True),
        ("catalogs", 2, 2, False),
        ("catalogs", 2, 1, False),
        ("catalogs", 3, 0, False),
        ("link", 3, 1, True),
        ("link", 2, 1, False),
        ("repair", 4, 0, True),
        ("repair", 3, 0, False),
        ("remove", 0, 0, False),
        ("erase", 4, 0, False),
    ],
)
def test_records_that_lose_segments_of_catalogs_are_findings(kind, remaining, left_out, is_sound):
    """A catalog of four segments is replaced by one of `kept` segments. One segment was hidden."""
    log = a_log(MemoryStorage())
    old = add_catalog(log, run_of("a", 0, 4))
    if kind != "repair":
        append(log, removed=[a_segment("a", 300)])
    added = (send_catalog(log, run_of("a", 0, remaining))[0],) if remaining else ()
    record = LogRecord(0, kind, 0, "", 0, remove=(old.name,), catalogs=added, left_out=left_out)
    log.append("test", None, lambda state: record)
    report = checked(log.storage, deep=False, check_objects=lambda _: None)
    assert [finding.part for finding in report.findings] == ["catalogs"] * (not is_sound)


def test_segments_that_do_not_add_up_are_not_published():
    """An erasure of one record out of three must leave two, in a segment of the same place."""
    log = a_log(MemoryStorage())
    columnar = structs.replace(a_segment("a", 0), columns=(3, 20), rows=3)
    append(log, archive=(columnar,))
    rewrite = SegmentRewrite("erase", "an erasure", (columnar,), (None,))

    def publish_as(*results, rows=2, start=0, attempt=2):
        fresh = structs.replace(a_segment("a", start, attempt), columns=(3, 20), rows=rows)
        log.storage.put(fresh.name, b"")
        sent = SentObject(fresh.name, 0, log.clock.now_ms())
        result = SegmentResult(0, {}, 0, (), segments=((fresh, sent),), found=FoundMessages(1))
        publish(rewrite, [result, *results], log)
        return fresh

    number = log.state.number
    for problem, wrong in (("another number of messages", {"rows": 1}), ("begins or ends elsewhere", {"start": 100})):
        with pytest.raises(CorruptFile, match=problem):
            publish_as(**wrong)
    with pytest.raises(CorruptFile, match="one result of each task"):
        publish_as(SegmentResult(0, {}, 0, ()))
    assert log.refresh().number == number
    fresh = publish_as()
    assert [segment.name for segment in Segments(log.state)] == [fresh.name]
    # another one was first: its segment stays
    with pytest.raises(JobOvertaken):
        publish_as(attempt=3)
    assert [segment.name for segment in Segments(log.state)] == [fresh.name]


def test_a_record_that_gives_up_a_catalog_names_it():
    log = a_log(MemoryStorage())
    lost = add_catalog(log, [a_segment("a", 0)])
    log.storage.delete_many([lost.name])
    give_up(log.storage, log, [lost.name])
    text = json.loads(log.storage.get(log_name(log.state.number)).rpartition(b"\n#")[0])
    assert (text["remove"], text["lost"][0]["range"]["catalog"]) == ([lost.name], lost.name)


def test_an_erasure_reads_segments_of_catalogs_in_groups_and_also_those_that_come_meanwhile():
    """Each is read once, and a later plan has only what is new."""
    storage, clock = MemoryStorage(), ManualClock(1_700_000_000_000)
    log = a_log(storage, clock)
    add_catalog(log, [a_segment(store, start) for store in STORES for start in (0, 100)])
    groups = []

    def workers(rewrite):
        groups.append([segment.place for segment in rewrite.inputs])
        if len(groups) == 1:
            append(log, archive=(a_segment("b", 200),))
        for number, segment in enumerate(rewrite.inputs):
            yield SegmentResult(number, {}, 0, (), remains=segment.place == ("c", 0))

    before = log.state.number
    report = erase_messages(log, None, workers, 2, lambda *_: None, keys=False)
    assert groups == [*([(store, 0), (store, 100)] for store in STORES), [("b", 200)]]
    assert log.state.number == before + 1, "a segment without such messages needs no record"
    assert report["segments_read"] == 7
    assert report["segments_remaining"] == (a_segment("c", 0).name,)


def test_the_end_of_a_catalog_of_many_logs_is_read_whole():
    """Its directory has more than the MiB that a reader asks for first."""
    chance = Random(1)
    stores = sorted(chance.randbytes(100).hex() for _ in range(14_000))
    log, segments = a_log(MemoryStorage()), [a_segment(store, 0, number) for number, store in enumerate(stores)]
    catalog = add_catalog(log, segments)
    assert list(catalogs.read_catalog(log.storage, catalog.name)) == segments


@pytest.mark.parametrize("deletes", [False, True])
def test_two_merges_at_once_leave_one_result(deletes):
    """Each moment of a merge, another one does the same, and may delete what it merged. Nothing is lost or doubled."""
    for nth in range(1, 5):
        storage = FaultStorage(MemoryStorage())
        log, other = a_log(storage), StorageLog(storage, ManualClock(1_700_000_000_000))
        merged = add_catalog(log, run_of("a", 0, 3))
        append(log, archive=(*run_of("a", 3, 5), *run_of("b", 0, 2)), removed=run_of("a", 0, 1))
        other.open()
        shown = list(Segments(log.state, storage))

        def merge_first(other=other, merged=merged):
            if merge_catalogs(other) and deletes:
                other.storage.delete_many([merged.name])

        storage.meanwhile("*", merge_first, nth=nth)
        merge_catalogs(log)
        assert list(Segments(log.refresh(), storage)) == shown
        assert len(log.state.catalogs) == 1 and not log.state.inline
        sweep(storage, log)
        assert {info.name for info in storage.list("catalog/")} == log.state.catalogs.keys()


def test_a_segment_is_found_though_its_catalog_was_merged_and_deleted_since_the_log_was_read():
    storage = MemoryStorage()
    log, reading = a_log(storage), StorageLog(storage, ManualClock(1_700_000_000_000))
    old = add_catalog(log, run_of("a", 0, 3))
    append(log, removed=run_of("a", 0, 1))
    reading.open()
    archive = SegmentArchive(storage, lambda: reading.state, reading.refresh)
    assert merge_catalogs(log) == 1
    storage.delete_many([old.name])
    assert old.name in reading.state.catalogs
    (shown,) = archive.holding(150, "a")
    assert shown.start == 100 and old.name not in reading.state.catalogs


def test_a_sweep_keeps_objects_that_catalogs_no_longer_show_for_a_day(clock):
    """A segment that is hidden, and one that a merge left out because it expired, are deleted a day later."""
    storage = MemoryStorage(clock=clock)
    log, (first, second, third) = a_log(storage, clock), run_of("broker", 0, 3)
    for segment in (first, second, third):
        storage.put(segment.name, b"bytes")
    add_catalog(log, [first, second, third])
    # since then, no record has removed their lines
    clock.advance(2 * 86400)
    append(log, removed=[second])
    assert log.state.retired and second.name not in {info.name for info in find_orphans(storage, log).objects}
    append(log, expired=Expired(segments={"broker": 100}))
    merge_catalogs(log)
    assert not log.state.retired
    for gone in (set(), {first.name, second.name}):
        delete_orphans(storage, find_orphans(storage, log))
        left = {info.name for info in storage.list("segments/")}
        assert left == {first.name, second.name, third.name} - gone
        clock.advance(2 * 86400)


def test_a_round_of_many_partitions_reads_its_catalog_once(open_index):
    storage = FaultStorage(MemoryStorage())
    index, file = open_index(storage_backend=storage), b"PAR1" + b"x" * 50 + (8).to_bytes(4, "little") + b"PAR1"
    index.run_lifecycle()
    places = [(f"kafka:c/t/{number}", 0) for number in range(200)]
    assert all(index.send_columns(*place, 2, file) for place in places)
    before = storage.calls("get_range")
    assert index.name_columns(places[::-1]) == 200
    assert storage.calls("get_range") - before <= 6
