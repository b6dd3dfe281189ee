"""The dispatcher beside a live store: new messages, restarts, positions. Tests compare answers with a scan."""

from __future__ import annotations

import json
import shutil

from tests.rocketmq import golden_store
from tests.rocketmq.archived_store import open_index
from tests.rocketmq.followed import SEGMENT, SteppedDispatcher, check, rounds, scan
from tiered_index.clock import ManualClock
from tiered_index.rocketmq.log.columns import ALL_TOPICS, Selection
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.layout import TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK, tag_key
from tiered_index.rocketmq.log.segments import End
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import MAX_TIMESTAMP_MS


def test_the_golden_store_answers_as_a_scan_and_finds_what_rocketmq_finds(tmp_path):
    path = golden_store.unpack(tmp_path / "store")
    times = [message["storeTimestamp"] for message in golden_store.expected()]
    with open_index(tmp_path / "root", MemoryStorage(), clock=ManualClock(max(times))) as index:
        reader = CommitLogReader(path / "commitlog", selection=ALL_TOPICS)
        done = SteppedDispatcher(index, StoreDirectory.open(path), reader=reader, now_s=lambda: 0.0).run_once()
        hidden = {m["offset"] for m in golden_store.expected() if golden_store.hidden(m)}
        assert (done.messages, done.hidden, done.end, done.state) == (170, len(hidden), golden_store.END, End.OPEN)
        assert done.entries == len(list(golden_store.rows()))
        model = scan(path)
        assert check(index, model) >= done.entries
        found = 0
        for line in golden_store.raw("index_queries.jsonl").splitlines():
            query = json.loads(line)
            if not query["key"]:
                continue  # RocketMQ also looks up the empty key, which no message has
            end_ms = min(query["end"], MAX_TIMESTAMP_MS)
            answer = index.query(query["topic"], query["key"], query["begin"], end_ms, 10_000)
            mine = [item.offset for item in answer]
            assert mine == [a.offset for a in model.query(query["topic"], query["key"], query["begin"], end_ms, None)]
            # RocketMQ counts seconds from the file's begin, so only open ranges have equal answers; it also has
            # prepared messages
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


def test_only_what_is_selected_is_put(followed):
    """This also applies to the last messages of a live log, which the dispatcher reads twice."""
    selection = Selection(exclude=("pay*",), tags=True, prepared=True)
    chosen = followed.dispatcher(reader=CommitLogReader(followed.path / "commitlog", selection=selection))
    followed.writer.put("SCHEDULE_TOPIC_XXXX", 0, keys="k1")
    followed.writer.put("orders", 0, keys="half", tags="paid", sys_flag=TRANSACTION_PREPARED)
    followed.writer.put("orders", 0, keys="never", tags="paid", sys_flag=TRANSACTION_ROLLBACK)
    offsets = followed.write(30, tags="paid")
    done = list(rounds(chosen))
    assert (sum(one.messages for one in done), sum(one.hidden for one in done)) == (33, 1)
    assert sum(one.left_out for one in done) == 11
    orders = [offset for number, offset in enumerate(offsets) if number % 3]
    found = followed.index.query("orders", tag_key("paid"), max_count=100)
    assert sorted(item.offset for item in found)[1:] == orders
    assert [item.offset for item in followed.index.query("orders", "half")] == [min(item.offset for item in found)]
    for topic, key in (("orders", "never"), ("payments", "k0"), ("SCHEDULE_TOPIC_XXXX", "k1")):
        assert not followed.index.query(topic, key)


def test_a_round_is_bounded_and_the_next_one_continues(followed):
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


def test_a_restart_continues_at_the_durable_position_and_doubles_no_answer(followed):
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


def test_a_lost_root_continues_at_the_storages_position_and_a_new_one_begins_with_the_log(followed):
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
