"""The dispatcher beside a living store: new messages, restarts, torn tails, damage, deleted segments; answers are compared with a scan."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.rocketmq import golden_store
from tests.rocketmq.followed import SEGMENT, Followed, check, rounds, scan
from tests.rocketmq.messages import blank
from tiered_index import IndexService
from tiered_index.clock import ManualClock
from tiered_index.errors import BackPressure, ConfigError, CorruptFile, DiskFull, InvalidArgument, StorageMisconfigured
from tiered_index.rocketmq import commitlog, tail
from tiered_index.rocketmq.commitlog import CommitLogReader, MissingOffsets
from tiered_index.rocketmq.dispatcher import Dispatcher
from tiered_index.rocketmq.layout import TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from tiered_index.rocketmq.segments import segment_name
from tiered_index.rocketmq.store import LogEnd, StoreDirectory
from tiered_index.rocketmq.walking import End
from tiered_index.storage.memory import MemoryStorage
from tiered_index.testing.disk_faults import FaultDisk
from tiered_index.types import MAX_TIMESTAMP_MS


@pytest.fixture
def followed(tmp_path):
    made = Followed(tmp_path)
    yield made
    made.index.abandon()


def test_the_golden_store_answers_as_a_scan_and_finds_what_rocketmq_finds(tmp_path):
    path = golden_store.unpack(tmp_path / "store")
    times = [message["storeTimestamp"] for message in golden_store.expected()]
    with IndexService.open(
        root=tmp_path / "root", storage="memory://golden", storage_backend=MemoryStorage(), clock=ManualClock(max(times)), slots=50,
        items=2_000, background=False, offset_space="commitlog",
    ) as index:  # fmt: skip
        done = Dispatcher(index, StoreDirectory.open(path)).run_once()
        assert (done.messages, done.hidden, done.end, done.state) == (170, sum(map(golden_store.hidden, golden_store.expected())),
                                                                     golden_store.END, End.OPEN)  # fmt: skip
        assert done.entries == len(list(golden_store.rows()))
        model = scan(path)
        assert check(index, model) >= done.entries
        hidden = {m["offset"] for m in golden_store.expected() if golden_store.hidden(m)}
        found = 0
        for line in golden_store.raw("index_queries.jsonl").splitlines():
            query = json.loads(line)
            if not query["key"]:
                continue  # RocketMQ looks for the empty key, too, which nobody has
            end_ms = min(query["end"], MAX_TIMESTAMP_MS)
            answer = index.query(query["topic"], query["key"], query["begin"], end_ms, 10_000)
            mine = [item.offset for item in answer]
            assert mine == [a.offset for a in model.query(query["topic"], query["key"], query["begin"], end_ms, None)]
            # RocketMQ rounds times to seconds from the file's begin, so only open ranges find the same; it knows prepared messages, too
            if query["begin"] == 0 and end_ms == MAX_TIMESTAMP_MS:
                assert set(query["phyOffsets"]) - hidden <= set(mine)
                found += len(mine)
        assert found > 100


def test_new_messages_are_answered_after_the_next_round(followed):
    dispatcher = followed.dispatcher()
    assert dispatcher.run_once() == dispatcher.run_once()
    for count in (1, 5, 40, 300):
        followed.write(count)
        total = sum(done.messages for done in rounds(dispatcher))
        assert total == count
        followed.check()
        assert dispatcher.position == followed.writer.next_offset
    assert len(list((followed.path / "commitlog").iterdir())) > 5


def test_what_is_not_written_yet_is_not_there(followed):
    dispatcher = followed.dispatcher()
    followed.write(3)
    followed.write(4, flush=False)
    assert dispatcher.run_once().messages == 3
    followed.writer.flush()
    assert dispatcher.run_once().messages == 4


def test_a_round_is_bounded_and_the_next_one_goes_on(followed):
    followed.write(400)
    dispatcher = followed.dispatcher(round_bytes=1)
    done = list(rounds(dispatcher))
    assert len(done) > 5
    assert [d.caught_up for d in done] == [False] * (len(done) - 1) + [True]
    assert [d.begin for d in done[1:]] == [d.end for d in done[:-1]]
    assert sum(d.messages for d in done) == 400
    assert followed.check() > 1_000


def test_hidden_messages_and_messages_without_keys(followed):
    followed.write(3, sys_flag=TRANSACTION_PREPARED)
    followed.write(3, sys_flag=TRANSACTION_ROLLBACK)
    followed.write(3, sys_flag=TRANSACTION_COMMIT)
    followed.write(5, keys="", uniq_key=None)
    dispatcher = followed.dispatcher()
    done = dispatcher.run_once()
    assert (done.messages, done.hidden, done.entries) == (14, 6, 9)
    followed.write(5, keys="", uniq_key=None)
    assert (dispatcher.run_once().messages, dispatcher.position) == (5, followed.writer.next_offset)
    assert followed.check() == 9


def test_a_restart_goes_on_at_the_durable_position_and_repeats_nothing_in_answers(followed):
    followed.write(100)
    dispatcher = followed.dispatcher()
    dispatcher.run_once()
    followed.index.flush()
    durable = dispatcher.position
    followed.write(60)
    dispatcher.run_once()
    followed.crash_index()
    again = followed.dispatcher()
    assert again.resumed_from == durable == followed.index.durable_position(again.store.source)
    followed.write(10)
    assert again.run_once().messages == 70
    followed.check()
    followed.index.close()
    followed.index = followed.open_index()
    last = followed.dispatcher()
    assert last.resumed_from == followed.writer.next_offset
    assert last.run_once().messages == 0
    followed.check()


def test_entries_put_twice_are_one_answer(followed):
    followed.write(100)
    followed.dispatcher().run_once()
    again = followed.dispatcher(restart=True)
    assert again.run_once().messages == 100
    followed.check()


def test_a_lost_root_goes_on_where_the_storage_is_and_a_new_one_at_the_begin_of_the_log(followed):
    followed.write(300)
    dispatcher = followed.dispatcher()
    dispatcher.run_once()
    followed.index.seal()
    followed.index.run_lifecycle()
    followed.index.close()
    shutil.rmtree(followed.folder / "root")
    followed.segment(0).unlink()
    followed.index = followed.open_index()
    assert followed.dispatcher().resumed_from == dispatcher.position
    followed.index.close()
    followed.storage = MemoryStorage()
    shutil.rmtree(followed.folder / "root")
    followed.index = followed.open_index()
    fresh = followed.dispatcher()
    assert fresh.resumed_from == SEGMENT
    assert fresh.run_once().losses == ()
    followed.check()


def test_from_the_checkpoint(followed):
    followed.write(400)
    followed.writer.close()
    store = StoreDirectory.open(followed.path)
    checkpoint = store.checkpoint()
    assert checkpoint is not None and checkpoint.index_ms == 0
    assert followed.dispatcher(start="checkpoint").resumed_from == 0
    # RocketMQ's rule: the newest segment whose first message isn't younger than what all three timestamps cover
    firsts = firsts_of(followed.path)
    for start, first_ms in firsts.items():
        for index_ms in (first_ms, first_ms - 1):
            made = {"commit_log_ms": first_ms + 3_000, "consume_queue_ms": first_ms + 9_000, "index_ms": index_ms}
            (followed.path / "checkpoint").write_bytes(type(checkpoint)(**made).encode())
            expected = max((s for s, ms in firsts.items() if ms <= index_ms), default=0)
            assert followed.dispatcher(start="checkpoint").resumed_from == expected
            assert expected == start or index_ms < first_ms


def firsts_of(path):
    reader = CommitLogReader(path / "commitlog")
    return {segment.start: reader.read(segment.start).store_ms for segment in reader.segments()}


# the end of a log that is being written


def test_a_message_cut_anywhere_waits_until_it_is_whole(followed):
    followed.write(5)
    (start,) = followed.write(1, keys="last-key", uniq_key="LAST")
    end = followed.writer.next_offset
    whole = followed.segment(0).read_bytes()
    dispatcher = followed.dispatcher()
    for cut in range(start, end):
        followed.segment(0).write_bytes(whole[:cut].ljust(SEGMENT, b"\0"))
        *_, done = rounds(dispatcher)  # twice where the queues name what isn't there
        assert (dispatcher.position, done.caught_up, done.losses) == (start, True, ()), cut
        assert done.state in (End.OPEN, End.TORN)
        assert len(followed.index.query("payments", "last-key")) == len(followed.index.query("orders", "last-key")) == 0
    followed.segment(0).write_bytes(whole)
    assert dispatcher.run_once().messages == 1
    followed.check()


@pytest.mark.parametrize("finished_at", range(1, 7))
def test_a_message_finished_between_two_looks_has_all_its_keys(followed, monkeypatch, finished_at):
    followed.write(5)
    (start,) = followed.write(1)
    whole = followed.segment(0).read_bytes()
    cut = whole.index(b"UNIQ_KEY", start) + 20
    followed.segment(0).write_bytes(whole[:cut].ljust(SEGMENT, b"\0"))
    dispatcher = followed.dispatcher()
    real, looks = tail.stored_bytes, []

    def look(*arguments):
        looks.append(arguments)
        if len(looks) == finished_at:
            followed.segment(0).write_bytes(whole)
        return real(*arguments)

    monkeypatch.setattr(tail, "stored_bytes", look)
    for _ in range(4):
        dispatcher.run_once()
        assert dispatcher.position in (start, followed.writer.next_offset)
    assert dispatcher.position == followed.writer.next_offset
    followed.check()


@pytest.mark.parametrize("back", [1, 2, 5])
def test_what_was_read_with_holes_while_it_was_written_is_read_again(followed, monkeypatch, back):
    """Pages are read one by one while the broker writes: bytes behind a hole prove nothing about the hole."""
    offsets = followed.write(20)
    real = commitlog.pread

    def with_a_hole(path, size_bytes, position):
        data = real(path, size_bytes, position)
        at = data.find(f"U{20 - back:030X}".encode())
        return data[: at + 20] + b"\0" * 6 + data[at + 26 :] if at >= 0 and size_bytes > 1_000 else data

    monkeypatch.setattr(commitlog, "pread", with_a_hole)
    dispatcher = followed.dispatcher()
    list(rounds(dispatcher))
    monkeypatch.undo()
    assert dispatcher.position == followed.writer.next_offset > offsets[-1]
    followed.check()


def test_a_last_message_with_a_bad_body_counts_once_another_is_behind_it(followed):
    followed.write(5)
    (start,) = followed.write(1, body=b"body of the last one")
    data = followed.segment(0).read_bytes()
    followed.segment(0).write_bytes(data.replace(b"body of the last", b"BODY of the last"))
    dispatcher = followed.dispatcher()
    assert (dispatcher.run_once().end, dispatcher.position) == (start, start)
    followed.write(1)
    assert dispatcher.run_once().messages == 2


def test_a_broker_that_died_while_writing_goes_on_behind_what_was_whole(followed):
    followed.write(20)
    dispatcher = followed.dispatcher()
    dispatcher.run_once()
    (start,) = followed.write(1)
    data = followed.segment(0).read_bytes()
    followed.segment(0).write_bytes(data[: start + 60].ljust(SEGMENT, b"\0"))
    assert dispatcher.run_once().state is End.TORN
    followed.writer = followed.open_writer()
    assert followed.writer.next_offset == start
    followed.write(30)
    assert sum(done.messages for done in rounds(dispatcher)) == 30
    followed.check()


def test_a_torn_message_that_stays_is_damage_once_the_log_goes_on(followed):
    offsets = followed.write(100)
    last = max(offset for offset in offsets if offset < SEGMENT)
    data = bytearray(followed.segment(0).read_bytes())
    data[last + 60 :] = bytes(SEGMENT - last - 60)
    followed.segment(0).write_bytes(data)
    dispatcher = followed.dispatcher()
    assert (dispatcher.run_once().caught_up, dispatcher.position) == (False, last)
    with pytest.raises(CorruptFile) as caught:
        dispatcher.run_once()
    assert (caught.value.file, caught.value.offset) == (str(followed.segment(0)), last)
    followed.index.flush()
    assert followed.index.durable_position(StoreDirectory.open(followed.path).source) == last
    skipping = followed.dispatcher(skip_corrupt=True)
    done = skipping.run_once()
    assert [(loss.kind, loss.begin, loss.end) for loss in done.losses] == [("corrupt", last, SEGMENT)]
    assert skipping.run_once().losses == ()
    followed.check()


@pytest.mark.parametrize("at", [0, 4, 30, 84])
def test_damage_in_the_middle_stops_before_it_and_nothing_before_it_is_lost(followed, at):
    offsets = followed.write(30)
    data = bytearray(followed.segment(0).read_bytes())
    data[offsets[10] + at : offsets[10] + at + 8] = b"\xee" * 8
    followed.segment(0).write_bytes(data)
    dispatcher = followed.dispatcher()
    assert dispatcher.run_once().messages == 10
    for _ in range(2):
        with pytest.raises(CorruptFile):
            dispatcher.run_once()
        assert dispatcher.position == offsets[10]
    (loss,) = followed.dispatcher(skip_corrupt=True).run_once().losses
    assert (loss.kind, loss.begin, loss.end, loss.messages) == ("corrupt", offsets[10], offsets[11], None)
    followed.check()


@pytest.mark.parametrize("holes", [1, 15])
def test_a_hole_before_something_readable_is_damage_from_the_second_look_on(followed, holes):
    offsets = followed.write(40)
    whole = followed.segment(0).read_bytes()
    begin, end = offsets[10], offsets[10 + holes]
    followed.segment(0).write_bytes(whole[:begin] + bytes(end - begin) + whole[end:])
    dispatcher = followed.dispatcher()
    done = dispatcher.run_once()
    assert (done.messages, done.state, done.caught_up, done.losses) == (10, End.OPEN, False, ())
    for _ in range(2):
        with pytest.raises(CorruptFile, match=f"zeros where the log goes on at commit log offset {end}") as caught:
            dispatcher.run_once()
        assert (caught.value.file, caught.value.offset) == (str(followed.segment(0)), begin)
    assert dispatcher.position == begin
    followed.index.flush()
    losses = [loss for done in rounds(followed.dispatcher(skip_corrupt=True)) for loss in done.losses]
    assert [(loss.kind, loss.begin, loss.end) for loss in losses] == [("corrupt", begin, end)]
    for number, offset in enumerate(offsets):
        found = followed.index.query("orders" if number % 3 else "payments", f"own-{number}")
        assert [item.offset for item in found] == ([] if begin <= offset < end else [offset])


def test_a_hole_that_is_filled_at_the_second_look_was_being_written(followed):
    offsets = followed.write(40)
    whole = followed.segment(0).read_bytes()
    followed.segment(0).write_bytes(whole[: offsets[10]] + bytes(50) + whole[offsets[10] + 50 :])
    dispatcher = followed.dispatcher(skip_corrupt=True)
    assert dispatcher.run_once().caught_up is False
    followed.segment(0).write_bytes(whole)
    assert [(done.messages, done.losses) for done in rounds(dispatcher)] == [(30, ())]
    followed.check()


def test_a_hole_that_hides_the_end_of_the_log_is_named_by_consume_queues(followed, monkeypatch):
    offsets = followed.write(40)
    whole = followed.segment(0).read_bytes()
    followed.segment(0).write_bytes(whole[: offsets[10]] + bytes(500) + whole[offsets[10] + 500 :])
    monkeypatch.setattr(StoreDirectory, "log_end", lambda _: LogEnd(offsets[10], None))
    dispatcher = followed.dispatcher()
    assert dispatcher.run_once().caught_up is False
    with pytest.raises(CorruptFile, match="zeros"):
        dispatcher.run_once()


def test_something_behind_zeros_that_nobody_can_read_is_searched_for_once(followed, monkeypatch):
    followed.write(10)
    end = followed.writer.next_offset
    monkeypatch.setattr(StoreDirectory, "log_end", lambda _: LogEnd(end + 120, None))  # an estimate
    searched = []
    real = CommitLogReader._readable_behind
    monkeypatch.setattr(CommitLogReader, "_readable_behind", lambda *given: searched.append(given) or real(*given))
    dispatcher = followed.dispatcher()
    assert [done.caught_up for done in rounds(dispatcher)] == [False, True]
    assert [dispatcher.run_once().caught_up for _ in range(3)] == [True] * 3
    assert len(searched) == 1
    followed.write(3)
    assert dispatcher.run_once().messages == 3


# segments that go


def test_a_segment_deleted_before_it_was_read_is_reported_with_its_messages(followed):
    offsets = followed.write(300)
    dispatcher = followed.dispatcher(round_bytes=1)
    dispatcher.run_once()
    followed.segment(1).unlink()
    followed.segment(2).unlink()
    lost = sum(SEGMENT <= offset < 3 * SEGMENT for offset in offsets)
    with pytest.raises(MissingOffsets, match=f"{lost} messages by the consume queues") as caught:
        list(rounds(dispatcher))
    assert (caught.value.begin, caught.value.end, caught.value.exit_code) == (SEGMENT, 3 * SEGMENT, 4)
    assert dispatcher.position <= SEGMENT
    skipping = followed.dispatcher(skip_missing=True)
    losses = [loss for done in rounds(skipping) for loss in done.losses]
    assert [(loss.kind, loss.begin, loss.end, loss.messages) for loss in losses] == [("missing", SEGMENT, 3 * SEGMENT, lost)]
    followed.check()
    shutil.rmtree(followed.path / "consumequeue")
    assert followed.dispatcher(restart=True, skip_missing=True).run_once().losses[0].messages is None


def test_segments_deleted_after_they_were_read_are_nobodys_loss(followed):
    followed.write(300)
    dispatcher = followed.dispatcher()
    list(rounds(dispatcher))
    model = scan(followed.path)
    for path in sorted((followed.path / "commitlog").iterdir())[:-1]:
        path.unlink()
    offsets = followed.write(5)
    assert [done.losses for done in rounds(dispatcher)] == [()]
    model.entries += [entry for entry in scan(followed.path).entries if entry.offset in offsets]
    check(followed.index, model)


def test_segments_that_vanish_between_listing_and_reading(followed, monkeypatch):
    followed.write(300)
    dispatcher = followed.dispatcher(skip_missing=True)
    real, gone = os.open, []

    def vanishing(path, *arguments, **keywords):
        if str(path) == str(followed.segment(1)):
            Path(path).unlink(missing_ok=True)
            gone.append(path)
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", vanishing)
    losses = [loss for done in rounds(dispatcher) for loss in done.losses]
    assert [(loss.kind, loss.begin, loss.end) for loss in losses] == [("missing", SEGMENT, 2 * SEGMENT)]
    assert gone
    followed.check()


# what isn't a store, or can't be read


def test_an_empty_store_has_nothing_and_is_followed_from_its_first_message(followed):
    dispatcher = followed.dispatcher()
    done = dispatcher.run_once()
    assert (done.messages, done.end, done.state, done.caught_up, dispatcher.position) == (0, 0, None, True, None)
    assert dispatcher.lag().bytes == 0
    followed.write(3)
    assert dispatcher.run_once().messages == 3
    followed.check()


def test_a_log_of_only_a_blank(followed):
    followed.segment(0).write_bytes(blank(SEGMENT))
    dispatcher = followed.dispatcher()
    done = dispatcher.run_once()
    assert (done.messages, done.end, done.caught_up) == (0, SEGMENT, True)
    followed.index.flush()
    assert followed.index.durable_position(dispatcher.store.source) == SEGMENT
    assert dispatcher.run_once().end == SEGMENT


@pytest.mark.parametrize("parts", [[], ["something"]])
def test_a_folder_that_is_no_store(tmp_path, parts):
    for part in parts:
        (tmp_path / part).mkdir()
    with pytest.raises(InvalidArgument, match="no RocketMQ store"):
        StoreDirectory.open(tmp_path)
    with pytest.raises(InvalidArgument, match="not a folder"):
        StoreDirectory.open(tmp_path / "absent")
    (tmp_path / "abort").touch()
    with pytest.raises(InvalidArgument, match="name"):
        StoreDirectory.open(tmp_path, " ")
    assert StoreDirectory.open(tmp_path).source == f"rocketmq:{tmp_path.resolve()}"


def test_no_permission(followed, monkeypatch):
    followed.write(3)
    dispatcher = followed.dispatcher()
    real = os.open

    def denied(path, *arguments, **keywords):
        if "commitlog" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(StorageMisconfigured, match=r"commitlog.*Permission denied"):
        dispatcher.run_once()
    monkeypatch.setattr(os, "open", real)
    assert dispatcher.run_once().messages == 3


def test_a_commit_log_that_is_no_folder(tmp_path):
    made = Followed(tmp_path)
    shutil.rmtree(made.path / "commitlog")
    (made.path / "commitlog").touch()
    with pytest.raises(StorageMisconfigured):
        made.dispatcher().run_once()
    made.index.abandon()


def test_the_brokers_files_stay_as_they_are(followed):
    followed.write(200)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in followed.path.rglob("*") if path.is_file()}
    folders = sorted(path for path in followed.path.rglob("*"))
    list(rounds(followed.dispatcher(round_bytes=1)))
    followed.dispatcher(restart=True, start="checkpoint").lag()
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before
    assert sorted(path for path in followed.path.rglob("*")) == folders


# the index's side


def test_one_index_is_of_one_store(followed, tmp_path):
    followed.write(3)
    followed.dispatcher().run_once()
    followed.index.flush()
    with pytest.raises(ConfigError, match=f"{followed.path}.*'elsewhere'.*--restart"):
        followed.dispatcher(store_name="elsewhere")
    assert followed.dispatcher(store_name="elsewhere", restart=True).run_once().messages == 3
    followed.index.flush()
    assert followed.dispatcher(store_name="elsewhere").resumed_from == followed.writer.next_offset


def test_an_index_of_other_offsets_is_refused(tmp_path):
    made = Followed(tmp_path, offset_space="custom")
    made.index.close()
    made.settings["offset_space"] = "commitlog"
    with pytest.raises(ConfigError, match=r"'custom', not in 'commitlog'.*of their own"):
        made.open_index()


def test_back_pressure_refuses_whole_and_the_next_round_goes_on(tmp_path):
    made = Followed(tmp_path, buffer_max_entries=150)
    made.write(200)
    dispatcher = made.dispatcher()
    pushed_back = 0
    for _ in range(50):
        try:
            if dispatcher.run_once().caught_up:
                break
        except BackPressure:
            pushed_back += 1
            made.index.flush()
    assert pushed_back > 1
    made.check()
    trail = dispatcher._trail.witnesses
    assert [w.end for w in trail] == sorted({w.end for w in trail})
    assert sum(w.messages for w in trail) == 200
    made.index.abandon()


def test_a_memory_that_cannot_be_written_stops_the_put(followed):
    followed.write(5)
    disk = FaultDisk()
    dispatcher = followed.dispatcher(disk=disk)
    disk.fail("sync", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        dispatcher.run_once()
    assert len(followed.index.query("orders", "k1")) == 0
    assert dispatcher.run_once().messages == 5
    followed.check()


def test_lag_is_bytes_and_seconds_behind_the_newest_message(followed):
    followed.write(50)
    dispatcher = followed.dispatcher(round_bytes=1)
    dispatcher.run_once()
    followed.write(250)
    behind = dispatcher.lag()
    assert behind.end_offset == followed.writer.next_offset
    assert behind.bytes == followed.writer.next_offset - dispatcher.position > 0
    last = max(entry.offset for entry in scan(followed.path).entries if entry.offset < dispatcher.position)
    number = next(int(e.key[4:]) for e in scan(followed.path).entries if e.offset == last and e.key.startswith("own-"))
    assert behind.seconds == pytest.approx((299 - number) * 0.02)
    list(rounds(dispatcher))
    assert (dispatcher.lag().bytes, dispatcher.lag().seconds) == (0, 0.0)
    followed.index.flush()
    followed.write(50)
    assert followed.dispatcher().lag().seconds == pytest.approx(1.0)


def test_no_segment_name_but_twenty_digits_counts(followed):
    followed.write(3)
    (followed.path / "commitlog" / "00000000000000000000.bak").write_bytes(b"junk")
    (followed.path / "commitlog" / segment_name(SEGMENT)).mkdir()
    assert followed.dispatcher().run_once().messages == 3
