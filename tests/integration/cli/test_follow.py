"""`ingest STORE_DIR`: the real command beside a live store; damage, lost segments and exit codes."""

import re
import signal
import threading
import time

import pytest

from tests.integration.cli.command_lines import running
from tests.rocketmq.followed import SEGMENT, check, cut_log, scan
from tests.rocketmq.messages import NOW_MS
from tests.support.hanging import until
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader
from tiered_index.connectors.follow import PatientPut
from tiered_index.connectors.source import Stopped
from tiered_index.errors import BackPressure

SMALL = ("--slots", "200", "--items", "4000")


def write(store, start, stop):
    writer = StoreWriter(store, segment_bytes=SEGMENT)
    begin_ms = 1_700_000_000_000
    put = [writer.put("orders", 0, keys=(f"k{n % 7}", f"own-{n}"), store_ms=begin_ms + n) for n in range(start, stop)]
    writer.flush()
    return [message.offset for message in put]


def test_new_messages_are_in_lookups_while_the_command_runs_and_sigint_ends_it(tmp_path):
    store, root = tmp_path / "store", tmp_path / "root"
    offsets = write(store, 0, 150)
    closed = len(list((store / "commitlog").iterdir())) - 1
    command = ("ingest", store, "--follow", "--json", "--quiet", "--poll", "0.05", "--archive-segments", *SMALL)
    places = ("--root", root, "--storage", f"file://{tmp_path / 'objects'}")
    quick = {"TIERED_INDEX_FLUSH_INTERVAL_S": "0.05", "TIERED_INDEX_LIFECYCLE_INTERVAL_S": "0.05"}
    quick["PYTHONUNBUFFERED"] = ""  # Python then buffers what it writes to a file
    with running(*command, *places, **quick) as (process, lines):
        until(lines)
        with IndexReader.open(root=root) as reader:
            for number in range(150, 153):
                offsets += write(store, number, number + 1)
                until(lambda n=number: len(reader.query("orders", f"own-{n}")) == 1)
                assert reader.query("orders", f"own-{number}").items[0].offset == offsets[number]
        until(lambda: lines()[-1]["archived_segments"] == closed)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
        *following, last = lines()
    assert (process.returncode, errors) == (130, "")
    assert (last["status"], last["messages"], last["entries"]) == ("stopped", 153, 306)
    assert all(line["status"] == "following" for line in following)


@pytest.mark.parametrize("ending", ["SIGTERM", "SIGKILL", "error"])
def test_the_answer_of_a_root_says_up_to_when_a_follower_has_read(run_here, tmp_path, ending):
    """It lacks messages that the store got later, whatever ended the follower."""
    store, log, begun_ms = tmp_path / "store", tmp_path / "store" / "commitlog", time.time() * 1000
    write(store, 0, 10)
    where = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path / 'objects'}")
    with running("ingest", store, "--follow", "--json", "--poll", "0.05", *SMALL, *where) as (process, lines):
        until(lambda: lines() and lines()[-1]["messages"] == 10)
        until(lambda: run_here("query", "orders", "own-1", *where, "--json").document["as_of_ms"] or 0)
        if ending == "error":
            log.rename(tmp_path / "moved")
            # it may not be read; one that is not there may be mounted again
            log.touch()
        else:
            process.send_signal(getattr(signal, ending))
        process.communicate(timeout=60)
    assert process.returncode == {"SIGTERM": 0, "SIGKILL": -signal.SIGKILL, "error": 3}[ending]
    ended_ms = time.time() * 1000
    if ending == "error":
        log.unlink()
        (tmp_path / "moved").rename(log)
    write(store, 10, 11)
    for key, count in (("own-1", 1), ("own-10", 0)):
        answer = run_here("query", "orders", key, *where, "--json").document
        assert (len(answer["items"]), answer["status"]) == (count, "complete")
        assert begun_ms // 1000 * 1000 <= answer["as_of_ms"] <= ended_ms
    assert "0 found, complete as of 20" in run_here("query", "orders", "own-10", *where).out
    assert "0 found, complete as of 20" in run_here("query", "orders", "own-10", *where[:2]).out
    assert run_here("ingest", store, *where).code == 0
    answer = run_here("query", "orders", "own-10", *where, "--json").document
    assert (len(answer["items"]), answer["as_of_ms"] >= ended_ms // 1000 * 1000) == (1, True)


def test_a_clock_that_was_wrong_is_reported(run_here, tmp_path):
    writer = StoreWriter(tmp_path / "store", segment_bytes=SEGMENT)
    for store_ms in (1_700_000_000_000, 4_100_000_000_000):
        place = writer.put("orders", 0, keys=("a", "b"), store_ms=store_ms)
    writer.flush()
    where = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path / 'objects'}", *SMALL)
    outcome = run_here("ingest", tmp_path / "store", *where)
    assert re.search("quarantined +2 entries with an implausible time\n", outcome.out)
    assert f"to quarantine: commit log offset {place.offset}: 2099-12-03T16:53:20Z\n" in outcome.err
    document = run_here("ingest", tmp_path / "store", *where, "--restart", "--json").document
    assert (document["quarantined"], document["quarantined_first"][0]["offset"]) == (2, place.offset)


def test_a_store_is_continued_and_a_second_one_refused(run_here, tmp_path, small_index):
    store, root = tmp_path / "store", tmp_path / "root"
    write(store, 0, 300)
    first = run_here("ingest", store, *small_index, "--wait", "--archive-segments").document
    assert (first["status"], first["messages"], first["entries"], first["resumed_from"]) == ("complete", 300, 600, 0)
    assert first["archived_segments"] == len(list((store / "commitlog").iterdir())) - 1 > 1
    assert set(first["files"]) == {"uploaded"}
    write(store, 300, 310)
    again = run_here("ingest", store, *small_index, "--archive-segments").document
    assert (again["messages"], again["resumed_from"], again["archived_segments"]) == (10, first["position"], 0)
    assert (again["tail"], again["lag"]) == ("open", {"end_offset": again["position"], "bytes": 0, "seconds": 0.0})
    queued = run_here("ingest", store, *small_index, "--archive-queues").document
    assert queued["archived_segments"] == first["archived_segments"]
    with IndexReader.open(root=root) as reader:
        assert all(segment.queues_bytes for segment in reader.archived())
    write(tmp_path / "other", 0, 3)
    other = run_here("ingest", tmp_path / "other", *small_index)
    assert (other.code, other.error["type"]) == (2, "ConfigError")
    assert str(store) in other.error["message"]
    assert str(tmp_path / "other") in other.error["message"]
    with IndexReader.open(root=root) as reader:
        check(reader, scan(store))


def test_damage_and_missing_segments_are_code_4_and_can_be_passed_over(run_here, tmp_path):
    store, root = tmp_path / "store", tmp_path / "root"
    where = ("--root", root, "--storage", f"file://{tmp_path / 'objects'}", *SMALL)
    offsets = write(store, 0, 300)
    segments = sorted((store / "commitlog").iterdir())
    data = bytearray(segments[0].read_bytes())
    data[offsets[20] : offsets[20] + 8] = b"\xff" * 8
    segments[0].write_bytes(data)
    segments[2].unlink()
    damaged = run_here("ingest", store, *where, "--json")
    assert (damaged.code, damaged.out) == (4, "")
    assert (damaged.error["file"], damaged.error["offset"]) == (str(segments[0]), offsets[20])
    with IndexReader.open(root=root) as reader:
        assert [len(reader.query("orders", f"own-{n}")) for n in (0, 19, 20, 21)] == [1, 1, 0, 0]
    lost = sum(2 * SEGMENT <= offset < 3 * SEGMENT for offset in offsets)
    done = run_here("ingest", store, *where, "--skip-corrupt")
    assert done.code == 0
    gap = f"commit log offsets {2 * SEGMENT:,} to {3 * SEGMENT - 1:,}"
    assert f"corrupt: {gap}, at least {lost} messages: missing in the middle of the log" in done.err
    with IndexReader.open(root=root) as reader:
        check(reader, scan(store))
    cut_log(store, offsets[-10])
    write(store, 1_000, 1_005)
    document = run_here("ingest", store, *where, "--skip-missing", "--json").document
    assert [loss["kind"] for loss in document["losses"]] == ["rewritten"]


def test_messages_that_the_broker_deleted_are_code_4_and_can_be_passed_over(run_here, tmp_path):
    store = tmp_path / "store"
    where = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path / 'objects'}", *SMALL)
    write(store, 0, 300)
    assert run_here("ingest", store, *where).code == 0
    offsets = write(store, 300, 600)
    end = offsets[-1] // SEGMENT * SEGMENT
    for path in sorted((store / "commitlog").iterdir()):
        if int(path.name) < end:
            path.unlink()
    missing = run_here("ingest", store, *where, "--json")
    lost = sum(offset < end for offset in offsets)
    assert (missing.code, missing.error["begin"], missing.error["end"]) == (4, offsets[0], end)
    assert f"{lost} messages" in missing.error["message"]
    done = run_here("ingest", store, *where, "--skip-missing")
    place = f"missing: commit log offsets {offsets[0]:,} to {end - 1:,}, at least {lost} messages"
    assert done.code == 0 and place in done.err


class NoRoom:
    def put_source_batch(self, *_, **more):
        raise BackPressure("no room")

    flush = put_source_batch


def test_a_wait_for_room_ends_when_the_command_is_to_end():
    put = PatientPut(NoRoom(), 1e9)
    threading.Timer(0.05, put.stop.set).start()
    with pytest.raises(Stopped):
        put({}, "source", 1)
    with pytest.raises(BackPressure):
        PatientPut(NoRoom(), 0.0)({}, "source", 1)


def damage(folder, offset):
    with open(folder / "commitlog" / ("0" * 20), "r+b") as handle:
        handle.seek(offset + 100)
        handle.write(b"ZZZ")


@pytest.mark.parametrize("skip", [False, True])
def test_damage_before_older_messages_is_an_error_or_a_loss(run_here, tmp_path, small_index, store, skip):
    folder, offsets = store
    damage(folder, offsets[15])
    done = run_here("ingest", folder, *small_index, *(["--skip-corrupt"] if skip else []))
    if not skip:
        assert (done.code, done.error["type"], done.error["offset"]) == (4, "CorruptFile", offsets[15])
        return
    assert done.code == 0, done.err
    (loss,) = done.document["losses"]
    assert (loss["kind"], loss["begin"], loss["end"]) == ("corrupt", offsets[15], offsets[16])
    assert "the body contradicts its CRC" in loss["problem"]
    assert (done.document["messages"], done.document["lag"]["bytes"]) == (59, 0)
    with IndexReader.open(root=tmp_path / "root") as reader:
        assert [n for n in range(60) if not reader.query("t", f"k{n}").items] == [15]
    other = ("--root", tmp_path / "other", "--storage", f"file://{tmp_path / 'more'}", "--no-check-bodies")
    assert run_here("ingest", folder, *other, *SMALL, "--json").document["messages"] == 60


def test_half_a_message_before_other_bytes_is_the_end_as_ever(run_here, small_index, store):
    """A crash leaves this after the broker had cut its log: the later bytes don't begin where the half message would
    end.
    """
    folder, offsets = store
    with StoreWriter(folder, segment_bytes=1 << 16, cut=offsets[15]) as writer:
        last = writer.put("t", 0, b"n" * 77, keys=["new"], store_ms=NOW_MS + 90_000).offset
    (folder / "abort").touch()
    damage(folder, last)
    done = run_here("ingest", folder, *small_index, "--skip-corrupt")
    assert (done.code, done.document["position"], done.document["losses"]) == (0, last, [])
    assert (done.document["torn"]["begin"], done.document["torn"]["what"]) == (last, "half a message")


@pytest.fixture
def store(tmp_path):
    """A store of a broker that died, whose clock was set back an hour after message 19, and its messages' offsets."""
    with StoreWriter(tmp_path / "store", segment_bytes=1 << 16) as writer:
        times = [NOW_MS + 1_000 * n if n < 20 else NOW_MS - 3_600_000 + n for n in range(60)]
        puts = [writer.put("t", 0, b"b" * 50, keys=[f"k{n}"], store_ms=store_ms) for n, store_ms in enumerate(times)]
    (tmp_path / "store" / "abort").touch()
    return tmp_path / "store", [put.offset for put in puts]
