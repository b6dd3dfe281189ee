"""Ends of an index: a close beside other calls, a close that fails, an interrupt, and an index that is forgotten.

What a call has confirmed stays, the root is free for the next writer, and no call hangs.
"""

import gc
import shutil
import subprocess
import sys
import threading
import time
from collections import UserDict

import numpy as np
import pytest

from tests.faults.conftest import ASK
from tests.stress.census import begin_census, census
from tests.support.disk_faults import FaultDisk
from tests.support.hanging import beside, until
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.errors import CloseTimeout, IndexClosed, RootBehind, StorageUnavailable, TieredIndexError
from tiered_index.format.layout import HEADER_SIZE, read_header
from tiered_index.service import index as index_module
from tiered_index.service.anew import begin_anew
from tiered_index.storage.base import WrapperStorage

NOW_MS = 1_700_000_000_000


def put(service, number, **more):
    service.put("t", 0, "k", number, 1, NOW_MS + number * 1000, **more)


# Beside other calls


@pytest.mark.parametrize("kind", ["reader", "service"])
def test_lookups_under_way_end_at_a_close(open_index, open_reader, storage, kind):
    service = open_index(local_keep_s=0)
    for number in range(4):
        put(service, number)
        service.seal()
        service.run_lifecycle()
    service.close()
    begin_census()
    faulty = FaultStorage(storage)
    index = (open_reader if kind == "reader" else open_index)(storage_backend=faulty, query_threads=1)
    hang = faulty.hang("get_range", times=None, name_prefix="data/")
    lookups = [beside(lambda act=act: act(index)) for act in (*ASK.values(), *ASK.values())]
    assert hang.entered.wait(60)
    time.sleep(0.05)  # so that the others wait in the queue
    closing = beside(index.close)
    closing.ended(0.05)
    hang.release.set()
    assert closing() is None
    for lookup in lookups:
        assert lookup.ended(), "a lookup hangs"
        if lookup.error is None:
            assert [item.offset for item in lookup.value] == [3, 2, 1, 0]
        else:
            assert isinstance(lookup.error, TieredIndexError), repr(lookup.error)
    for act in ASK.values():
        with pytest.raises(IndexClosed, match="closed"):
            act(index)
    # threads end when their lookups do; a close waits for that only for a moment
    until(lambda: census(service.config.root, collect=False).threads == 0)


class HeldBatch(UserDict):
    """A batch whose columns arrive slowly."""

    def __getitem__(self, name):
        self.entered.set()
        assert self.release.wait(60)
        return super().__getitem__(name)


@pytest.mark.parametrize("many", [False, True])
def test_a_put_that_returned_beside_a_close_is_flushed(open_index, offsets, many):
    service, entered, release = open_index(), threading.Event(), threading.Event()
    put(service, 1)
    batch = HeldBatch(topic=["t"], queue_id=[0], key=["k"], offset=[2], size=[1], timestamp_ms=[NOW_MS])
    batch.entered, batch.release = entered, release

    def keys():
        entered.set()
        assert release.wait(60)
        yield "k"

    act = (lambda: service.put_batch(batch)) if many else (lambda: service.put("t", 0, keys(), 2, 1, NOW_MS))
    putting = beside(act)
    assert entered.wait(60)
    closing = beside(service.close)
    closing.ended(0.1)
    release.set()
    assert putting.ended() and closing() is None
    if putting.error is not None:
        # a caller that skips bad messages must not skip this one
        assert isinstance(putting.error, IndexClosed) and not isinstance(putting.error, ValueError)
    assert offsets(open_index()) == ([1, 2] if putting.error is None else [1])


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_close_flushes_before_it_waits_for_a_round_and_after_an_interrupt_waits_for_none(
    open_index, storage, interrupted
):
    """A process that was killed during that wait lost the entries of its write buffer."""
    faulty, disk = FaultStorage(storage), FaultDisk()
    index = open_index(storage_backend=faulty, disk=disk)
    put(index, 1)
    index.seal()
    hang = faulty.hang("put", name_prefix="data/")
    running = beside(index.run_lifecycle)
    assert hang.entered.wait(60)
    put(index, 2, source="s", source_position=2)
    if interrupted:
        disk.fail("sync", error=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            index.flush()
    closing = beside(index.close)
    try:
        if interrupted:
            assert closing.ended(30) and isinstance(closing.error, CloseTimeout)
            open_index().close()
        else:
            until(lambda: index.durable_position("s") == 2)
            assert not closing.ended(0)
    finally:
        hang.release.set()
        assert running.ended() and isinstance(closing(), CloseTimeout if interrupted else None.__class__)


@pytest.mark.parametrize("background", [False, True])
def test_a_close_waits_for_a_hanging_storage_only_as_long_as_it_may(open_index, offsets, storage, background):
    faulty = FaultStorage(storage)
    settings = {"background": background, "lifecycle_interval_s": 0.01, "lease_ttl_s": 1}
    index = open_index(storage_backend=faulty, **settings)
    put(index, 1)
    index.seal()
    put(index, 2)
    hang = faulty.hang("*", times=None)
    if background:
        assert hang.entered.wait(60)
    with pytest.raises(CloseTimeout, match=r"has been under way for .* uploaded after the next start"):
        index.close(timeout_s=0.5)
    try:
        assert index.close() is None
        again = open_index(storage_backend=storage)
        # the last put was flushed before the wait
        assert offsets(again) == [1, 2]
    finally:
        hang.release.set()


def test_the_error_of_a_block_is_not_hidden_by_a_storage_that_hangs(open_index, storage, monkeypatch):
    faulty = FaultStorage(storage)
    index = open_index(storage_backend=faulty)
    close = index.close
    monkeypatch.setattr(index, "close", lambda: close(timeout_s=0.2))
    hang = faulty.hang("*", times=None)
    try:
        with pytest.raises(KeyError, match="of the block"), index:
            raise KeyError("of the block")
    finally:
        hang.release.set()


def test_a_lock_that_an_interrupt_left_held_stops_no_close(open_index):
    index = open_index()
    put(index, 1)
    # as a thread that was interrupted between the end of a block and its exit
    beside(index._buffer.lock.acquire)()
    with pytest.raises(CloseTimeout, match="another thread holds the write buffer"):
        index.close(timeout_s=0.2)
    with pytest.raises(IndexClosed):
        index.query("t", "k")


def test_an_index_that_another_call_closes_delays_no_other_at_the_end_of_the_interpreter(tmp_path, monkeypatch, caplog):
    """The function that `atexit` calls raises nothing before all indexes are closed."""
    monkeypatch.setattr(index_module, "_STOP_PATIENCE_S", 0.05)
    first, second = (
        IndexService.open(root=tmp_path / name, storage=f"memory://{tmp_path.name}-{name}", background=False)
        for name in "ab"
    )
    monkeypatch.setattr(index_module, "opened_ones", [first, second])
    held, freed = threading.Event(), threading.Event()

    def close():
        with first._ending:
            held.set()
            assert freed.wait(60)

    closing = beside(close)
    assert held.wait(60)
    index_module._close_all()
    freed.set()
    closing()
    assert second._closing == [] and "another call had not closed" in caplog.text
    first._go_on_closing(1.0)


def test_a_thread_that_left_its_own_lock_held_can_close(open_index, offsets):
    index = open_index()
    put(index, 1)
    index._buffer.lock.acquire()
    index.close()
    assert offsets(open_index()) == [1]


def test_a_closed_index_does_nothing(make_world):
    world = make_world()
    service = world.open()
    world.publish(3)
    reader = IndexReader.open(root=world.root, storage_backend=world.storage)
    number = reader.refresh().number
    lookups = {"query": ("t", "k"), "query_many": ([],), "files": ()}
    calls = {"put": ("t", 0, "k", 0, 0, 0), "put_batch": ({},), "flush": (), "seal": (), "run_lifecycle": ()}
    for index, arguments in ((reader, lookups | {"refresh": ()}), (service, lookups | calls | {"files_table": ()})):
        index.close()
        index.close()
        for name in arguments:
            with pytest.raises(IndexClosed, match="closed"):
                getattr(index, name)(*arguments[name])
    assert reader.log_state.number == number > 0


@pytest.mark.parametrize("name", ["flush", "seal", "run_lifecycle"])
def test_a_call_that_had_passed_its_check_before_a_close_does_nothing(open_index, storage, monkeypatch, name):
    """It would take disk space in an unlocked root, or upload and delete there beside the next writer."""
    disk = FaultDisk()
    service = open_index(disk=disk, local_keep_s=0)
    put(service, 1)
    service.seal()
    put(service, 2)
    service.flush()
    entered, go_on, check = threading.Event(), threading.Event(), service._check_open

    def held():
        check()
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            assert go_on.wait(60)

    monkeypatch.setattr(service, "_check_open", held)
    late = beside(getattr(service, name))
    assert entered.wait(60)
    service.close()
    calls, names = disk.calls(), [info.name for info in storage.list("")]
    go_on.set()
    assert isinstance(late(), IndexClosed)
    assert (disk.calls(), [info.name for info in storage.list("")]) == (calls, names)


# What a close writes and deletes


@pytest.mark.parametrize("times", [[NOW_MS], [5_000], [NOW_MS, 5_000]], ids=["main", "quarantine", "both"])
def test_a_file_begun_by_the_last_flush_has_its_tables(open_index, tmp_path, times):
    for rounds in (1, 2):
        service = open_index()
        for time_ms in times:
            service.put("t", 0, "k", rounds, 1, time_ms)
        service.close()
        paths = list((tmp_path / "root" / "unsealed").glob("*.index"))
        assert len(paths) == len(times)
        for path in paths:
            data = path.read_bytes()
            header = read_header(data[:HEADER_SIZE], path.name)
            heads = np.frombuffer(data, ">i4", 2 * 7, HEADER_SIZE)[::2]
            assert (header.items, header.slots_in_use) == (rounds, 1)
            assert (header.begin_ms, header.end_ms) in [(time_ms, time_ms) for time_ms in times]
            assert sorted(heads.tolist()) == [0] * 6 + [rounds]


def contents(root):
    """Return the files of a root with their bytes, except half-made ones, which any process may delete."""
    paths = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".tmp-")]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


@pytest.mark.parametrize(("copied", "buffered"), [("before", False), ("after", True)])
def test_a_backup_in_the_roots_place_stays_as_it_is(open_index, storage, tmp_path, clock, copied, buffered):
    """The close would delete a file by name that a lookup still reads. The backup has its only copy."""
    root, backup = tmp_path / "root", tmp_path / "backup"
    faulty = FaultStorage(storage)
    service = open_index(storage_backend=faulty, local_keep_s=0)
    for number in range(2):
        put(service, number)
        service.seal()
        if number == 0:
            service.run_lifecycle()
    if copied == "before":
        shutil.copytree(root, backup)
    hang = faulty.hang("get_range", name_prefix="data/")
    reading = beside(lambda: service.query("t", "k"))  # the replaced file has to wait for it
    assert hang.entered.wait(60)
    service.run_lifecycle()
    if copied == "after":
        shutil.copytree(root, backup)
    root.rename(tmp_path / "moved")
    backup.rename(root)
    before = contents(root)
    assert any(name.startswith("unsealed/") for name in before)
    hang.release.set()
    assert len(reading()) == 2
    with pytest.raises(StorageUnavailable, match="opened"):
        service.run_lifecycle()
    if buffered:  # there is no file for it
        put(service, 2)
        with pytest.raises(StorageUnavailable, match="opened"):
            service.close()
    else:
        service.close()
    assert contents(root) == before
    if copied == "before":  # the copy doesn't know the later publications of its root
        with pytest.raises(RootBehind):
            open_index()
        config = IndexConfig(root=root, slots=7, items=20, background=False, query_threads=2)
        assert begin_anew(config, clock=clock, storage=storage).stored == 1
    restored = open_index()
    assert [item.offset for item in restored.query("t", "k")] == [1, 0]
    assert restored.health()["problems"] == []


# A close that fails, and calls that are interrupted


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("error", [MemoryError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["disk", "lease"])
def test_a_close_that_fails_in_any_way_frees_the_root(open_index, offsets, storage, tmp_path, where, background, error):
    begin_census()
    disk, faulty = FaultDisk(), FaultStorage(storage)
    service = open_index(disk=disk, storage_backend=faulty, background=background)
    put(service, 1)
    service.flush()
    put(service, 2)
    if where == "disk":
        disk.fail("sync", times=None if error is MemoryError else 1, error=error)
    else:
        faulty.fail("*", name_prefix="lease/", error=error)
    with pytest.raises(error):
        service.close()
    disk.clear()
    service.close()  # a second close does nothing, or ends what an interrupt left
    until(lambda: census(tmp_path).threads == 0)
    assert census(tmp_path).below == 0
    with pytest.raises(IndexClosed):
        put(service, 9)
    service = open_index()
    stored = offsets(service)
    assert stored in ([1], [1, 2])
    put(service, 3)
    service.flush()
    assert offsets(service) == [*stored, 3]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("operation", ["pwrite", "sync"])
def test_a_disk_that_hangs_delays_a_close_no_longer_than_its_bound(open_index, operation, background):
    """The files stay locked, because the write may still end; what was durable is found by readers."""
    release, entered = threading.Event(), threading.Event()

    class HangingDisk(FaultDisk):
        hangs = False

        def _hang(self, name):
            if self.hangs and name == operation:
                entered.set()
                assert release.wait(120)

        def pwrite(self, *arguments):
            self._hang("pwrite")
            return super().pwrite(*arguments)

        def sync(self, *arguments):
            self._hang("sync")
            return super().sync(*arguments)

    disk = HangingDisk()
    service = open_index(disk=disk, background=background)
    put(service, 1)
    service.flush()
    put(service, 2)
    disk.hangs = True
    closing = beside(lambda: service.close(timeout_s=0.5))
    assert entered.wait(60)
    assert closing.ended(60), "close hangs"
    assert isinstance(closing.error, CloseTimeout)
    assert f"the disk has not ended: {service.config.root} stays locked until the process ends" in str(closing.error)
    with pytest.raises(IndexClosed):
        put(service, 3)
    with IndexReader.open(root=service.config.root, storage_backend=service._parts.storage) as reader:
        assert 1 in [item.offset for item in reader.query("t", "k")]
    release.set()
    until(lambda: not any(thread.name == "tiered-index-close" for thread in threading.enumerate()))


def test_a_close_works_in_a_process_that_can_start_no_thread(open_index, offsets, monkeypatch):
    """Python starts no thread while it ends."""
    service = open_index()
    put(service, 1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("can't start")))
        service.close()
    assert offsets(open_index()) == [1]


def test_a_storage_whose_close_is_interrupted_is_closed(open_index, storage):
    closed = []

    class InterruptedOnce(WrapperStorage):
        def close(self):
            closed.append(len(closed) > 0)
            if closed == [False]:
                raise KeyboardInterrupt

    service = open_index(storage_backend=InterruptedOnce(storage))
    with pytest.raises(KeyboardInterrupt):
        service.close()
    assert closed == [False, True]


def test_after_an_interrupt_each_call_says_what_to_do(open_index, offsets):
    """`tests/reliability/interrupts.py` interrupts each call at random moments, and puts afterwards."""
    disk = FaultDisk()
    index = open_index(disk=disk)
    put(index, 1, source="s", source_position=1)
    index.flush()
    put(index, 2)
    disk.fail("sync", error=MemoryError)
    with pytest.raises(MemoryError):
        index.seal()
    arguments = {"archive": ("l", 0, 1, lambda at, size: b"1"), "query": ("t", "k")}
    for further in ("flush", "run_lifecycle", "topics", *arguments):
        with pytest.raises(IndexClosed, match=r"an interrupt ended .*: close the index and open it again"):
            getattr(index, further)(*arguments.get(further, ()))
    assert any("interrupt" in problem for problem in index.health()["problems"])
    index.close()
    index = open_index()
    assert offsets(index) in ([1], [1, 2])
    assert index.durable_position("s") == 1


# An index that nobody closes


@pytest.mark.parametrize("background", [True, False])
def test_a_service_that_is_forgotten_is_closed_with_a_warning(tmp_path, background):
    begin_census()
    where = {"root": tmp_path / "root", "storage": f"file://{tmp_path}/storage", "disk": FaultDisk(), "slots": 7}
    service = IndexService.open(background=background, items=12, **where)
    put(service, 1)
    with pytest.warns(ResourceWarning, match="unclosed index"):
        del service
        gc.collect()
    with IndexService.open(background=False, items=12, **where) as again:
        assert len(again.query("t", "k")) == 1
    until(lambda: census(tmp_path).threads == 0)


PROGRAM = """
import os, sys
from tiered_index import IndexService

def held():
    place = sys.argv[1]
    options = {"root": place + "/root", "storage": "file://" + place + "/storage", "flush_interval_s": 3600}
    with IndexService.open(**options) as service:
        service.put("t", 0, "k", 1, 1, 1_700_000_000_000)
        yield service

kept = held()
next(kept)
if sys.argv[2] == "forked" and os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize("way", ["whole", "forked"])
def test_an_open_index_is_flushed_when_the_interpreter_ends(tmp_path, way):
    """The process that opened it flushes it; a forked child does not touch it."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "" or way == "forked"
    with IndexReader.open(root=tmp_path / "root") as again:
        assert len(again.query("t", "k")) == (1 if way == "whole" else 0)
