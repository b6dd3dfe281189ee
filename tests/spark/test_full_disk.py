"""A temporary disk without room: an error that names it, and nothing of the job is published."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.spark.entries import check, messages, states, sweep, total, write_parquet
from tests.spark.in_process import planned, written
from tiered_index import IndexConfig
from tiered_index.errors import DiskFull
from tiered_index.spark import build
from tiered_index.storage.memory import MemoryStorage

_FULL = "/dev/full"


def full_disk(*_: Any, **__: Any) -> Any:
    """Return a temporary file that takes nothing."""
    return Path(_FULL).open("w+b", buffering=0)


def test_a_build_whose_task_finds_no_room(spark: Any, tmp_path: Path, config: IndexConfig) -> None:
    table, uri = messages(300), f"file://{tmp_path}/index"
    source = write_parquet(table, tmp_path / "source.parquet")
    build(spark, source, storage=uri, config=config)
    before = states(uri).number
    frame = spark.read.parquet(source)

    def spilling(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with full_disk() as file:
                file.write(b"a spilled block")
            yield batch

    full = frame.mapInArrow(spilling, frame.schema)
    with pytest.raises(DiskFull, match=r"temporary disk of an executor is full.*spark\.local\.dir.*TMPDIR") as caught:
        build(spark, full, storage=uri, mode="replace", config=config)
    assert caught.value.exit_code == 7
    assert (states(uri).number, total(uri), sweep(uri)) == (before, 300, 0)
    check(uri, table, keys=3)


def test_a_piece_on_disk_that_finds_no_room_is_no_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    table, storage = messages(2_000), MemoryStorage()
    plan = planned(table, piece_items=60)
    monkeypatch.setattr(tempfile, "TemporaryFile", full_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        written(table, plan, storage)
    assert caught.value.errno == errno.ENOSPC
    assert not list(storage.list())
