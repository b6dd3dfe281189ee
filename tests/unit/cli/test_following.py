"""`ingest --follow` ends on signals, archives beside its loop, prints status lines, and notices another writer."""

import contextlib
import errno
import itertools
import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tests.rocketmq.followed import NOW_MS, Followed
from tests.support.disk_faults import FaultDisk
from tiered_index import IndexService
from tiered_index.cli.ending import Ending
from tiered_index.cli.output import Output
from tiered_index.cli.write.follow import StatusLines
from tiered_index.connectors.follow import Archiving, Follower, PatientPut
from tiered_index.connectors.source import Batch, Lag, Loss
from tiered_index.errors import CorruptFile, DiskFull, InvalidArgument, StorageUnavailable, WriterFenced


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_the_first_signal_ends_in_good_order_and_the_second_at_once(number, code):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Ending() as ending:
        assert not ending.event.is_set()
        os.kill(os.getpid(), number)
        assert ending.event.wait(60)
        assert ending.exit_code == code
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_that_comes_while_the_command_has_the_events_lock_is_heard():
    """`Event.wait` has the lock for a moment before and after it waits."""
    with Ending() as ending:
        with ending.event._cond:
            os.kill(os.getpid(), signal.SIGINT)
            while not ending.exit_code:
                pass
        assert ending.event.wait(60)


class Archiver:
    """Archives the numbers of segments that it is given, raises the errors, and passes over the losses, each in a
    round. A pair archives and then raises. Rounds wait for `go`.
    """

    def __init__(self, *rounds):
        self.rounds = list(rounds)
        self.archived = 0
        self.losses = self.passed_over = []
        self.go = threading.Event()
        self.stopped = False

    def run_once(self):
        self.go.wait(60)
        result = self.rounds.pop(0)
        if isinstance(result, Loss):
            self.losses.append(result)
            return 0
        count, error = result if isinstance(result, tuple) else (result, None)
        if isinstance(count, Exception):
            count, error = 0, count
        self.archived += count
        if error is not None:
            raise error
        return count

    finish = run_once

    def stop(self):
        self.stopped = True
        self.go.set()


def ended(archiving):
    archiving._round.exception(60)


def test_archiving_continues_in_rounds_and_reports_its_problems_and_skipped_segments_once():
    lost = [Loss("corrupt", begin, begin + 9, None, f"not archived: {begin}") for begin in (0, 9)]
    rounds = 2, StorageUnavailable("down"), lost[0], (3, StorageUnavailable("away")), lost[1], 1
    archiver = Archiver(*rounds, (4, CorruptFile("segment", "differs")))
    with contextlib.closing(Archiving(archiver)) as archiving:
        archiving.poll()
        archiving.poll()  # the round is still running, and `poll` does not wait for it
        assert archiving.archived == 0
        archiver.go.set()
        skipped = "skipped ranges: {}, the last one: not archived: {}".format
        for archived, problem, losses in (
            (2, None, []),
            (2, "down", []),
            (2, skipped(1, 0), lost[:1]),
            (5, f"away; {skipped(1, 0)}", []),
            (5, skipped(2, 9), lost[1:]),
            (6, skipped(2, 9), []),
        ):
            ended(archiving)
            archiving.poll()
            assert (archiving.archived, archiving.problem, archiving.new_losses()) == (archived, problem, losses)
        with pytest.raises(CorruptFile):
            archiving.finish()
        assert archiving.archived == 10
    assert archiver.stopped
    archiver = Archiver(StorageUnavailable("away for a moment"), 2)
    archiver.go.set()
    with contextlib.closing(Archiving(archiver)) as archiving:
        archiving.poll()
        # what the last round could not archive is tried again
        archiving.finish()
        assert (archiving.archived, archiving.problem) == (2, None)


@pytest.fixture
def followed(tmp_path):
    stream = Followed(tmp_path)
    yield stream
    stream.index.abandon()


@pytest.fixture
def fast(monkeypatch):
    """Let a second pass between two looks at the clock, so that each round of a follower prints its status."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__, time=time.time, time_ns=time.time_ns)
    monkeypatch.setattr("tiered_index.connectors.follow.time", clock)


class Lines:
    def __init__(self):
        self.details = []

    def update(self, _, detail=""):
        self.details.append(detail)


def follower_of(followed, *, follow=True, quiet=True, disk=None, **options):
    out, lines = Output(as_json=True, quiet=quiet), Lines()
    source = followed.dispatcher(skip_missing=True, follow=follow, disk=disk)
    follower = Follower(followed.index, source, follow=follow, poll_s=0.01, note=out.note, **options)
    follower.status = StatusLines(out, lines, records=follow)
    follower.details = lines.details
    return follower


def run_rounds(follower, monkeypatch, most, act=lambda number: None):
    """Run a follower until its wait number `most`. Call `act` with the number of each wait."""
    numbers = itertools.count(1)

    def wait(_):
        act(number := next(numbers))
        if number == most:
            follower.stop.set()
        return False

    monkeypatch.setattr(follower.stop, "wait", wait)
    follower.run()


def test_a_status_line_has_each_news_once(followed, capsys, monkeypatch, fast):
    follower = follower_of(followed)

    def act(number):
        if number == 3:
            followed.write(200)
            followed.segment(0).unlink()

    followed.write(2)
    run_rounds(follower, monkeypatch, 6, act)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["messages"] == 2
    assert lines[-1]["messages"] == follower.messages > 100
    assert sum(len(line["losses"]) for line in lines) == follower.loss_count == 1
    assert len(lines) < len(follower.details) >= 6
    assert all(line["status"] == "following" and line["problems"] == [] for line in lines)
    assert lines[-1]["lag"]["bytes"] == 0


def test_half_a_message_that_stays_is_reported_once_with_its_range(followed, capsys, monkeypatch, fast):
    (start,) = followed.write(6)[-1:]
    data = followed.segment(0).read_bytes()
    followed.segment(0).write_bytes(data[: start + 90] + bytes(len(data) - start - 60))
    run_rounds(follower_of(followed, quiet=False), monkeypatch, 5)
    out, err = capsys.readouterr()
    first, torn = (json.loads(line)["torn"] for line in out.splitlines())
    assert first is None and start == torn["begin"] < torn["end"] <= start + 90
    assert err.count("torn: commit log offsets") == 1


def test_a_full_disk_also_delays_the_log_fingerprints(followed, monkeypatch):
    followed.write(5)
    disk = FaultDisk()
    follower, counts = follower_of(followed, disk=disk), []
    disk.fail("sync", times=3, error=errno.ENOSPC)
    run_rounds(follower, monkeypatch, 4, lambda number: counts.append(follower.messages))
    assert counts == [0, 0, 0, 5]
    disk.fail("sync", times=None, error=errno.ENOSPC)
    followed.write(1)
    impatient = follower_of(followed, patience_s=0, disk=disk)
    with pytest.raises(DiskFull):
        impatient.run()


class Rows:
    """A source with one batch, and then as many empty rounds as somebody waits for."""

    place, unit, offsets = "rows", "messages", "offsets"

    def __init__(self, columns):
        self.columns = columns

    def positions(self):
        return {}

    def batches(self):
        if self.columns is not None:
            yield Batch(source="rows", position=1, columns=self.columns, messages=1)
            self.columns = None

    def lag(self):
        return Lag(1, 0, None)

    def close(self):
        pass


def row(timestamp_ms, **more):
    return {"topic": ["orders"], "queue_id": [0], "key": ["k1"], "offset": [1], "size": [1]} | {
        "timestamp_ms": timestamp_ms,
        **more,
    }


@pytest.mark.parametrize(
    "batch_of",
    [
        lambda times: row(times.tolist()),
        lambda times: row(times.astype("datetime64[ms]")),
        lambda times: pa.table(row(pa.array(times, pa.timestamp("ms", "UTC")))),
        lambda times: pd.DataFrame(row(times), index=[7]),
        lambda times: pa.table(row(times)).to_reader(),
    ],
    ids=["list", "numpy", "arrow", "pandas", "stream"],
)
def test_a_follower_takes_the_batches_that_an_index_takes(batch_of, tmp_path):
    """It also looks at their times, for those in the quarantine."""
    time_ms = time.time_ns() // 10**9 * 1000 + 3 * 86_400_000
    with IndexService.open(root=tmp_path, storage="memory://kinds", background=False) as index:
        follower = Follower(index, Rows(batch_of(np.array([time_ms]))), follow=False)
        follower.run()
        assert [item.timestamp_ms for item in index.query("orders", "k1")] == [time_ms]
    late = {"topic": "orders", "queue_id": 0, "offset": 1, "timestamp_ms": time_ms}
    assert json.loads(json.dumps(follower.put.quarantined)) == [late]


def test_a_stream_that_is_refused_at_first_is_put_whole(tmp_path):
    with IndexService.open(root=tmp_path, storage="memory://stream", background=False, buffer_max_entries=1) as index:
        index.put("orders", 0, "k1", 2, 1, NOW_MS)
        follower = Follower(index, Rows(pa.table(row([NOW_MS])).to_reader()), follow=False)
        follower.run()
        assert follower.entries == 1
        assert sorted(item.offset for item in index.query("orders", "k1")) == [1, 2]


def test_a_fenced_writer_notices_even_without_messages(tmp_path, monkeypatch):
    storage = (tmp_path / "storage").as_uri()
    with IndexService.open(root=tmp_path / "root", storage=storage, background=False) as index:
        index.put("orders", 0, "k1", 1, 1, NOW_MS)
        with IndexService(index.config.changed(root=tmp_path / "other"), takes_over=True):
            index.seal()
            with pytest.raises(WriterFenced):
                index.run_lifecycle()
        follower = Follower(index, Rows(None))
        monkeypatch.setattr(follower.stop, "wait", lambda _: follower.stop.set())
        with pytest.raises(WriterFenced):
            follower.run()


def test_the_error_of_a_source_ends_a_follower_in_the_background(followed):
    with Follower(followed.index, Rows({"topic": ["orders"]})).in_background() as follower:
        while not follower.has_ended():
            pass
        with pytest.raises(InvalidArgument):
            follower.end()
    assert follower.messages == 0


def test_no_distance_is_told_while_a_part_of_the_source_cannot_be_read(capsys):
    shown = []
    source = SimpleNamespace(lag=lambda: Lag(5, 0, None), unit="records")
    index = SimpleNamespace(health=lambda: {"problems": []})
    follower = SimpleNamespace(source=source, position=5, entries=5, index=index, problems=lambda: ["source: away"])
    progress = SimpleNamespace(update=lambda position, detail: shown.append(detail))
    StatusLines(Output(as_json=False), progress, records=False)(follower)
    assert shown == ["5 entries, lag unknown; source: away"]


@pytest.mark.parametrize("uploads", [8, 0])
def test_the_last_flush_waits_as_long_as_files_are_uploaded(uploads, monkeypatch):
    left, now_s = 8, 0.0

    class Pauses:
        """Lets the time of a pause pass at once."""

        def is_set(self):
            return False

        def wait(self, pause_s):
            nonlocal now_s
            now_s += pause_s

    def flush():
        nonlocal left
        if left:
            left -= uploads > 0
            raise DiskFull("full")

    monkeypatch.setattr("tiered_index.connectors.follow.time", SimpleNamespace(monotonic=lambda: now_s))
    index = SimpleNamespace(flush=flush, health=lambda: {"unpublished": {"files": left}})
    with contextlib.nullcontext() if uploads else pytest.raises(DiskFull):
        PatientPut(index, patience_s=0.5, stop=Pauses()).finish()
    # the uploads together take longer than the patience
    assert now_s > 1.0 if uploads else 0.5 < now_s < 1.0


def test_a_lag_beyond_its_bound_and_one_that_is_not_known_are_problems():
    for seconds, said in ((None, "is not known"), (61.0, "61 seconds behind"), (60.0, None)):
        lag = Lag(1000, 100, seconds)
        follower = Follower(None, SimpleNamespace(lag=lambda lag=lag: lag, unit="bytes"))
        assert follower.problems() == []
        problems = follower.problems(60.0)
        assert problems == [] if said is None else said in problems[0]
