"""Messages that a broker discarded stay in its log as they were. They are not answers, as far as the follower's record
shows.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.rocketmq.archived_store import put
from tests.rocketmq.followed import SEGMENT, Followed, rounds
from tests.rocketmq.messages import NOW_MS
from tests.support.damage import flip
from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.archive.messages import RocketmqMessages
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.message import Message
from tiered_index.rocketmq.log.store import queues_of
from tiered_index.rocketmq.remoting.pulling import StoreQueues

KEPT, CUT, NEW = 10, 30, 3


class Cut:
    """A store whose broker discarded the last 30 of 40 messages, which the follower had put. Then the broker wrote 3
    other, longer ones.
    """

    def __init__(self, folder: Path) -> None:
        self.made = Followed(folder)
        self.made.write(KEPT + CUT, body=b"b" * 50)
        self.dispatcher = self.made.dispatcher(skip_missing=True)
        list(rounds(self.dispatcher))
        self.before = self.scan()
        self.writer = self.made.open_writer(self.before[KEPT].physical_offset)
        self.write(NEW)

    def write(self, count: int, key: str = "new") -> None:
        for number in range(count):
            self.writer.put("orders", 0, b"again" * 20, keys=key, store_ms=NOW_MS + 90_000 + number)
        self.writer.flush()

    def follow(self) -> None:
        losses = [loss.kind for _ in range(4) for loss in self.dispatcher.run_once().losses]
        assert losses == ["rewritten"]

    def scan(self) -> list[Message]:
        return list(CommitLogReader(self.made.path / "commitlog").messages())

    @property
    def behind(self) -> list[Message]:
        """The discarded messages that are still complete; the next segment is deleted."""
        return [message for message in self.before if self.writer.next_offset <= message.physical_offset < SEGMENT]

    def source(self, root: Path | None = None) -> RocketmqMessages:
        return RocketmqMessages(self.made.path, root=root or self.made.folder / "root")

    def state(self, wanted: Message, source: RocketmqMessages | None = None) -> tuple[str, str | None]:
        (fetched,) = self.made.index.messages(
            wanted.topic, wanted.uniq_key or "", source=source or self.source()
        ).messages
        assert (fetched.message is None) is (fetched.state == "missing")
        return fetched.state, fetched.problem


@pytest.fixture
def cut(tmp_path):
    made = Cut(tmp_path)
    yield made
    made.made.index.abandon()


def test_discarded_messages_are_missing_before_and_after_others_overwrite_them(cut):
    """Messages that the follower has not read yet are read up to the log's end."""
    cut.follow()
    assert len(cut.behind) > 10
    problem = f"{cut.made.path / 'commitlog'}: after the end of the log (cut off)"
    assert {cut.state(message) for message in cut.before[:KEPT]} == {("local", None)}
    assert {cut.state(message) for message in cut.behind} == {("missing", problem)}
    assert {cut.state(message)[0] for message in cut.before[KEPT:]} == {"missing"}
    answer = cut.made.index.messages("orders", "new", source=cut.source())
    assert [fetched.state for fetched in answer.messages] == ["local"] * NEW
    fetched = cut.source().by_msg_id(cut.behind[-1].offset_msg_id)
    assert (fetched.state, fetched.message, fetched.problem) == ("missing", None, problem)
    assert cut.source().by_msg_id(cut.before[KEPT - 1].offset_msg_id).state == "local"
    cut.write(2, "late")
    for message in cut.behind:
        assert cut.state(message)[0] == "missing"
    late = [message for message in cut.scan() if "late" in message.index_keys]
    for message in late:
        put(cut.made.index, message)
    answer = cut.made.index.messages("orders", "late", source=cut.source())
    assert [(fetched.state, fetched.item.offset) for fetched in answer.messages] == [
        ("local", message.physical_offset) for message in reversed(late)
    ]
    assert len(late) == 2


def test_nothing_is_known_before_the_follower_meets_the_cut_or_without_its_record_of_this_log(cut, tmp_path):
    last = cut.behind[-1]
    assert cut.state(last) == ("local", None)
    cut.follow()
    assert cut.state(last)[0] == "missing"
    other = Followed(tmp_path / "other")
    other.write(3)
    list(rounds(other.dispatcher()))
    other.index.abandon()
    for root in (None, tmp_path / "nothing", tmp_path / "other" / "root"):
        assert cut.state(last, RocketmqMessages(cut.made.path, root=root)) == ("local", None)
    (memory,) = (tmp_path / "root" / "followers").glob("*.json")
    memory.write_bytes(b"{")
    assert cut.state(last) == ("local", None)


def test_a_queue_ends_where_its_log_was_cut_off(cut):
    """A queue also keeps the entries of discarded messages until others overwrite them. It leaves them out where the
    log has no message yet. If the log was rewritten there, they are an error.
    """
    cut.follow()
    live = cut.before[:KEPT] + [message for message in cut.scan() if "new" in message.index_keys]
    stale, told = 0, set()
    for topic, queue_id in {(message.topic, message.queue_id) for message in cut.before}:
        expected = [message for message in live if (message.topic, message.queue_id) == (topic, queue_id)]
        (queue,) = (
            each_queue
            for each_queue in queues_of(cut.made.path / "consumequeue", topic)
            if each_queue.queue_id == queue_id
        )
        stale += queue.end() - len(expected)
        queues = StoreQueues(cut.made.path, cut.made.folder / "root")
        ends = queues.ends(queue)
        assert ends.begin == 0 <= len(expected) <= ends.end
        is_known = ends.end == len(expected)
        told.add(is_known)
        with nullcontext() if is_known else pytest.raises(CorruptFile):
            assert queues.last_store_ms(queue, ends) == (expected[-1].store_ms if expected else 0)
        if expected:
            pulled = queues.pull(topic, queue_id, 0, 32, 1 << 20, None)
            assert (pulled.code, pulled.next) == (0, len(expected))
            assert pulled.body == b"".join(message.encode() for message in expected)
        with nullcontext() if is_known else pytest.raises(CorruptFile):
            assert queues.pull(topic, queue_id, len(expected), 32, 1 << 20, None).code == 19
    assert stale > 10
    assert told == {True, False}


def test_damage_is_no_end(tmp_path):
    """Messages after damage at which the follower stopped are younger: the broker did not discard them."""
    made = Followed(tmp_path)
    made.write(10)
    dispatcher = made.dispatcher()
    list(rounds(dispatcher))
    (broken,) = made.write(1, body=b"b" * 50)
    made.write(10)
    flip(made.segment(0), broken + 4)
    behind = list(CommitLogReader(made.path / "commitlog").messages(skip_corrupt=True))[10:]
    assert len(behind) == 10
    for message in behind:
        put(made.index, message)
        source = RocketmqMessages(made.path, root=tmp_path / "root")
        (fetched,) = made.index.messages(message.topic, message.uniq_key or "", source=source).messages
        assert fetched.state == "local"
    made.index.abandon()
