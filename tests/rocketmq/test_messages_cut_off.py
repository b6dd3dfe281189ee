"""Messages that a broker discarded stay in its log as they were. They are not answers, as far as the follower's record
shows.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.rocketmq.archived_store import put
from tests.rocketmq.followed import SEGMENT, Followed, rounds
from tests.support.damage import flip
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.message import Message
from tiered_index.connectors.rocketmq.log.store import queues_of
from tiered_index.connectors.rocketmq.remoting.pulling import StoreQueues
from tiered_index.errors import CorruptFile

KEPT, CUT, NEW = 10, 30, 3


class Cut(Followed):
    """A store whose broker discarded the last 30 of 40 messages, which the follower had put. Then the broker wrote 3
    other, longer ones.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.write(KEPT + CUT, body=b"b" * 50)
        self.following = self.dispatcher(skip_missing=True)
        list(rounds(self.following))
        self.before = self.messages()
        self.come_again(self.before[KEPT].physical_offset)
        self.write_more("new", NEW)

    def write_more(self, key: str, count: int) -> None:
        self.write(count, body=b"again" * 20, keys=key, uniq_key=None, only_topic="orders")

    def follow(self) -> None:
        assert [loss.kind for _ in range(4) for loss in self.following.run_once().losses] == ["rewritten"]

    def messages(self, key: str = "") -> list[Message]:
        messages = CommitLogReader(self.path / "commitlog").messages()
        return [message for message in messages if not key or key in message.index_keys]

    @property
    def behind(self) -> list[Message]:
        """The discarded messages that are still complete; the next segment is deleted."""
        return [message for message in self.before if self.writer.next_offset <= message.physical_offset < SEGMENT]

    def source(self) -> RocketmqMessages:
        return RocketmqMessages(self.path, root=self.folder / "root")

    def state(self, wanted: Message, source: RocketmqMessages | None = None) -> tuple[str, str | None]:
        answer = self.index.messages(wanted.topic, wanted.uniq_key or "", source=source or self.source())
        (fetched,) = answer.messages
        assert (fetched.message is None) is (fetched.state == "missing")
        return fetched.state, fetched.problem


@pytest.fixture
def cut(tmp_path):
    made = Cut(tmp_path)
    yield made
    made.index.abandon()


def test_discarded_messages_are_missing_before_and_after_others_overwrite_them(cut):
    """Messages that the follower has not read yet are read up to the log's end."""
    cut.follow()
    assert len(cut.behind) > 10
    problem = f"{cut.path / 'commitlog'}: after the end of the log (cut off)"
    assert {cut.state(message) for message in cut.before[:KEPT]} == {("local", None)}
    assert {cut.state(message) for message in cut.behind} == {("missing", problem)}
    assert {cut.state(message)[0] for message in cut.before[KEPT:]} == {"missing"}
    fetched = cut.source().by_msg_id(cut.behind[-1].offset_msg_id)
    assert (fetched.state, fetched.message, fetched.problem) == ("missing", None, problem)
    assert cut.source().by_msg_id(cut.before[KEPT - 1].offset_msg_id).state == "local"
    behind = cut.behind
    cut.write_more("late", 2)
    assert {cut.state(message)[0] for message in behind} == {"missing"}
    late = cut.messages("late")
    for message in late:
        put(cut.index, message)
    for key, written in (("new", cut.messages("new")), ("late", late)):
        answer = cut.index.messages("orders", key, source=cut.source())
        assert [(fetched.state, fetched.item.offset) for fetched in answer.messages] == [
            ("local", message.physical_offset) for message in reversed(written)
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
        assert cut.state(last, RocketmqMessages(cut.path, root=root)) == ("local", None)
    (memory,) = (tmp_path / "root" / "followers").glob("*.json")
    memory.write_bytes(b"{")
    assert cut.state(last) == ("local", None)


def test_a_queue_ends_where_its_log_was_cut_off(cut):
    """A queue also keeps the entries of discarded messages until others overwrite them. It leaves them out where the
    log has no message yet. If the log was rewritten there, they are an error.
    """
    cut.follow()
    live = cut.before[:KEPT] + cut.messages("new")
    stale, told = 0, set()
    for topic, queue_id in {(message.topic, message.queue_id) for message in cut.before}:
        expected = [message for message in live if (message.topic, message.queue_id) == (topic, queue_id)]
        (queue,) = (queue for queue in queues_of(cut.path / "consumequeue", topic) if queue.queue_id == queue_id)
        stale += queue.end() - len(expected)
        queues = StoreQueues(cut.path, cut.folder / "root")
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


def test_damage_is_no_end(followed):
    """Messages after damage at which the follower stopped are younger: the broker did not discard them."""
    followed.write(10)
    list(rounds(followed.dispatcher()))
    (broken,) = followed.write(1, body=b"b" * 50)
    followed.write(10)
    flip(followed.segment(0), broken + 4)
    behind = list(CommitLogReader(followed.path / "commitlog").messages(skip_corrupt=True))[10:]
    assert len(behind) == 10
    for message in behind:
        put(followed.index, message)
        source = RocketmqMessages(followed.path, root=followed.folder / "root")
        (fetched,) = followed.index.messages(message.topic, message.uniq_key or "", source=source).messages
        assert fetched.state == "local"
