"""Answers are complete up to the time before which every message of a store was read, and no later."""

import pytest

from tests.rocketmq.followed import SEGMENT, rounds
from tests.rocketmq.messages import NOW_MS
from tiered_index import IndexReader
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.segments import End
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.errors import StorageUnavailable
from tiered_index.service.log.reads import read_name


def told_ms(followed):
    """The time up to which the index says that the store was read, once this is durable."""
    followed.index.flush()
    return followed.index.durable_position(read_name(StoreDirectory.open(followed.path).source, ""))


def dispatcher_of(followed, **options):
    return followed.dispatcher(clock=followed.clock, **options)


def catch_up(dispatcher):
    return list(rounds(dispatcher))


@pytest.mark.parametrize("ends_by_error", [False, True])
def test_answers_of_a_root_have_the_time_of_its_last_run(followed, ends_by_error):
    """Messages that the store got later are not in the root, whether or not the run ended by an error."""
    followed.write(30)
    read_ms = followed.clock.now_ms()
    with Follower(followed.index, dispatcher_of(followed, follow=False), follow=False) as follower:
        follower.run()
    followed.clock.advance(3600.0)
    followed.write(1, only_topic="new", keys="later")
    if ends_by_error:
        log = followed.path / "commitlog"
        log.rename(followed.path / "unmounted")
        ended = Follower(followed.index, dispatcher_of(followed, follow=False), follow=False)
        with pytest.raises(StorageUnavailable), ended as follower:
            follower.run()
        (followed.path / "unmounted").rename(log)
    followed.index.flush()
    with IndexReader.open(root=followed.index.config.root, storage_backend=followed.storage) as reader:
        for lookups in (followed.index, reader):
            # a topic that no entry has, too
            for topic, key, count in (("orders", "own-1", 1), ("new", "later", 0)):
                answer = lookups.query(topic, key)
                assert (len(answer), answer.status, answer.as_of_ms) == (count, "complete", read_ms)
            assert lookups.query_many([("new", "later"), ("orders", "own-1")]).seen.as_of_ms == read_ms
        with Follower(followed.index, dispatcher_of(followed, follow=False), follow=False) as follower:
            follower.run()
        followed.index.flush()
        for lookups in (followed.index, reader):
            answer = lookups.query("new", "later")
            assert (len(answer), answer.as_of_ms) == (1, followed.clock.now_ms())


def round_beside_a_writer(followed, dispatcher):
    """Run a round, after whose messages one more comes; return the last batch."""
    for batch in dispatcher.batches():
        if batch.messages:
            followed.write(1)
            followed.clock.advance(5.0)
        if batch.columns is not None:
            followed.index.put_source_batch(batch.columns, batch.source, batch.position)
    assert not batch.caught_up
    return batch


def test_the_time_is_that_of_the_begin_of_a_round_also_if_messages_come_in_each_round(followed):
    """Zeros at which a round ended may be a hole. A message there in the next round shows that they were the end."""
    followed.write(30)
    dispatcher, begun_ms = dispatcher_of(followed), [0]
    for number in range(4):
        begun_ms.append(followed.clock.now_ms())
        round_beside_a_writer(followed, dispatcher)
        assert told_ms(followed) == begun_ms[number]
    begun_ms.append(followed.clock.now_ms())
    for batch in dispatcher.batches():
        followed.clock.advance(5.0)
        if batch.columns is not None:
            followed.index.put_source_batch(batch.columns, batch.source, batch.position)
    assert batch.caught_up and told_ms(followed) == begun_ms[-1]


def test_zeros_that_are_skipped_were_not_the_end(followed):
    offsets = followed.write(33)
    followed.overwrite(offsets[30], bytes(offsets[31] - offsets[30]))
    dispatcher = dispatcher_of(followed, skip_corrupt=True)
    first = dispatcher.run_once()
    assert (first.end, first.state, told_ms(followed)) == (offsets[30], End.OPEN, 0)
    followed.clock.advance(5.0)
    round_beside_a_writer(followed, dispatcher)
    assert (dispatcher.position > offsets[32], told_ms(followed)) == (True, 0)
    catch_up(dispatcher)
    assert told_ms(followed) == followed.clock.now_ms()


def test_a_round_that_ends_before_the_end_of_the_log_tells_no_time(followed):
    followed.write(200)
    dispatcher = dispatcher_of(followed, round_bytes=SEGMENT)
    dispatcher.run_once()
    assert told_ms(followed) == 0
    answer = followed.index.query("orders", "k1")
    assert (answer.status, answer.as_of_ms) == ("complete", 0)
    catch_up(dispatcher)
    assert told_ms(followed) == followed.clock.now_ms()


def test_the_time_moves_after_messages_once_a_minute_without_them_and_in_the_end(followed):
    dispatcher, begin_ms = dispatcher_of(followed), followed.clock.now_ms()
    followed.write(1)
    catch_up(dispatcher)
    assert told_ms(followed) == begin_ms
    for seconds, moved in ((59, 0), (1, 60_000), (59, 60_000)):
        followed.clock.advance(seconds)
        catch_up(dispatcher)
        assert told_ms(followed) == begin_ms + moved
    followed.write(1)
    catch_up(dispatcher)
    assert told_ms(followed) == begin_ms + 119_000
    followed.clock.advance(7)
    catch_up(dispatcher)
    assert told_ms(followed) == begin_ms + 119_000
    with Follower(followed.index, dispatcher) as follower:
        follower.stop.set()
        follower.run()
    assert told_ms(followed) == begin_ms + 126_000


def test_a_killed_run_leaves_the_time_of_the_entries_that_it_left(followed):
    followed.write(5)
    catch_up(dispatcher_of(followed))
    read_ms = told_ms(followed)
    followed.clock.advance(3600.0)
    followed.write(5)
    catch_up(dispatcher_of(followed))
    followed.crash_index()
    assert told_ms(followed) == read_ms
    assert followed.index.query("orders", "own-1").as_of_ms == read_ms // 1000 * 1000
    assert not len(followed.index.query("orders", "own-8"))
    catch_up(dispatcher_of(followed))
    assert told_ms(followed) == followed.clock.now_ms()
    followed.check()


def test_a_damaged_message_that_others_follow_stops_the_time(followed):
    """A follower waits there, because the broker may be writing. Half a message at the end is none yet."""
    followed.write(5)
    (start,) = followed.write(1, body=b"body of the last one")
    at = followed.segment(0).read_bytes().index(b"body of the last")
    followed.overwrite(at, b"BODY")
    dispatcher = dispatcher_of(followed, reader=CommitLogReader(followed.path / "commitlog", check_crc=True))
    catch_up(dispatcher)
    read_ms = told_ms(followed)
    assert (dispatcher.position, read_ms) == (start, followed.clock.now_ms())
    # an older one, after the broker's clock was set back: a newer one shows damage, which ends the run
    followed.writer.put("orders", 0, keys="after", store_ms=NOW_MS - 1_000)
    followed.writer.flush()
    followed.clock.advance(3600.0)
    *_, last = catch_up(dispatcher)
    assert (dispatcher.position, last.torn.begin, told_ms(followed)) == (start, start, read_ms)
    followed.overwrite(at, b"body")
    catch_up(dispatcher)
    assert told_ms(followed) == followed.clock.now_ms()


def test_messages_that_are_elsewhere_stop_the_time(followed):
    """The consume queues name messages after the end of the log."""
    followed.write(200)
    followed.writer.close()
    segment = followed.segment(followed.writer.next_offset // SEGMENT)
    data = segment.read_bytes()
    segment.unlink()
    dispatcher = dispatcher_of(followed)
    catch_up(dispatcher)
    assert dispatcher.trouble is not None and told_ms(followed) == 0
    segment.write_bytes(data)
    dispatcher = dispatcher_of(followed)
    catch_up(dispatcher)
    assert dispatcher.trouble is None and told_ms(followed) == followed.clock.now_ms()
