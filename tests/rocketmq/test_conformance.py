"""Stores of RocketMQ against the contract of connectors."""

import shutil
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.rocketmq.followed import SEGMENT
from tests.rocketmq.messages import NOW_MS
from tests.support.store_writer import StoreWriter
from tiered_index.connectors.rocketmq.connector import CONNECTOR
from tiered_index.connectors.rocketmq.spec import RocketmqOptions, StoreOptions
from tiered_index.testing.connector_conformance import ConnectorConformance, TestedSource, WrittenMessage


class Store(TestedSource):
    """Two topics of a store that a broker writes."""

    connector = CONNECTOR
    options = RocketmqOptions(of_store=StoreOptions(skip_missing=True))
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


class TestRocketmq(ConnectorConformance):
    @pytest.fixture
    def tested(self, tmp_path: Path) -> Store:
        return Store(tmp_path / "store")
