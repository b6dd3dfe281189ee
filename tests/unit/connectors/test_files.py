"""Files against the contract of connectors, and what a source of files does beside it."""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hanging import until
from tiered_index import IndexService
from tiered_index.connectors.contract import SourceRun
from tiered_index.connectors.files import listing, source
from tiered_index.connectors.files.connector import CONNECTOR
from tiered_index.connectors.files.rows import text as rows_of_text
from tiered_index.connectors.files.source import FileSource
from tiered_index.connectors.files.spec import FilesOptions, RowOptions
from tiered_index.connectors.follow import Follower
from tiered_index.errors import DiskFull, StorageUnavailable
from tiered_index.testing.connector_conformance import ConnectorConformance, TestedSource, WrittenMessage

BEGIN_S = 1_700_000_000


class Logs(TestedSource):
    """A folder with a log of two topics, which is followed."""

    connector = CONNECTOR
    options = FilesOptions(rows=RowOptions(topic="field:topic", time="at"), key=["k"], archive=True)
    archives = True
    tells_of_unread = False

    def __init__(self, folder: Path, patched: pytest.MonkeyPatch) -> None:
        self.folder, self.address, self.number = folder, str(folder), 0
        self._patched = patched
        folder.mkdir()
        self._log = folder / "app.log"

    def write(self, count: int) -> list[WrittenMessage]:
        written = []
        with self._log.open("a") as log:
            for _ in range(count):
                self.number += 1
                topic, key, text = ("orders", "payments")[self.number % 2], f"key-{self.number}", f"text-{self.number}."
                row = {"topic": topic, "k": key, "at": BEGIN_S + self.number, "text": text}
                log.write(f"{json.dumps(row)}\n")
                written.append(WrittenMessage(topic, key, text))
        return written

    def trim(self) -> None:
        *_, last = self._log.read_text().splitlines()
        self._log.write_text(f"{last}\n")

    def replace(self) -> None:
        self._log.unlink()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        away = self.folder.with_name("away")
        self.folder.rename(away)
        try:
            yield
        finally:
            away.rename(self.folder)

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        # as on a file system whose server does not answer
        answers, listed = threading.Event(), listing.local_file

        def hung(path: Path) -> listing.SourceFile:
            answers.wait(60)
            return listed(path)

        with self._patched.context() as patched:
            patched.setattr(listing, "local_file", hung)
            try:
                yield
            finally:
                answers.set()


class TestFiles(ConnectorConformance):
    @pytest.fixture
    def tested(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Logs:
        # several batches of a file
        monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 500)
        monkeypatch.setattr(source, "_STOP_S", 0.2)
        return Logs(tmp_path / "logs", monkeypatch)


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Logs:
    return Logs(tmp_path / "logs", monkeypatch)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[IndexService]:
    with IndexService.open(root=tmp_path / "root", storage=f"file://{tmp_path}/store", environment=False) as index:
        yield index


def followed(logs: Logs, index: IndexService, notes: list[str], **options: Any) -> Follower:
    run = SourceRun(addresses=(logs.address,), options=logs.options, note=notes.append, poll_s=0.01)
    return Follower(index, CONNECTOR.source(run, index).source, poll_s=0.01, note=notes.append, **options)


def test_a_follower_that_is_stopped_ends_before_the_next_put_and_a_later_one_goes_on(
    logs: Logs, index: IndexService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at terabytes takes hours."""
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 500)
    written = logs.write(100)
    with followed(logs, index, []) as follower:
        put, of_source = index.put_source_batch, follower.source.linker.store

        def stopping(columns: Any, name: str | None = None, position: int | None = None, **more: Any) -> int:
            entries = put(columns, name, position, **more)
            if entries and name == of_source:
                follower.stop.set()
            return entries

        monkeypatch.setattr(index, "put_source_batch", stopping)
        follower.run()
    index.flush()
    assert 0 < sum(len(index.query(topic, key)) for topic, key, _ in written) < 100
    monkeypatch.undo()
    with followed(logs, index, []).in_background() as follower:
        until(lambda: all(len(index.query(topic, key)) == 1 for topic, key, _ in written))


def test_a_look_that_a_full_disk_has_ended_is_repeated(
    logs: Logs, index: IndexService, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, link, calls = logs.write(20), index.link, itertools.count()

    def full(*arguments: Any, **named: Any) -> Any:
        # after rows were put, and before the record that finishes their segment
        if next(calls) == 1:
            raise DiskFull("the disk is full")
        return link(*arguments, **named)

    monkeypatch.setattr(index, "link", full)
    with followed(logs, index, [], follow=False) as follower:
        follower.run()
    assert next(calls) > 2
    assert all(len(index.query(topic, key)) == 1 for topic, key, _ in written)
    with index.export() as export:
        assert sum(len(batch) for batch in export) == len(written)


def test_a_storage_that_is_away_is_trouble_until_it_is_back(
    logs: Logs, index: IndexService, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, notes, is_away = logs.write(2), list[str](), threading.Event()
    look = listing.local_file

    def away(path: Path) -> listing.SourceFile:
        if is_away.is_set():
            raise StorageUnavailable("the storage is away")
        return look(path)

    monkeypatch.setattr(listing, "local_file", away)
    with followed(logs, index, notes).in_background() as follower:
        until(lambda: follower.entries == 2 and follower.source.lag().seconds is not None)
        assert follower.problems(60) == []
        is_away.set()
        until(lambda: follower.problems())
        assert follower.problems(60) == [
            "source: the storage is away",
            "follow: how far the index is behind the source is not known",
        ]
        written += logs.write(1)
        is_away.clear()
        until(lambda: follower.entries == 3 and not follower.problems(60))
    assert {*notes} == {"the storage is away: trying again"}
    assert all(len(index.query(topic, key)) == 1 for topic, key, _ in written)


def test_a_run_that_does_not_follow_raises_what_is_away(
    logs: Logs, index: IndexService, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.write(1)

    def away(path: Path) -> listing.SourceFile:
        raise StorageUnavailable("the storage is away")

    run = SourceRun(addresses=(logs.address,), options=logs.options, follow=False, note=print)
    monkeypatch.setattr(listing, "local_file", away)
    with Follower(index, FileSource(index, run), follow=False) as follower:
        with pytest.raises(StorageUnavailable, match="is away"):
            follower.run()
        monkeypatch.undo()
        follower.run()
    assert follower.entries == 1
