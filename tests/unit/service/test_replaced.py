"""New readings of files: the old rows are answers until the record that publishes the new ones, then the new rows."""

import pickle
import shutil

import pytest
from msgspec import structs

from tests.support.damage import checked, flip_object
from tests.support.later import sweep
from tests.support.log_records import GENESIS
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.base.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import CorruptFile
from tiered_index.format.names import RANGES_PREFIX, TOPICS_QUEUE, linked_store
from tiered_index.format.segments.ranges import encode_ranges
from tiered_index.format.segments.segment import LinkedSegment
from tiered_index.service.anew import begin_anew
from tiered_index.service.jobs.copying import copy_index
from tiered_index.service.jobs.merge_run import merge_index, rewrite_objects
from tiered_index.service.jobs.repair import Repairs
from tiered_index.service.jobs.rewriting import job
from tiered_index.service.jobs.rewriting.merge_plan import MergeOptions, plan_merge
from tiered_index.service.log.kept import KeptLog
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.range_objects import read_ranges
from tiered_index.service.log.records import LogRecord
from tiered_index.service.log.replaced import RangeTable, Replacement
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers import replaced_rows
from tiered_index.service.read.files.root_view import RootView
from tiered_index.service.root import Root
from tiered_index.storage.disk import Disk
from tiered_index.storage.opening import open_storage

STORE = linked_store("t", 0)
TIME_MS = 1_700_000_000_000
ROWS = 10
ALL = [*range(ROWS)]
NEW = [*range(20, 20 + ROWS)]


@pytest.fixture
def index(tmp_path):
    with IndexService.open(root=tmp_path / "root", storage=f"file://{tmp_path}/objects", background=False) as opened:
        yield opened


def segment(start, length, *, is_open=False, times=None):
    etag = f"1-{start}-0-00000000"
    return LinkedSegment(
        f"file:///{start}.log", STORE, start, length, "ndjson", 10, etag, 5, 0, times=times, is_open=is_open
    )


def put_rows(index, offsets, *, position, topic="t", queue_id=0, store=STORE, key="k"):
    columns = {
        "topic": [topic] * len(offsets),
        "queue_id": [queue_id] * len(offsets),
        "key": [key] * len(offsets),
        "offset": offsets,
        "size": [10] * len(offsets),
        "timestamp_ms": [TIME_MS + 1000 * (offset % 20) for offset in offsets],
    }
    index.put_source_batch(columns, source=store, source_position=position)
    index.flush()


def publish(index):
    index.seal()
    index.run_lifecycle()


def answers(opened, topic="t"):
    """Return the offsets of all answers of `k`, which single lookups, batches, pages and exports show alike."""
    whole = opened.query(topic, "k", max_count=1000)
    assert whole.status == "complete"
    offsets = sorted(item.offset for item in whole.items)
    other = Lookup(topic, "k", begin_ms=TIME_MS + 3000, end_ms=TIME_MS + 5000)
    batch, few, _ = opened.query_many([Lookup(topic, "k", max_count=1000), other, Lookup(topic, "none")])
    assert (sorted(item.offset for item in batch.items), batch.replaced) == (offsets, whole.replaced)
    assert few.replaced == opened.query(other.topic, "k", other.begin_ms, other.end_ms).replaced
    for most in (1, 3):
        pages = [opened.query(topic, "k", max_count=most)]
        while (cursor := pages[-1].cursor) is not None:
            by_batch, _ = opened.query_many([Lookup(topic, "k", max_count=most, cursor=cursor), Lookup(topic, "none")])
            pages.append(opened.query(topic, "k", max_count=most, cursor=cursor))
            assert by_batch.replaced == pages[-1].replaced
        assert sorted(item.offset for page in pages for item in page.items) == offsets
        # each replaced row counts on one page
        assert sum(page.replaced for page in pages) == whole.replaced
    with opened.export(topic) as batches:
        assert sorted(offset for entries in batches for offset in entries["offset"].to_pylist()) == offsets
    return offsets


def replaced_of(index, tmp_path, topic="t"):
    """Return the number of replaced rows, of which all readers count as many."""
    storage = f"file://{tmp_path}/objects"
    with IndexReader.open(storage) as alone, IndexReader.open(storage, root=tmp_path / "root") as beside:
        (count,) = dict.fromkeys(opened.query(topic, "k", max_count=1000).replaced for opened in (index, alone, beside))
    return count


def everyone(index, tmp_path, topic="t"):
    """Return the answers of the writer, of a reader of its root, and of one of the storage alone."""
    storage = f"file://{tmp_path}/objects"
    with IndexReader.open(storage) as alone, IndexReader.open(storage, root=tmp_path / "root") as beside:
        return answers(index, topic), answers(beside, topic), answers(alone, topic)


def linked_and_published(index):
    """Index a file as offsets 0 to 9."""
    index.link([segment(0, 20, is_open=True)])
    put_rows(index, ALL, position=ROWS)
    index.link([], [segment(0, ROWS)])
    put_rows(index, [], position=20)
    publish(index)


def test_the_record_that_publishes_the_new_rows_retires_the_old_ones(index, tmp_path):
    linked_and_published(index)
    assert index.expired.hidden is None
    assert everyone(index, tmp_path) == (ALL, ALL, ALL)
    # the reading begins: its rows are hidden as they come
    index.link([segment(20, 20, is_open=True)], gone=[(STORE, 0)], replaced=[Replacement(STORE, 0, ROWS, 20, 40)])
    assert everyone(index, tmp_path) == (ALL, ALL, ALL)
    put_rows(index, NEW[:4], position=24)
    assert everyone(index, tmp_path) == (ALL, ALL, ALL)
    publish(index)
    assert everyone(index, tmp_path) == (ALL, ALL, ALL)
    put_rows(index, NEW[4:], position=30)
    index.link([], [segment(20, ROWS)], replaced=[Replacement(STORE, 0, ROWS, 20, 30)])
    # nothing is published yet, so the writer shows the same as a reader of the storage
    assert everyone(index, tmp_path) == (ALL, ALL, ALL)
    assert replaced_of(index, tmp_path) == 0
    publish(index)
    assert everyone(index, tmp_path) == (NEW, NEW, NEW)
    assert replaced_of(index, tmp_path) == ROWS
    # in answer order: 29, 9 (replaced), 28
    assert [index.query("t", "k", max_count=most).to_dict()["replaced"] for most in (1, 2, 3)] == [0, 1, 2]


def test_a_reading_without_rows_retires_the_old_ones_at_once(index, tmp_path):
    linked_and_published(index)
    index.link(gone=[(STORE, 0)], replaced=[Replacement(STORE, 0, ROWS, 20, 20)])
    assert everyone(index, tmp_path) == ([], [], [])
    assert replaced_of(index, tmp_path) == ROWS


def test_a_replacement_alone_is_a_record(index, tmp_path):
    linked_and_published(index)
    index.link(replaced=[Replacement(STORE, 3, 5, 20, 20)])
    left = [offset for offset in ALL if offset not in (3, 4)]
    assert everyone(index, tmp_path) == (left, left, left)


def test_rows_of_all_topics_have_one_store(index, tmp_path):
    store = linked_store("", TOPICS_QUEUE)
    for topic, offsets in (("a", [0, 2, 4]), ("b", [1, 3, 5])):
        put_rows(index, offsets, position=6, topic=topic, queue_id=TOPICS_QUEUE, store=store)
    # another log: that of topic a alone
    put_rows(index, [2, 3], position=6, topic="a", store=linked_store("a", 0))
    publish(index)
    index.link(replaced=[Replacement(store, 2, 4, 10, 10)])
    assert answers(index, "a") == [0, 2, 3, 4] and answers(index, "b") == [1, 5]
    assert everyone(index, tmp_path, "a") == ([0, 2, 3, 4],) * 3


def merged(index, tmp_path):
    """Merge all files, and let the writer see it. Its local copies go with that."""
    report = merge_index(f"file://{tmp_path}/objects")
    index._lifecycle.refresh()
    index.run_lifecycle()
    return report


def test_a_merge_drops_the_entries_and_then_the_ranges(index, tmp_path):
    index.link([segment(0, 20, is_open=True)])
    put_rows(index, ALL, position=20)
    index.link([], [segment(0, ROWS, times=(TIME_MS, TIME_MS + 20_000))])
    publish(index)
    index.link([segment(20, 20, is_open=True)], gone=[(STORE, 0)], replaced=[Replacement(STORE, 0, ROWS, 20, 40)])
    put_rows(index, NEW, position=40)
    publish(index)
    assert everyone(index, tmp_path) == (NEW,) * 3 and index.log_state.expired.hidden is not None
    assert merged(index, tmp_path).expired == ROWS
    assert index.log_state.expired.hidden is None
    assert everyone(index, tmp_path) == (NEW,) * 3
    assert replaced_of(index, tmp_path) == 0
    # the counter goes on, so that objects of before are not taken for later ones
    assert LogState.decode(index.log_state.encode(), "checkpoint").expired.replaced.generation == 1
    record = index._session.log.record(index.log_state.number)
    assert (record.kind, record.dropped) == ("drop", {STORE: ((0, ROWS),)})
    assert checked(index.storage).status == "ok"


@pytest.mark.parametrize("is_earlier", [False, True])
def test_a_reader_that_looked_at_a_root_before_local_copies_went_shows_no_dropped_rows(
    index, tmp_path, monkeypatch, is_earlier
):
    """The ranges are dropped between its look and its read of the log. It `is_earlier`: it never knew them."""
    times = (TIME_MS, TIME_MS + 20_000)
    index.link([segment(0, ROWS, times=times)])
    put_rows(index, ALL, position=ROWS)
    publish(index)

    def read_again():
        index.link([segment(20, ROWS, times=times)], gone=[(STORE, 0)], replaced=[Replacement(STORE, 0, ROWS, 20, 30)])
        put_rows(index, NEW, position=30)
        publish(index)

    if not is_earlier:
        read_again()
    looks, look = [], RootView.look

    def changed_after_look(view):
        seen = look(view)
        looks.append(seen)
        if len(looks) == 1:
            if is_earlier:
                read_again()
            merged(index, tmp_path)
            assert index.log_state.expired.hidden is None
        return seen

    with IndexReader.open(f"file://{tmp_path}/objects", root=tmp_path / "root") as beside:
        monkeypatch.setattr(RootView, "look", changed_after_look)
        answer = beside.query("t", "k", max_count=1000)
        assert (sorted(item.offset for item in answer.items), answer.status, answer.replaced) == (NEW, "complete", 0)
        assert answers(beside) == NEW


def test_ranges_stay_while_a_file_may_have_their_entries(index, tmp_path):
    """A merge that was planned before, a position that is behind, another file of these times."""
    whole = (TIME_MS, TIME_MS + 20_000)
    index.link([segment(0, ROWS, times=whole)])
    put_rows(index, ALL, position=ROWS)
    publish(index)
    log = StorageLog(index.storage, SystemClock())
    log.open()
    (early,) = plan_merge(log.state, MergeOptions(), now_s=SystemClock().now_ms() // 1000).rewrites
    index.link(replaced=[Replacement(STORE, 0, ROWS, 20, 20)])
    results = [task.run(index.storage, SystemClock().now_ms()) for task in early.tasks]
    job.publish(early, results, log)
    index._lifecycle.refresh()
    index.run_lifecycle()
    assert everyone(index, tmp_path) == ([],) * 3 and index.log_state.expired.hidden is not None
    # another file of this time, which a rewrite has not read
    put_rows(index, [30], position=31)
    assert rewritten(index, tmp_path) == ROWS
    assert everyone(index, tmp_path) == ([30], [30], []) and index.log_state.expired.hidden is not None
    publish(index)
    rewritten(index, tmp_path)
    assert everyone(index, tmp_path) == ([30],) * 3 and index.log_state.expired.hidden is None
    # neither are those dropped before which the position is not
    index.link([segment(50, 20, times=whole)])
    index.link(gone=[(STORE, 50)], replaced=[Replacement(STORE, 50, 60, 70, 70)])
    rewritten(index, tmp_path)
    assert index.log_state.expired.hidden is not None
    put_rows(index, [80], position=81)
    publish(index)
    rewritten(index, tmp_path)
    assert everyone(index, tmp_path) == ([30, 80],) * 3 and index.log_state.expired.hidden is None


def rewritten(index, tmp_path):
    """Write all objects again, and let the writer see it. Return the number of entries that were left out."""
    log = StorageLog(index.storage, SystemClock())
    log.open()
    names = [*log.state.objects]
    report = rewrite_objects(index.storage, log, SystemClock(), lambda state: names)
    index._lifecycle.refresh()
    index.run_lifecycle()
    return report.expired


def test_a_restored_root_does_not_bring_dropped_rows_back(tmp_path):
    """The root is an earlier copy, from before the new reading. Its range was dropped since."""
    root, storage = tmp_path / "root", f"file://{tmp_path}/objects"
    times = (TIME_MS, TIME_MS + 20_000)
    with IndexService.open(root=root, storage=storage, background=False) as index:
        index.link([segment(0, ROWS, times=times), segment(50, 5, times=times)])
        put_rows(index, [*ALL, *range(50, 55)], position=55)
    # it has the rows in a file that accepts entries
    shutil.copytree(root, tmp_path / "earlier")
    with IndexService.open(root=root, storage=storage, background=False) as index:
        index.link([segment(60, ROWS, times=times)], gone=[(STORE, 0)], replaced=[Replacement(STORE, 0, ROWS, 60, 70)])
        put_rows(index, [*range(60, 70)], position=70)
        publish(index)
        merged(index, tmp_path)
        assert index.log_state.expired.hidden is None
        shown = everyone(index, tmp_path)
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "earlier", root)
    begin_anew(IndexConfig(root=root, storage=storage, background=False))
    with IndexService.open(root=root, storage=storage, background=False) as index:
        publish(index)
        # an entry that a merge has taken may be there twice, which is one answer
        assert sorted(item.offset for item in index.query("t", "k", max_count=1000)) == shown[0]


def test_replaced_rows_behind_the_pages_are_dropped_while_they_are_gathered(index, tmp_path, monkeypatch):
    """So that they take no more memory than answers."""
    monkeypatch.setattr(replaced_rows, "_HELD_ROWS", 4)
    dropped = []

    def on_pages(*arguments):
        shown = original(*arguments)
        dropped.append(int((~shown).sum()))
        return shown

    original = replaced_rows.on_pages
    monkeypatch.setattr(replaced_rows, "on_pages", on_pages)
    for number in range(6):
        start = 40 * number
        put_rows(index, [*range(start, start + 20)], position=start + 20)
        publish(index)
    index.link(replaced=[Replacement(STORE, 40 * number, 40 * number + 10, 1000, 1000) for number in range(6)])
    left = sorted(offset for number in range(6) for offset in range(40 * number + 10, 40 * number + 20))
    assert everyone(index, tmp_path) == (left,) * 3
    assert replaced_of(index, tmp_path) == 60
    assert sum(dropped) > 0


def test_several_indexes_count_their_replaced_rows_together(tmp_path):
    for name, replaced in (("a", 4), ("b", 7)):
        root, storage = tmp_path / name / "root", f"file://{tmp_path}/{name}/objects"
        with IndexService.open(root=root, storage=storage, background=False) as index:
            linked_and_published(index)
            index.link(replaced=[Replacement(STORE, 0, replaced, 20, 20)])
    with IndexReader.open([f"file://{tmp_path}/a/objects", f"file://{tmp_path}/b/objects"]) as both:
        whole = both.query("t", "k")
        assert (sorted(item.offset for item in whole.items), whole.replaced) == (sorted([*ALL[4:], *ALL[7:]]), 11)
        pages = [both.query("t", "k", max_count=2)]
        while (cursor := pages[-1].cursor) is not None:
            pages.append(both.query("t", "k", max_count=2, cursor=cursor))
        assert sum(page.replaced for page in pages) == 11
        # the newest rows were not replaced: their pages count none
        assert [page.replaced for page in pages[:3]] == [0, 0, 0]
        assert [answer.replaced for answer in both.query_many([Lookup("t", "k"), Lookup("t", "no")])] == [11, 0]


def test_an_index_of_files_without_replacements_has_no_hidden_entries(index):
    """So that its lookups stay in the compiled core."""
    linked_and_published(index)
    assert index.log_state.expired.hidden is None
    index.link(replaced=[Replacement(STORE, 3, 5, 20, 20)])
    assert index.log_state.expired.hidden is not None


def test_a_merge_leaves_out_retired_entries_and_keeps_those_of_an_unpublished_reading(index, tmp_path):
    linked_and_published(index)
    index.link([segment(20, 20, is_open=True)], replaced=[Replacement(STORE, 0, ROWS, 20, 40)])
    put_rows(index, NEW, position=40)
    publish(index)
    assert everyone(index, tmp_path) == (NEW, NEW, NEW)
    index.link([segment(40, 20, is_open=True)], replaced=[Replacement(STORE, 20, 30, 40, 60)])
    put_rows(index, [40, 41], position=42)
    publish(index)
    assert merge_index(f"file://{tmp_path}/objects").expired == ROWS
    index.run_lifecycle()
    assert everyone(index, tmp_path) == (NEW, NEW, NEW)
    with IndexReader.open(f"file://{tmp_path}/objects") as reader:
        assert reader.query("t", "k").replaced == 0
    put_rows(index, [42], position=43)
    index.link([], [segment(40, 3)], replaced=[Replacement(STORE, 20, 30, 40, 43)])
    publish(index)
    assert everyone(index, tmp_path) == ([40, 41, 42],) * 3


@pytest.mark.parametrize(
    ("segments", "times"),
    [
        ([segment(0, 4, times=(5, 9)), segment(4, 16, times=(1, 7))], (1, 9)),
        ([segment(0, 4, times=(5, 9)), segment(6, 14, times=(1, 7))], None),
        ([segment(0, 4, times=(5, 9)), segment(4, 16)], None),
        ([segment(0, 4, times=(5, 9)), segment(4, 16, is_open=True)], None),
        ([segment(0, 4, times=(5, 9))], None),
        ([segment(0, 3), segment(3, 20, times=(5, 9)), segment(23, 5)], (5, 9)),
    ],
)
def test_a_record_states_the_times_of_the_old_rows_if_they_are_known(index, segments, times):
    index.link(segments)
    index.link(gone=[segments[0].place], replaced=[Replacement(STORE, 3, 12, 30, 30)])
    index.link(replaced=[Replacement(STORE, 4, 12, 31, 31)])
    record = index._session.log.record(index.log_state.number - 1)
    assert [replaced.times for replaced in record.replaced] == [times]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"end": 0}, "not behind its start"),
        ({"new_end": 19}, "not behind its start"),
        ({"new_start": 5}, "old offsets that are new ones"),
        ({"store": "kafka:c/t/0"}, "not one of linked segments"),
    ],
)
def test_a_replacement_that_can_not_be_is_refused(change, problem):
    good = Replacement(STORE, 0, ROWS, 20, 30)
    document = LogRecord(1, "link", 0, "", 0, genesis=GENESIS, replaced=(good,)).encode()
    assert LogRecord.decode(document, "record").replaced == (good,)
    with pytest.raises(ValueError, match=problem):
        structs.replace(good, **change)


def test_a_checkpoint_with_an_unsorted_table_is_refused():
    state = LogState().apply(LogRecord(1, "create", 0, "", 0, genesis=GENESIS), "log")
    replaced = (Replacement(STORE, 0, 5, 20, 20), Replacement(STORE, 7, 9, 20, 20))
    state = state.apply(LogRecord(2, "link", 0, "", 0, replaced=replaced, digest="a" * 32), "log")
    ranges = state.expired.replaced.stores[STORE]
    assert [*ranges.retired] == [(0, 5), (7, 9)]
    broken = ranges.retired.rows[::-1]
    ranges.retired.rows.flags.writeable = True
    ranges.retired.rows[:] = broken.copy()
    with pytest.raises(CorruptFile, match="not sorted and joined"):
        LogState.decode(state.encode(), "checkpoint")


# Tables of many ranges


@pytest.fixture
def many(index):
    """Replace every other offset of a file of 20,000: 10,000 ranges that do not touch. Then one more."""
    index.link(replaced=[Replacement(STORE, at, at + 1, 30_000, 30_000) for at in range(0, 20_000, 2)])
    index.link(replaced=[Replacement(STORE, 25_000, 25_002, 30_000, 30_000)])
    return index


def opened_state(storage):
    log = StorageLog(storage, SystemClock())
    return log.open()


def test_ten_thousand_ranges_are_in_an_object_of_their_own(many, tmp_path):
    state = many.log_state
    [named] = state.range_objects.values()
    assert (named.store, named.count, len(state.expired.replaced.retired(STORE))) == (STORE, 10_000, 10_001)
    # so a checkpoint has only the later range, whatever reads it
    assert len(state.encode()) < 10_000
    assert opened_state(many.storage) == state
    many.run_lifecycle()
    # without the storage, the root's copy of the log has all ranges
    copy_of_log = KeptLog(Root(tmp_path / "root", Disk())).read()
    assert copy_of_log == state and copy_of_log.encode() == state.encode()
    put_rows(many, [0, 1, 2, 19_999, 25_000, 25_002], position=26_000)
    publish(many)
    assert everyone(many, tmp_path) == ([1, 19_999, 25_002],) * 3
    assert checked(many.storage).status == "ok"


def test_orphans_are_tables_that_the_log_no_longer_names(many):
    first = [*many.log_state.range_objects]
    many.link(replaced=[Replacement(STORE, at, at + 1, 60_000, 60_000) for at in range(30_000, 40_000, 2)])
    assert [*many.log_state.range_objects] != first
    log = StorageLog(many.storage, SystemClock())
    log.open()
    sweep(many.storage, log, later_s=0)
    assert {info.name for info in many.storage.list(RANGES_PREFIX)} == {*first, *many.log_state.range_objects}
    sweep(many.storage, log)
    assert [info.name for info in many.storage.list(RANGES_PREFIX)] == [*many.log_state.range_objects]
    assert opened_state(many.storage) == many.log_state


def test_a_copy_has_the_tables_and_follows_their_changes(many, tmp_path):
    source, target = f"file://{tmp_path}/objects", f"file://{tmp_path}/copy"
    copy_index(source, target)
    with open_storage(target) as copied:
        assert opened_state(copied).expired == many.log_state.expired
        assert opened_state(copied).range_objects == many.log_state.range_objects
        many.link(replaced=[Replacement(STORE, at, at + 1, 60_000, 60_000) for at in range(30_000, 40_000, 2)])
        many._session.log.append_positions(many._session.epoch, {STORE: 99_999})
        many.run_lifecycle()
        assert many.log_state.expired.hidden is None
        copy_index(source, target)
        after = opened_state(copied)
        assert (after.expired, after.range_objects) == (many.log_state.expired, {})
        assert checked(copied).status == "ok"


@pytest.mark.parametrize("how", ["missing", "damaged", "other"])
def test_a_table_that_is_missing_damaged_or_another_one_costs_a_replay_until_it_is_repaired(many, how, tmp_path):
    state = many.log_state
    [named] = state.range_objects.values()
    storage = many.storage
    if how == "missing":
        storage.delete_many([named.name])
    elif how == "damaged":
        flip_object(storage, named.name, 40)
    else:
        storage.put(named.name, encode_ranges(RangeTable.of([(0, 9, 1, 0, 1)]).rows))
    with pytest.raises(CorruptFile, match=named.name):
        read_ranges(storage, named)
    assert opened_state(storage) == state
    report = checked(storage)
    assert [defect.file for defect in report.findings if defect.part != "checkpoint"] == [named.name]
    log = StorageLog(storage, SystemClock())
    log.open()
    assert named.name in [repair.object for repair in Repairs(storage, log).run(report, yes=True)]
    assert checked(storage).status == "ok"
    assert opened_state(storage).expired == state.expired


def test_a_copy_without_its_table_can_not_be_read(many, tmp_path):
    copy_index(f"file://{tmp_path}/objects", f"file://{tmp_path}/copy")
    with open_storage(f"file://{tmp_path}/copy") as copied:
        [named] = opened_state(copied).range_objects
        copied.delete_many([named])
        with pytest.raises(CorruptFile, match="verify --deep --repair"):
            opened_state(copied)


@pytest.mark.parametrize("replaced", [False, True])
def test_tasks_on_executors_get_the_hidden_entries(index, replaced):
    """Spark pickles them."""
    if replaced:
        index.link([segment(20, 20, is_open=True)], replaced=[Replacement(STORE, 0, 5, 20, 40)])
        index.link(replaced=[Replacement(STORE, 7, 9, 50, 50)])
    for hidden in (index.log_state.expired, index.log_state.expired.for_good):
        assert pickle.loads(pickle.dumps(hidden)) == hidden
