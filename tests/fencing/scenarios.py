"""One writer per index, on any storage that several processes can reach.

A test module derives a class and has two fixtures: `uri`, a place for the test only, and `storage`, opened there.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.fencing.races import LogRaceScenarios
from tests.fencing.writer import FIRST, KEYS, MOMENTS, NOW_MS, put
from tests.support.hanging import beside, until
from tests.support.log_records import an_object, open_log, publish
from tests.support.processes import started, without_settings
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.base.clock import ManualClock, SystemClock
from tiered_index.errors import LockHeld, ObjectExists, WriterFenced
from tiered_index.service.jobs.erase import EraseRequest, Erasure, erase
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord
from tiered_index.storage.base import Bytes, Storage, WrapperStorage
from tiered_index.storage.opening import open_storage

TIMEOUT_S = 120


def open_index(root: Path, uri: str, clock: ManualClock | None = None, **settings: Any) -> IndexService:
    chosen: dict[str, Any] = {"background": False, "slots": 101, "items": 50, **settings}
    return IndexService.open(root=root, storage=uri, clock=clock, **chosen)


def put_many(index: IndexService, topic: str, count: int) -> None:
    for number in range(count):
        put(index, number, topic)


def offsets(index: IndexService | IndexReader, topic: str) -> list[int]:
    """Return the offsets of every answer, in rising order; each answer must be complete."""
    all_offsets = []
    for key in range(KEYS):
        result = index.query(topic, f"key-{key}", max_count=100_000)
        assert result.status == "complete"
        all_offsets += [item.offset for item in result]
    return sorted(all_offsets)


def records(storage: Storage) -> list[LogRecord]:
    """Return all records of the log, which must have no hole."""
    names = [info.name for info in storage.list("log/")]
    log_records = [LogRecord.decode(storage.get(name), name) for name in names]
    assert [record.number for record in log_records] == list(range(1, len(log_records) + 1))
    return log_records


def objects(storage: Storage) -> list[str]:
    """Return the names of the stored objects, which must be those that the log names."""
    names = [info.name for info in storage.list("data/")]
    assert names == sorted(StorageLog(storage, SystemClock()).open().objects)
    return names


def writer(root: Path, uri: str, moment: str, lease_ttl_s: float) -> AbstractContextManager[subprocess.Popen[str]]:
    """Start a writer in a separate process."""
    command = [sys.executable, "-m", "tests.fencing.writer", str(root), uri, moment, str(lease_ttl_s)]
    return started(command, without_settings())


def hear(process: subprocess.Popen[str], event: str | None = None) -> dict[str, Any]:
    """Return the next line; check that it reports `event`, if given."""
    line = process.stdout.readline()
    assert line, process.communicate(timeout=TIMEOUT_S)[1]
    document: dict[str, Any] = json.loads(line)
    assert event in (None, document["event"])
    return document


class RepeatingStorage(WrapperStorage):
    """A client that repeats every put-if-absent, as after a lost response: even the winner finds its object there."""

    def put_if_absent(self, name: str, data: Bytes) -> None:
        self.inner.put_if_absent(name, data)
        self.inner.put_if_absent(name, data)


class FencingScenarios(LogRaceScenarios):
    """Fixtures: `uri`, `storage`."""

    def test_a_root_and_an_index_have_one_writer_and_its_end_is_noticed(self, uri: str, tmp_path: Path) -> None:
        with writer(tmp_path / "first", uri, "with nothing to publish", 60) as first:
            hear(first, "flushed")
            for root in ("first", "second"):  # the root's lock, the index's lease
                with pytest.raises(LockHeld) as held:
                    open_index(tmp_path / root, uri)
                assert (held.value.pid, held.value.host) == (first.pid, socket.gethostname())
            first.kill()
            first.wait(TIMEOUT_S)
        with pytest.raises(LockHeld):
            open_index(tmp_path / "second", uri)  # the lease is still in force
        with open_index(tmp_path / "first", uri) as again:  # the root's own writer does not wait for it
            assert offsets(again, "old") == list(range(FIRST))

    def test_a_lease_keeps_others_out_until_it_is_released(self, uri: str, storage: Storage, tmp_path: Path) -> None:
        clock = ManualClock(NOW_MS)
        with open_index(tmp_path / "first", uri, clock) as first:
            with pytest.raises(LockHeld) as held:
                open_index(tmp_path / "second", uri, clock)
            assert held.value.pid == os.getpid()
            clock.advance(59)
            first.run_lifecycle()  # renews the lease
            clock.advance(59)
            with pytest.raises(LockHeld):
                open_index(tmp_path / "second", uri, clock)
        with open_index(tmp_path / "second", uri, clock):  # the lease is released, so this takes no wait
            pass
        kinds = [(record.kind, record.epoch) for record in records(storage)]
        assert kinds == [("create", 0), ("fence", 1), ("fence", 2)]

    def test_a_writer_that_was_taken_over_publishes_nothing(self, uri: str, storage: Storage, tmp_path: Path) -> None:
        clock = ManualClock(NOW_MS)
        first = open_index(tmp_path / "first", uri, clock)
        put_many(first, "old", 70)
        first.flush()
        # as `recover --take-over`
        config = IndexConfig(root=tmp_path / "second", storage=uri, background=False, slots=101, items=50)
        with IndexService(config, clock=clock, takes_over=True) as second:
            put_many(second, "new", 30)
            second.seal()
            second.run_lifecycle()
            before = records(storage)
            first.seal()
            for _ in range(2):
                with pytest.raises(WriterFenced, match=r"newer writer \(epoch 2\)"):
                    first.run_lifecycle()
            with pytest.raises(WriterFenced):
                put_many(first, "old", 1)
            assert first.health()["fenced"]
            assert records(storage) == before
            objects(storage)
            assert offsets(first, "old") == list(range(70))  # it keeps its files, and answers from them
            first.close()
        # once it is the writer again, it publishes its kept entries
        with open_index(tmp_path / "first", uri, clock) as first:
            first.run_lifecycle()
            objects(storage)
        with IndexReader.open(uri, clock=clock) as reader:
            assert offsets(reader, "old") == list(range(70))
            assert offsets(reader, "new") == list(range(30))

    def test_a_writer_that_is_taken_over_within_its_own_merge_publishes_nothing(
        self, uri: str, storage: Storage, tmp_path: Path
    ) -> None:
        clock, held = ManualClock(NOW_MS), FaultStorage(open_storage(uri))
        first = open_index(tmp_path / "first", uri, clock, storage_backend=held)
        put_many(first, "old", 70)
        first.seal()
        first.run_lifecycle()
        clock.advance(2 * 86_400)
        config = IndexConfig(root=tmp_path / "second", storage=uri, background=False, slots=101, items=50)
        newer: list[IndexService] = []
        # the shards are there, and the record is about to be put
        held.meanwhile(
            "put_if_absent",
            lambda: newer.append(IndexService(config, clock=clock, takes_over=True)),
            name_prefix="log/",
        )
        with pytest.raises(WriterFenced, match=r"newer writer \(epoch 2\)"):
            first.run_merge()
        assert first.health()["fenced"]
        assert not any(record.kind == "merge" for record in records(storage))
        objects(storage)
        first.close()
        with newer[0] as second:
            assert second.run_merge().jobs == 1
            assert [record.epoch for record in records(storage) if record.kind == "merge"] == [2]
            assert offsets(second, "old") == list(range(70))

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_stopped_process_that_wakes_publishes_nothing_and_says_why(
        self, uri: str, storage: Storage, tmp_path: Path, moment: str
    ) -> None:
        with writer(tmp_path / "first", uri, moment, 0.5) as first:
            said = sorted((hear(first) for _ in range(2)), key=lambda document: document["event"])
            assert [document["event"] for document in said] == ["flushed", "held"]
            assert said[0]["durable"] == FIRST - 1
            os.kill(first.pid, signal.SIGSTOP)
            published = [record for record in records(storage) if record.kind == "publish"]
            assert len(published) == (1 if MOMENTS[moment].when == "after" else 0)
            with take_over(tmp_path / "second", uri) as second:
                put_many(second, "new", 30)
                second.seal()
                second.run_lifecycle()
                before = records(storage)
                assert [record.epoch for record in before if record.kind == "fence"] == [1, 2]
                os.kill(first.pid, signal.SIGCONT)
                first.stdin.write("go on\n")
                first.stdin.flush()
                fenced = hear(first, "fenced")
                hear(first, "closed")
                _, err = first.communicate(timeout=TIMEOUT_S)
                assert first.returncode == 0, err
                # the reason is in the errors of puts, in its health, and in its output
                assert "newer writer (epoch 2)" in fenced["reason"]
                assert fenced["fenced"]
                assert any("newer writer (epoch 2)" in problem for problem in fenced["problems"])
                assert "newer writer (epoch 2)" in err
                # it publishes nothing
                assert records(storage) == before
                objects(storage)
                # all accepted entries are durable in its root, and lookups find them
                assert fenced["durable"] == fenced["accepted"] - 1 >= FIRST - 1
                assert fenced["answers"] == fenced["accepted"]
                with IndexReader.open(uri, root=tmp_path / "first") as reader:
                    assert offsets(reader, "old") == list(range(fenced["accepted"]))
                assert offsets(second, "new") == list(range(30))
        with open_index(tmp_path / "first", uri, items=None) as again:
            again.seal()
            again.run_lifecycle()
            assert again.durable_position("old") == fenced["durable"]
            objects(storage)
        with IndexReader.open(uri) as reader:
            assert offsets(reader, "old") == list(range(fenced["accepted"]))
            assert offsets(reader, "new") == list(range(30))

    @pytest.fixture
    def logs(self, uri: str, storage: Storage, tmp_path: Path) -> Iterator[tuple[StorageLog, StorageLog]]:
        """The views of two processes of one index's log. The first one's storage has faults."""
        open_index(tmp_path / "root", uri).close()
        with open_storage(uri) as other:
            yield open_log(FaultStorage(storage), SystemClock()), open_log(other, SystemClock())

    def test_of_two_records_for_one_number_the_second_gets_the_next(
        self, logs: tuple[StorageLog, StorageLog], storage: Storage
    ) -> None:
        first, second = logs
        start, hang = first.state.number, first.storage.hang("put_if_absent", name_prefix="log/")
        common, own = an_object(0), an_object(1)
        published = beside(lambda: publish(first, 1, (common, own)))
        assert hang.entered.wait(TIMEOUT_S)  # it has chosen its number
        publish(second, 1, (common,))
        hang.release.set()
        assert published() == second.refresh()
        # it read the log again: the winner has added the object, so it is not added again
        assert [[o.name for o in record.add] for record in records(storage)[start:]] == [[common.name], [own.name]]

    def test_an_eraser_that_wakes_behind_a_merge_and_another_eraser(
        self, uri: str, storage: Storage, tmp_path: Path
    ) -> None:
        clock = ManualClock(NOW_MS)
        with open_index(tmp_path / "root", uri, clock, local_keep_s=0) as index:
            for topic in ("old", "new"):
                put_many(index, topic, 70)
            index.seal()
            index.run_lifecycle()
        clock.advance(86_400)

        def run(through: Storage, *keys: str) -> Erasure:
            log = open_log(through, clock)
            if not keys:
                merge(through, log, clock, MergeOptions(window_s=3600, min_age_s=0), threads=1)
            request = EraseRequest("old", keys or ("key-1",), before_ms=NOW_MS + 10**6)
            return erase(through, log, request, clock, yes=True, now=True, grace_s=0, threads=1)

        slow = FaultStorage(storage)
        hang = slow.hang("put", name_prefix="data/")  # the first object without the erased entries
        with open_storage(uri) as other:
            woken = beside(lambda: run(slow, "key-0"))
            assert hang.entered.wait(TIMEOUT_S)
            run(other)
            hang.release.set()
            assert isinstance(woken(), Erasure)
            assert run(other, "key-0", "key-1").remaining == ()
        records(storage)
        objects(storage)
        with IndexReader.open(uri, clock=clock) as reader:
            assert offsets(reader, "new") == list(range(70))
            assert offsets(reader, "old") == [number for number in range(70) if number % KEYS > 1]

    def test_a_record_that_loses_its_number_to_a_fence_is_none(
        self, logs: tuple[StorageLog, StorageLog], storage: Storage
    ) -> None:
        first, second = logs
        hang = first.storage.hang("put_if_absent", name_prefix="log/")
        refused = beside(lambda: publish(first, 1, (an_object(1),)))
        assert hang.entered.wait(TIMEOUT_S)
        assert second.claim_epoch() == 2
        hang.release.set()
        assert type(refused()) is WriterFenced
        assert [record.kind for record in records(storage)] == ["create", "fence", "fence"]

    def test_two_claims_of_one_epoch_get_different_epochs(self, logs: tuple[StorageLog, StorageLog]) -> None:
        first, second = logs
        hang = first.storage.hang("put_if_absent", name_prefix="epoch/")
        claimed = beside(first.claim_epoch)
        assert hang.entered.wait(TIMEOUT_S)
        assert second.claim_epoch() == 2
        hang.release.set()
        assert claimed() == 3
        with pytest.raises(WriterFenced):
            publish(second, 2, (an_object(1),))

    def test_the_winner_of_a_repeated_put_knows_that_it_won(self, uri: str, storage: Storage, tmp_path: Path) -> None:
        name = "probe/repeated"
        with pytest.raises(ObjectExists):
            # the log gets this error for each of its records
            RepeatingStorage(storage).put_if_absent(name, b"x")
        storage.delete_many([name])
        repeating = RepeatingStorage(open_storage(uri))
        with open_index(tmp_path / "root", uri, storage_backend=repeating, checkpoint_every=2) as index:
            put_many(index, "old", 70)
            index.seal()
            index.run_lifecycle()
            assert index.health()["problems"] == []
        history = records(storage)
        assert [record.kind for record in history] == ["create", "fence", "publish", "publish"]
        assert len({record.attempt for record in history}) == len(history)
        assert len([each for record in history for each in record.add]) == len(objects(storage)) == 2
        with IndexReader.open(uri) as reader:
            assert offsets(reader, "old") == list(range(70))


def take_over(root: Path, uri: str) -> IndexService:
    """Return a writer that opened the index after the stopped writer's lease had ended."""
    opened: list[IndexService] = []

    def let_in() -> bool:
        try:
            opened.append(open_index(root, uri))
        except LockHeld:
            return False
        return True

    until(let_in, within_s=TIMEOUT_S, every_s=0.05)
    return opened[0]
