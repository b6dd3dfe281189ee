"""Stores of RocketMQ against the contract of connectors."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.rocketmq.followed import SEGMENT
from tests.rocketmq.messages import NOW_MS
from tests.support.store_writer import StoreWriter
from tiered_index.connectors.rocketmq.connector import CONNECTOR
from tiered_index.connectors.rocketmq.spec import ArchiveOptions, RocketmqOptions, StoreOptions
from tiered_index.testing.connector_conformance import (
    ConnectorConformance,
    TestedSource,
    WrittenMessage,
    _follower,
    _is_level,
)


class Store(TestedSource):
    """Two topics of a store that a broker writes."""

    connector = CONNECTOR
    options = RocketmqOptions(
        of_store=StoreOptions(skip_missing=True, skip_corrupt=True), archiving=ArchiveOptions(archive_segments=True)
    )
    archives_bytes = True
    settings = MappingProxyType({"offset_space": "commitlog"})

    def __init__(self, folder: Path) -> None:
        self.folder, self.address, self.number = folder, str(folder), 0
        self.writer = self._writer()

    def _writer(self) -> StoreWriter:
        return StoreWriter(self.folder, segment_bytes=SEGMENT, queue_entries=50)

    def write(self, count: int) -> list[WrittenMessage]:
        written = []
        for _ in range(count):
            self.number += 1
            topic, key, text = ("orders", "payments")[self.number % 2], f"key-{self.number}", f"text-{self.number}."
            body, stored_ms = text.encode().ljust(1_000), NOW_MS + self.number
            self.writer.put(topic, 0, body, keys=key, store_ms=stored_ms, born_ms=stored_ms)
            written.append(WrittenMessage(topic, key, text))
        self.writer.flush()
        return written

    def trim(self) -> None:
        for path in sorted((self.folder / "commitlog").iterdir())[:-1]:
            path.unlink()

    def replace(self) -> None:
        shutil.rmtree(self.folder)
        self.writer = self._writer()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """The disk is not mounted."""
        elsewhere = self.folder.rename(self.folder.with_name("elsewhere"))
        yield
        elsewhere.rename(self.folder)

    def hanging(self) -> contextlib.AbstractContextManager[None]:
        pytest.skip("a store is on disks of the broker's host: a read returns, or fails")


class TestRocketmq(ConnectorConformance):
    @pytest.fixture
    def tested(self, tmp_path: Path) -> Store:
        return Store(tmp_path / "store")

    @pytest.mark.parametrize("is_empty", [False, True], ids=["gone", "empty"])
    def test_a_folder_that_goes_away_is_told_and_followed_again(self, tested, open_index, is_empty):
        """Its disk may be mounted later; an empty folder may be in its place."""
        tested.write(self.many)
        with _follower(tested, open_index(), follow=True).in_background() as follower:
            self._until(lambda: follower.entries == self.many and _is_level(follower.source))
            assert follower.problems() == []
            with tested.away():
                if is_empty:
                    (tested.folder / "commitlog").mkdir(parents=True)
                state = "has no segment" if is_empty else "is not there"
                told = f"source: {tested.folder}/commitlog {state}, and was read up to offset "
                self._until(lambda: [problem.startswith(told) for problem in follower.problems()] == [True])
                if is_empty:
                    shutil.rmtree(tested.folder)
            tested.write(self.many)
            self._until(lambda: follower.entries == 2 * self.many and not follower.problems(60))
            assert follower.losses == []
