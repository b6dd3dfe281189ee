"""The contract of connectors as a pytest suite: subclass it with a `tested` fixture to test a connector of yours.

    class TestMyConnector(ConnectorConformance):
        @pytest.fixture
        def tested(self):
            with my_server() as server:
                yield MySource(server)

The fixture yields a `TestedSource`: a new, empty source, which the tests write, trim and replace through its methods. A
method that a source can't have stays as it is: the tests that need it are skipped.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tiered_index.config import IndexConfig
from tiered_index.connectors.contract import MessagePlaces, SourceConnector, SourceRun
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.source import Batch, Source
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.index import IndexService
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.log.log import StorageLog
from tiered_index.service.read.answers.messages import MessageSource
from tiered_index.storage.memory import MemoryStorage


class WrittenMessage(NamedTuple):
    """A message that a test wrote: its topic, its only key, and text that its message, but no other one, contains.

    The key is one that no other message of the topic has.
    """

    topic: str
    key: str
    text: str


class TestedSource:
    """A source of messages in the hands of a test. One thread uses it.

    - `connector`: the connector.
    - `address`: the address of the source.
    - `options`: options with which it goes on after messages are lost.
    - `settings`: settings of an index, in addition to the defaults, such as ``offset_space``.
    - `reads_messages`: whether the connector reads messages again.
    - `archives`: whether what is put is in a columnar archive at the end of a run, with `options`.
    - `archives_bytes`: whether the archive has the bytes of the source instead, but for its newest part.
    - `tells_of_unread`: whether the source tells of messages that were deleted before they were read.
    """

    __test__ = False

    connector: SourceConnector
    address: str
    options: Any = None
    settings: Mapping[str, Any] = MappingProxyType({})
    reads_messages: bool = True
    archives: bool = False
    archives_bytes: bool = False
    tells_of_unread: bool = True

    def write(self, count: int) -> list[WrittenMessage]:
        """Append messages, and return them in order. They are visible to a reader when this returns."""
        raise NotImplementedError

    def trim(self) -> None:
        """Delete all messages but the last one, as retention does."""
        pytest.skip("the source never deletes messages")

    def replace(self) -> None:
        """Put an empty source of the same address in place of this one."""
        pytest.skip("the source can't be replaced")

    def away(self) -> AbstractContextManager[None]:
        """Return a context in which the source can't be reached."""
        pytest.skip("the source can't be away")

    def hanging(self) -> AbstractContextManager[None]:
        """Return a context in which the source accepts requests and does not answer.

        A disk of this host has no such state: a read returns, or fails.
        """
        pytest.skip("the source can't hang")


class Killed(BaseException):
    """The end of the process, for all that a test can see of it."""


class ConnectorConformance:
    """The tests that every connector must pass: positions, losses, lag, messages, and the end."""

    # messages of one test; more than one batch has, where batches are small
    many = 30
    # the longest time to close a source, and to see what a test did to it
    close_s = 10.0
    seen_s = 60.0

    @pytest.fixture
    def tested(self) -> Iterable[TestedSource]:
        """Yield a new, empty source; a subclass must override it."""
        raise NotImplementedError("a conformance suite needs a `tested` fixture")

    @pytest.fixture
    def open_index(self, tested: TestedSource, tmp_path: Path) -> Iterator[Callable[[], IndexService]]:
        """Yield a function that opens the index again, as after a crash."""
        storage, opened = MemoryStorage(), list[IndexService]()

        def open_it() -> IndexService:
            for index in opened:
                index.abandon()
            settings: dict[str, Any] = {"slots": 97, "items": 5_000, "background": False, **tested.settings}
            index = IndexService.open(root=tmp_path / "root", storage_backend=storage, environment=False, **settings)
            opened[:] = [index]
            return index

        yield open_it
        for index in opened:
            index.abandon()

    # Positions.

    def test_the_check_accepts_the_address_before_an_index_is_made(self, tested: TestedSource, tmp_path: Path) -> None:
        tested.write(1)
        config = IndexConfig(root=tmp_path / "new", storage=f"memory://{tmp_path.name}")
        tested.connector.check(_run_of(tested, []), config)
        assert not (tmp_path / "new").exists()

    def test_a_second_run_begins_at_the_durable_positions_and_puts_nothing(
        self, tested: TestedSource, open_index: Callable[[], IndexService]
    ) -> None:
        written = tested.write(self.many)
        index = open_index()
        assert _ingest(tested, index).entries == len(written)
        index = open_index()
        with contextlib.closing(_open(tested, index)) as source:
            durable = index.durable_positions()
            assert source.positions() == {name: durable[name] for name in source.positions()} != {}
        assert _ingest(tested, index).entries == 0
        _check_stored(index, written)

    def test_each_entry_is_stored_once_wherever_the_process_is_killed(
        self, tested: TestedSource, open_index: Callable[[], IndexService], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before each put, between a put and its flush, after a flush of which the source does not hear, and so on."""
        written: list[WrittenMessage] = []
        for last_step in range(1_000):
            written += tested.write(self.many)
            with monkeypatch.context() as patches:
                index = open_index()
                _kill_at(index, last_step, patches)
                try:
                    _ingest(tested, index)
                    is_killed = False
                except Killed:
                    is_killed = True
            index = open_index()
            _ingest(tested, index)
            _check_stored(index, written)
            if tested.archives:
                assert sum(segment.rows or 0 for segment in index.archived()) == len(written)
            if not is_killed:
                break
        assert last_step >= 3

    def test_a_document_of_each_topic_names_the_connector_and_stays_the_same(
        self, tested: TestedSource, open_index: Callable[[], IndexService]
    ) -> None:
        topics = {topic for topic, _, _ in tested.write(3)}
        _ingest(tested, open_index())
        index = open_index()
        documents = index.topic_documents()
        assert documents.keys() == topics
        assert len({document.connector for document in documents.values()}) == 1
        tested.write(1)
        _ingest(tested, index)
        assert open_index().topic_documents() == documents

    # Losses.

    def test_messages_that_were_deleted_unread_are_reported_and_named_in_answers(
        self, tested: TestedSource, open_index: Callable[[], IndexService]
    ) -> None:
        if not tested.tells_of_unread:
            pytest.skip("the source does not tell of messages that were deleted unread")
        before = tested.write(2)
        index = open_index()
        _ingest(tested, index)
        deleted = tested.write(self.many)
        tested.trim()
        after = tested.write(2)
        follower = _ingest(tested, index)
        assert {loss.kind for loss in follower.losses} == {"missing"}
        for topic, key, _ in deleted:
            answer = index.query(topic, key)
            assert len(answer) == 1 or answer.lost, (topic, key)
        assert any(not len(index.query(topic, key)) for topic, key, _ in deleted)
        for topic, key, _ in before + after:
            assert len(index.query(topic, key)) == 1, (topic, key)
        assert _ingest(tested, index).loss_count == 0

    def test_a_source_that_was_replaced_is_reported_and_read_from_its_begin(
        self, tested: TestedSource, open_index: Callable[[], IndexService]
    ) -> None:
        tested.write(self.many)
        index = open_index()
        _ingest(tested, index)
        tested.replace()
        # shorter than before, and longer
        for count in (1, 2 * self.many):
            written = tested.write(count)
            notes: list[str] = []
            follower = _ingest(tested, index, notes)
            assert count > 1 or follower.losses or notes
            for topic, key, _ in written:
                assert len(index.query(topic, key)) == 1, (topic, key)

    # Lag.

    def test_the_lag_is_the_truth_or_unknown(
        self, tested: TestedSource, open_index: Callable[[], IndexService]
    ) -> None:
        tested.write(self.many)
        index = open_index()
        with _follower(tested, index, follow=True).in_background() as follower:
            self._until(lambda: follower.entries == self.many and _is_level(follower.source))
            with tested.away():
                self._until(lambda: not _is_level(follower.source))
            tested.write(1)
            self._until(lambda: follower.entries == self.many + 1 and _is_level(follower.source))

    # Messages.

    def test_each_entry_has_its_message_or_a_named_reason(
        self, tested: TestedSource, open_index: Callable[[], IndexService]
    ) -> None:
        written = tested.write(self.many)
        index = open_index()
        _ingest(tested, index)
        with _messages(tested, index) as source:
            for topic, key, text in written:
                (fetched,) = index.messages(topic, key, source=source).messages
                assert fetched.state in ("local", "archived") and fetched.message is not None, fetched.problem
                assert text in json.dumps(fetched.message.to_dict(), default=str)
            tested.trim()
            tested.write(1)
            states = [index.messages(topic, key, source=source).messages[0] for topic, key, _ in written]
        assert all(fetched.message is not None or fetched.problem for fetched in states)
        assert _archives(tested) or any(fetched.message is None for fetched in states)

    def test_a_message_is_shown_only_for_its_topic_and_key(
        self, tested: TestedSource, open_index: Callable[[], IndexService]
    ) -> None:
        written = tested.write(self.many)
        index = open_index()
        _ingest(tested, index)
        with _messages(tested, index) as source:
            for topic, key, text in written:
                items = index.query(topic, key).items
                for other_topic, other_key in (("another-topic", key), (topic, f"{key}-not")):
                    for fetched in source.fetch(items, other_topic, other_key):
                        shown = fetched.message if fetched.carries_key else None
                        assert shown is None or text not in json.dumps(shown.to_dict(), default=str)

    # The archive.

    def test_archived_messages_are_found_after_the_source_has_deleted_them(
        self, tested: TestedSource, open_index: Callable[[], IndexService]
    ) -> None:
        written, index = self._archived(tested, open_index)
        segments = index.archived()
        tested.trim()
        states = set[str]()
        with _messages(tested, index) as source:
            for topic, key, text in written:
                (fetched,) = index.messages(topic, key, source=source).messages
                assert fetched.state in ("local", "archived") and fetched.message is not None, fetched.problem
                assert text in json.dumps(fetched.message.to_dict(), default=str)
                states.add(fetched.state)
        assert "archived" in states
        # nothing is archived twice
        index = open_index()
        _ingest(tested, index)
        assert index.archived()[: len(segments)] == segments

    def test_the_archive_has_the_entries_of_an_index_that_is_made_again(
        self, tested: TestedSource, open_index: Callable[[], IndexService]
    ) -> None:
        if tested.archives_bytes:
            pytest.skip("the archive has no columns")
        written, index = self._archived(tested, open_index)
        index.seal()
        index.run_lifecycle()
        logs = tested.connector.archived_logs(index.segment_archive, lambda topic: True)  # type: ignore[attr-defined]
        assert {log.source for log in logs} <= index.durable_positions().keys()
        entries = Counter[tuple[Any, ...]]()
        for log in logs:
            for batch in log.batches(None):
                entries.update(zip(*(batch.columns[name].to_pylist() for name in _ENTRY), strict=True))
        stored = Counter[tuple[Any, ...]]()
        for topic, key, _ in written:
            (item,) = index.query(topic, key).items
            stored[topic, key, item.queue_id, item.offset, item.size] += 1
        assert entries == stored

    def test_erased_messages_are_gone_from_the_archive(
        self, tested: TestedSource, open_index: Callable[[], IndexService]
    ) -> None:
        written, index = self._archived(tested, open_index)
        erased, *others = written
        (item,) = index.query(erased.topic, erased.key).items
        tested.trim()
        storage, log = index.storage, StorageLog(index.storage, index.clock)
        log.open()
        request = EraseRequest(erased.topic, (erased.key,))
        sought = tested.connector.erasure(request, index.topic_document(erased.topic))
        done = erase(storage, log, request, index.clock, yes=True, now=True, grace_s=0, threads=1, messages=sought)
        assert (done.messages_erased, done.segments_remaining, done.segment_problems) == (1, (), ())
        index = open_index()
        with _messages(tested, index) as source:
            (fetched,) = source.fetch([item], erased.topic, erased.key)
            assert fetched.message is None and fetched.problem
            for topic, key, text in others:
                (fetched,) = index.messages(topic, key, source=source).messages
                assert text in json.dumps(fetched.message and fetched.message.to_dict(), default=str), fetched.problem
        for segment in index.archived():
            assert erased.text.encode() not in storage.get(segment.name)

    def _archived(
        self, tested: TestedSource, open_index: Callable[[], IndexService]
    ) -> tuple[list[WrittenMessage], IndexService]:
        """Return messages that are archived, and their index."""
        if not _archives(tested):
            pytest.skip("the connector archives nothing")
        written, index = tested.write(self.many), open_index()
        _ingest(tested, index)
        rows = sum(segment.rows or 0 for segment in index.archived())
        assert (len(index.archived()) > 1) if tested.archives_bytes else (rows == len(written))
        return written, index

    # The end.

    def test_a_source_that_hangs_is_closed_in_time(
        self, tested: TestedSource, open_index: Callable[[], IndexService], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tested.write(self.many)
        follower, has_begun = _follower(tested, open_index(), follow=True), threading.Event()
        read = follower.source.batches

        def batches() -> Generator[Batch, None, None]:
            has_begun.set()
            yield from read()

        monkeypatch.setattr(follower.source, "batches", batches)
        follower.in_background()
        self._until(lambda: follower.entries == self.many)
        with tested.hanging():
            has_begun.clear()
            # a round that asks the hanging source
            assert has_begun.wait(self.seen_s)
            closing = threading.Thread(target=follower.__exit__, args=(None, None, None), daemon=True)
            closing.start()
            closing.join(self.close_s)
            is_closed = not closing.is_alive()
        closing.join()
        assert is_closed, f"the source was not closed within {self.close_s:g} s"

    def _until(self, met: Callable[[], bool]) -> None:
        end_s = time.monotonic() + self.seen_s
        while not met():
            assert time.monotonic() < end_s, f"not within {self.seen_s:g} s"
            time.sleep(0.01)


def _archives(tested: TestedSource) -> bool:
    return tested.archives or tested.archives_bytes


def _run_of(tested: TestedSource, notes: list[str], *, follow: bool = False) -> SourceRun:
    return SourceRun(addresses=(tested.address,), options=tested.options, follow=follow, note=notes.append)


def _open(tested: TestedSource, index: IndexService) -> Source:
    return tested.connector.source(_run_of(tested, []), index).source


def _follower(
    tested: TestedSource, index: IndexService, notes: list[str] | None = None, *, follow: bool = False
) -> Follower:
    notes = [] if notes is None else notes
    opened = tested.connector.source(_run_of(tested, notes, follow=follow), index)
    # of a source that has no document of its own
    how: dict[str, Any] = {"document": TopicDocument.of("tested", 1), "follow": follow, "note": notes.append}
    return Follower(index, opened.source, archiver=opened.archiver if _archives(tested) else None, **how)


def _ingest(tested: TestedSource, index: IndexService, notes: list[str] | None = None) -> Follower:
    """Read the source to its end, and flush."""
    with _follower(tested, index, notes) as follower:
        follower.run()
        # only what is durable is archived
        index.flush()
        follower.finish_archiving()
    index.flush()
    return follower


_ENTRY = ("topic", "key", "queue_id", "offset", "size")
# what a source may write beside its entries
_WRITES = ("link", "name_columns", "publish_positions", "record_ranges", "send_columns")


def _kill_at(index: IndexService, last_step: int, patches: pytest.MonkeyPatch) -> None:
    """Let the step with this number raise `Killed`: around a put, after its flush, and around other writes."""
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps > last_step:
            raise Killed

    def stepping(write: Callable[..., Any]) -> Callable[..., Any]:
        def written(*arguments: Any, **named: Any) -> Any:
            step()
            done = write(*arguments, **named)
            step()
            return done

        return written

    put = stepping(index.put_source_batch)

    def put_and_flush(*arguments: Any, **named: Any) -> Any:
        entries = put(*arguments, **named)
        index.flush()
        step()
        return entries

    for name in _WRITES:
        patches.setattr(index, name, stepping(getattr(index, name)))
    patches.setattr(index, "put_source_batch", put_and_flush)


def _check_stored(index: IndexService, written: list[WrittenMessage]) -> None:
    """Check that exactly the messages that were written are stored, each once, and found."""
    with index.export() as export:
        stored = Counter(row["topic"] for batch in export for row in batch.to_pylist())
    assert stored == Counter(message.topic for message in written)
    lookups = [(message.topic, message.key) for message in written]
    for lookup, answer in zip(lookups, index.query_many(lookups), strict=True):
        assert (answer.status, len(answer)) == ("complete", 1), lookup


def _is_level(source: Source) -> bool:
    """Return whether a source says that nothing is left to read."""
    lag = source.lag()
    return lag.bytes == 0 and not lag.is_unknown


@contextlib.contextmanager
def _messages(tested: TestedSource, index: IndexService) -> Iterator[MessageSource]:
    """Yield what reads the messages of entries again, as commands open it."""
    if not tested.reads_messages:
        pytest.skip("the connector does not read messages again")
    with contextlib.ExitStack() as stack:

        def closed_later(opened: Any) -> Any:
            if (close := getattr(opened, "close", None)) is not None:
                stack.callback(close)
            return opened

        place = closed_later(tested.connector.place(tested.options, tested.address))
        places = MessagePlaces(index=index, config=index.config, place=place, documents=index.topic_documents)
        yield closed_later(tested.connector.messages(places))
