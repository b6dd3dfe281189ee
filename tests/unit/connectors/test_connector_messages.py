"""Messages of a connector with a columnar archive are read at its source, then in the archive."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tiered_index.connectors.archive.archiver import PutArchiver
from tiered_index.connectors.archive.columns import SHARED, ArchiveFormat
from tiered_index.connectors.archive.messages import ConnectorMessages
from tiered_index.connectors.contract import MessagePlaces
from tiered_index.connectors.source import Batch, patiently
from tiered_index.errors import StorageUnavailable
from tiered_index.service.index import IndexService

FORMAT = ArchiveFormat("messages of a test", "test.messages", 1, pa.schema({**SHARED, "text": pa.binary()}), ("text",))
STORE = "test:here/t/0"


class Source:
    """Messages at offsets from 0 on, which a source still has, each in a second of its own."""

    def __init__(self, index: IndexService) -> None:
        self.index, self.begin, self.end, self.reads = index, 0, 0, list[tuple[int, int]]()

    def table(self, begin: int, end: int) -> pa.Table:
        rows = [
            {"topic": "t", "offset": at, "timestamp": at * 1000, "keys": [f"k{at}"], "text": b"text %d" % at}
            for at in range(max(begin, self.begin), min(end, self.end))
        ]
        return pa.Table.from_pylist(rows, FORMAT.schema)

    def put(self, count: int) -> None:
        columns = {name: list[Any]() for name in ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")}
        for at in range(self.end, self.end + count):
            for name, value in zip(columns, ("t", 0, f"k{at}", at, 6, at * 1000), strict=True):
                columns[name].append(value)
        self.end += count
        self.index.put_source_batch(columns, STORE, self.end)

    def archiver(self, every_s: float = 300) -> PutArchiver:
        return PutArchiver(self.index, FORMAT, lambda: [STORE], self.read_again, every_s)

    def read_again(self, store: str, begin: int, end: int) -> Any:
        assert store == STORE
        self.reads.append((begin, end))
        for at in range(begin, end, 2):
            yield self.table(at, min(at + 2, end)), min(at + 2, end)

    def messages(self, read: Callable[[str, int, int], pa.Table | None] | None) -> ConnectorMessages:
        places = MessagePlaces(index=self.index, config=self.index.config, place=None, documents=dict)
        return ConnectorMessages(places=places, scheme="test:", message_of=Text, read=read, place="the source")

    def states(self, read: Callable[[str, int, int], pa.Table | None] | None = None) -> list[str]:
        """Return the states of the messages, and check the messages."""
        states = []
        for at in range(self.end):
            (fetched,) = self.index.messages("t", f"k{at}", source=self.messages(read), allow_partial=True).messages
            assert (fetched.message is None) == (fetched.state not in ("local", "archived"))
            assert fetched.problem if fetched.message is None else fetched.message.row["text"] == b"text %d" % at
            states.append(fetched.state)
        return states


class Text:
    compression = None

    def __init__(self, row: Any) -> None:
        self.row = row

    def to_dict(self, body: str = "text", max_body_bytes: int = 0) -> dict[str, Any]:
        return dict(self.row)

    def plain_bytes(self, max_bytes: int) -> int:
        return len(self.row["text"])


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    index = IndexService.open(
        root=tmp_path, storage=f"memory://{tmp_path.name}", background=False, environment=False, slots=97, items=5_000
    )
    yield Source(index)
    index.abandon()


def test_what_was_put_is_archived_once_when_it_is_due_and_at_the_end(source: Source) -> None:
    source.put(3)
    late, at_once = source.archiver(), source.archiver(every_s=0)
    assert late.run_once() == 0 == at_once.run_once()
    # only what is durable
    assert source.reads == [(0, 0)]
    assert (late.finish(), late.archived, late.finish()) == (1, 1, 0)
    source.put(2)
    source.index.flush()
    assert at_once.run_once() == 1
    assert source.reads[-1] == (3, 5)
    assert [(segment.start, segment.end, segment.rows) for segment in source.index.archived()] == [(0, 3, 3), (3, 5, 2)]


def test_an_archiver_that_is_stopped_archives_what_it_has_read(source: Source) -> None:
    source.put(5)
    archiver = source.archiver()
    archiver.stop()
    assert archiver.finish() == 1
    assert [(segment.start, segment.end) for segment in source.index.archived()] == [(0, 2)]


def test_messages_are_read_at_the_source_then_in_the_archive(source: Source) -> None:
    source.put(4)
    source.archiver().finish()
    source.put(2)
    source.begin = 2

    def read(topic: str, queue_id: int, offset: int) -> pa.Table:
        assert (topic, queue_id) == ("t", 0)
        return source.table(offset, offset + 1)

    def away(topic: str, queue_id: int, offset: int) -> pa.Table:
        raise StorageUnavailable("it is away")

    assert source.states(read) == ["archived"] * 2 + ["local"] * 4
    assert source.states() == ["archived"] * 4 + ["missing"] * 2
    assert source.states(away) == ["archived"] * 4 + ["unavailable"] * 2
    assert source.states(lambda *place: None) == ["archived"] * 4 + ["no_topic"] * 2
    source.begin = 6
    assert source.states(read) == ["archived"] * 4 + ["expired"] * 2


def test_a_message_of_another_key_or_second_is_not_that_of_an_entry(source: Source) -> None:
    source.put(1)
    source.archiver().finish()
    (item,) = source.index.query("t", "k0").items
    messages = source.messages(None)
    (fetched,) = messages.fetch([item], "t", "other")
    assert fetched.message is not None and not fetched.carries_key
    (fetched,) = messages.fetch([item], "u", "k0")
    assert fetched.message is None
    (fetched,) = messages.fetch([replace(item, timestamp_ms=9_000)], "t", "k0")
    assert fetched.message is None and "the log is another one" in str(fetched.problem)


@pytest.mark.parametrize("follow", [True, False])
def test_a_source_that_is_away_is_trouble_while_it_is_followed(follow: bool) -> None:
    source = SimpleNamespace(follow=follow, trouble=None, positions=lambda: {"words": 3})

    def failing() -> Iterator[Batch]:
        yield Batch(source="words", position=3, messages=3)
        raise StorageUnavailable("the source is away")

    batches = patiently(source, failing())
    assert next(batches).messages == 3
    if follow:
        (last,) = batches
        assert (last.source, last.position, last.columns, last.caught_up) == ("words", 3, None, True)
    else:
        with pytest.raises(StorageUnavailable, match="is away"):
            next(batches)
    assert source.trouble == "the source is away"
    assert [*patiently(source, iter(()))] == [] and source.trouble is None
