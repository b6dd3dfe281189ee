"""A reader of a writer's root follows an unsealed file while it grows: chains of what it read, and what came since."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.core import using
from tests.support.hanging import Crew
from tests.support.rounds import upload
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.base.kernels import compiled
from tiered_index.errors import CorruptFile
from tiered_index.format.layout import NATIVE
from tiered_index.format.names import JOURNAL_SUFFIX
from tiered_index.service.jobs.verify import check_root
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.reads import read_name
from tiered_index.service.read.files import root_view, unsealed
from tiered_index.service.read.files.root_view import RootView
from tiered_index.service.root import Root
from tiered_index.storage.disk import Disk
from tiered_index.types import no_progress

T_MS = 1_700_000_000_000


@pytest.fixture
def growing(tmp_path, clock, storage):
    """An index with few slots, so that chains are long, and its root."""
    settings = {"slots": 8, "items": 4_000, "background": False, "clock": clock, "storage_backend": storage}
    with IndexService.open(root=tmp_path / "root", **settings) as index:
        yield index, tmp_path / "root"


def put(index, offset, key="k", **more):
    index.put("t", 0, key, offset, 1, T_MS, **more)
    index.flush()


def test_a_file_that_is_shorter_than_its_layout_is_damaged_for_lookups_and_checks(growing):
    index, root = growing
    put(index, 1)
    index.close()
    (path,) = (root / "unsealed").glob("*.index")
    os.truncate(path, path.stat().st_size - 1)
    with IndexReader.open(root=root, environment=False) as reader:
        with pytest.raises(CorruptFile, match="shorter than its layout"):
            reader.query("t", "k")
    report = Report()
    check_root(Root(root, Disk()), report, no_progress)
    assert [defect.problem for defect in report.findings] == ["shorter than its layout"]


def test_damage_behind_what_was_read_fails_the_next_lookup(growing):
    index, root = growing
    with IndexReader.open(root=root, environment=False) as reader:
        put(index, 1)
        assert [item.offset for item in reader.query("t", "k")] == [1]
        put(index, 2)
        (journal,) = (root / "unsealed").glob(f"*{JOURNAL_SUFFIX}")
        layout = next(file for file in index.files() if file.count == 2).layout
        with journal.with_suffix(".index").open("r+b") as file:
            file.seek(layout.entry_position(2))
            file.write(b"\xff")
        with pytest.raises(CorruptFile, match="entries 2"):
            reader.query("t", "k")


def test_entries_that_the_writer_cut_off_are_not_read_on(growing, clock, storage):
    index, root = growing
    with IndexReader.open(root=root, environment=False) as reader:
        put(index, 1)
        (journal,) = (root / "unsealed").glob(f"*{JOURNAL_SUFFIX}")
        length = journal.stat().st_size
        put(index, 2, "lost")
        assert len(reader.query("t", "lost")) == 1
        index.close()
        # as after a sync that failed, on a disk without room for another journal
        os.truncate(journal, length)
        with IndexService.open(root=root, background=False, clock=clock, storage_backend=storage) as again:
            again.put("a-topic-with-a-longer-record", 0, "k", 3, 1, T_MS)
            again.flush()
            assert not reader.query("t", "lost").items
            assert [item.offset for item in reader.query("a-topic-with-a-longer-record", "k")] == [3]


def test_how_much_of_topics_was_read_is_that_of_the_files_that_a_look_returns(growing):
    index, root = growing
    view, name = RootView(Root(root, Disk())), read_name("own", "t")
    put(index, 1, source=name, source_position=1)
    (file,), reads = view.look()
    assert reads == {name: 1}
    put(index, 2, source=name, source_position=2)
    # another thread's look reads on first
    assert file.read_on(file.path.with_suffix(JOURNAL_SUFFIX))
    assert view.look() == ([file], {name: 2})
    # what came between two looks counts also if the file is compacted by then
    put(index, 3, source=name, source_position=3)
    upload(index)
    assert view.look().reads == {name: 3}


@pytest.mark.parametrize("is_overtaken", [False, True])
def test_a_look_that_began_before_a_put_hides_it_from_no_later_one(growing, monkeypatch, is_overtaken):
    """Looks of threads keep the last one: it must not count as one of what came while it was made."""
    index, root = growing

    put(index, 1)
    view, names, meanwhile = RootView(Root(root, Disk())), Disk.names, [3]

    def putting(disk, place):
        # behind the journals
        if place.name == "compacted" and meanwhile:
            put(index, meanwhile.pop())
            # another thread's look begins later, and ends sooner
            assert not is_overtaken or [file.count for file in view.look().handles] == [3]
        return names(disk, place)

    monkeypatch.setattr(root_view, "STEP_NS", 20_000_000)
    time.sleep(0.1)
    view.look()
    put(index, 2)
    monkeypatch.setattr(Disk, "names", putting)
    view.look()
    assert not meanwhile and [file.count for file in view.look().handles] == [3]
    assert view.look() is view.look()


def test_a_look_counts_until_something_changes(growing, monkeypatch):
    index, root = growing
    monkeypatch.setattr(root_view, "STEP_NS", 20_000_000)
    put(index, 1)
    view = RootView(Root(root, Disk()))
    for change in (
        lambda: put(index, 2),
        index.seal,
        lambda: upload(index),
        lambda: (root / "uploaded").rename(root / "u"),
    ):
        assert view.unchanged() is None
        time.sleep(0.1)
        # a journal that a look has found first is in the state of the next one
        for _ in range(2):
            view.look()
        assert view.unchanged() is view.look()
        change()
    assert view.unchanged() is None


def test_lookups_of_threads_find_each_put_that_ended_before_they_began(growing):
    index, root = growing
    crew = Crew()
    with IndexReader.open(root=root, environment=False) as reader, ThreadPoolExecutor(3) as pool:

        def look():
            while not crew.stop.is_set():
                reader.query("t", "k")

        crew.begin(look)
        try:
            for count in range(1, 61):
                put(index, count)
                assert [*pool.map(lambda _: len(reader.query("t", "k")), range(3))] == [count] * 3
        finally:
            crew.finish()


@pytest.mark.parametrize("with_core", [True, False])
def test_each_flush_is_found_beside_what_was_read_before(growing, monkeypatch, with_core):
    """Each entry is verified once."""
    (index, root), random = growing, np.random.default_rng(5)
    put, verified, real = {}, [], unsealed.crc32
    monkeypatch.setattr(unsealed, "crc32", lambda data, *crc: verified.append(len(data)) or real(data, *crc))
    with using(compiled() if with_core else None), IndexReader.open(root=root, environment=False) as reader:
        for flush in range(12):
            keys = [f"key-{number}" for number in random.integers(0, 20 + flush, 25)]
            keys += ["often"] * (30) + [f"only-{flush}"]
            for number, key in enumerate(keys):
                # times fall, too, and each flush has a topic of its own
                topic, offset = ("t", f"t-{flush}")[number % 2], 1_000 * flush + number
                index.put(topic, 0, key, offset, 1, T_MS + 1_000 * (number - 7 * flush))
                put.setdefault((topic, key), set()).add(offset)
            at_ms = T_MS + 1_000_000 + 1_000 * flush
            index.put("t", 0, "newest", flush, 1, at_ms)
            index.flush()
            verified.clear()
            assert [item.offset for item in reader.query("t", "newest", at_ms, at_ms)] == [flush]
            for (topic, key), offsets in put.items():
                assert {item.offset for item in reader.query(topic, key, max_count=10_000)} == offsets
            answers = reader.query_many([Lookup(topic, key, max_count=10_000) for topic, key in put])
            assert [{item.offset for item in answer} for answer in answers] == [*put.values()]
            assert not reader.query("t", "absent").items
            assert sum(verified) == (len(keys) + 1) * NATIVE.schema.entry.itemsize


def test_a_look_that_is_used_again_misses_no_change_of_the_root(growing, tmp_path):
    """Not even if the root is a link."""
    index, root = growing
    (tmp_path / "link").symlink_to(root)

    def settle():
        # then the times of the folders tell each later change, and lookups share a look
        time.sleep(2.1)
        assert offsets() == offsets()

    def offsets():
        return sorted(item.offset for item in reader.query("t", "k", max_count=100))

    with IndexReader.open(root=tmp_path / "link", environment=False) as reader:
        put(index, 1)
        settle()
        put(index, 2)
        assert offsets() == [1, 2]  # the journal is longer
        upload(index)
        assert offsets() == [1, 2]  # the file has moved
        put(index, 3)
        assert offsets() == [1, 2, 3]  # another file began
        settle()
        upload(index, rounds=2)
        assert not [*(root / "unsealed").glob("*.index"), *(root / "compacted").glob("*.index")]
        assert offsets() == [1, 2, 3]  # a file has left the root, or is in its last folder
        put(index, 4)
        settle()
        (root / "aside").mkdir()
        with pytest.raises(CorruptFile, match="interrupted"):
            reader.query("t", "k")
        (root / "aside").rmdir()
        settle()
        (journal,) = (root / "unsealed").glob(f"*{JOURNAL_SUFFIX}")
        for path in (journal, journal.with_suffix(".index")):
            path.unlink()
        with pytest.raises(CorruptFile, match="no longer has it"):
            reader.query("t", "k")


def test_a_read_of_the_log_that_began_before_a_file_left_the_root_loses_no_entry(
    open_index, tmp_path, faulty, clock, monkeypatch
):
    """The read ended with success after a lookup had looked at the root without the file, and had failed."""
    index, root = open_index("root", local_keep_s=0), tmp_path / "root"
    monkeypatch.setattr(root_view, "STEP_NS", 20_000_000)
    put(index, 1)
    answers, is_listed, ends = [], threading.Event(), threading.Event()
    with IndexReader.open(root=root, storage_backend=faulty, clock=clock, environment=False) as reader:
        time.sleep(0.1)
        for _ in range(2):
            assert len(reader.query("t", "k")) == 1
        faulty.fail("list", times=None, error=lambda text: CorruptFile("log", text))
        clock.advance(60)
        with pytest.raises(CorruptFile, match="scripted"):
            reader.query("t", "k")
        faulty.clear()
        clock.advance(2)
        faulty.meanwhile("list", lambda: is_listed.set() or ends.wait(30), when="after")
        lookup = threading.Thread(target=lambda: answers.extend(reader.query("t", "k")))
        lookup.start()
        try:
            assert is_listed.wait(30)
            upload(index, rounds=2)
            assert not [*root.rglob("*.index")]
            time.sleep(0.1)
            for _ in range(2):
                assert reader.query("t", "k", timeout_s=0.2, allow_partial=True).status == "partial"
        finally:
            ends.set()
            lookup.join()
        assert len(answers) == len(reader.query("t", "k")) == 1
