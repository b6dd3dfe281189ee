"""Drivers of builds and merges that die after each of their writes to the storage.

The storage then has the old state or the new one, and a second run does the rest. A run of the whole job gives the
writes, so the test covers a new one by itself. `test_publishing.py` also kills at each read.
"""

import itertools
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.spark.entries import BEGIN_MS, DAY_MS, check, check_stored, messages, put_files, states, sweep, write_parquet
from tests.spark.in_process import build_here
from tiered_index import IndexConfig
from tiered_index.errors import InvalidArgument, NotAnIndex
from tiered_index.service.jobs.merge_run import MergeOptions
from tiered_index.spark import build, merge
from tiered_index.spark.addresses import StorageAddress
from tiered_index.storage.base import Storage, StorageRequest, WrapperStorage

WRITES = ("put", "put_if_absent", "write", "delete_many")
BUILT, OLDER = messages(240, days=1), messages(150, days=1, seed=2)
WRITTEN = (messages(120, days=1, seed=3), messages(120, days=1, seed=4, begin_ms=BEGIN_MS + DAY_MS))
_T = TypeVar("_T")


class Killed(BaseException):
    """Ends the driver."""


class Dying(WrapperStorage):
    """The driver's storage: after so many writes no call reaches it any more."""

    def __init__(self, inner: Storage, left: list[int], records: list[str]) -> None:
        super().__init__(inner)
        self._left, self._records = left, records

    def _around(self, call: StorageRequest, act: Callable[[], _T]) -> _T:
        if self._left[0] <= 0:
            raise Killed
        result = act()
        if call.operation in WRITES:
            self._left[0] -= 1
            if call.operation == "put_if_absent" and call.name.startswith("log/"):
                self._records.append(call.name)
            if self._left[0] <= 0:
                raise Killed
        return result


@dataclass(frozen=True)
class Address(StorageAddress):
    """Opens a `Dying` storage in the driver, and a plain one in tasks."""

    left: Any = None
    records: Any = None
    driver: int = 0

    def open(self, *, any_names: bool = False) -> Storage:
        """Return the storage."""
        inner = super().open(any_names=any_names)
        return Dying(inner, self.left, self.records) if os.getpid() == self.driver else inner


@pytest.mark.long
@pytest.mark.parametrize(("kind", "records"), [("build", 2), ("replace", 1), ("merge", 2)])
def test_the_old_state_or_the_new_one(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, records: int
) -> None:
    """The first record of a build makes the index. A merge of a writer's files publishes a day by each record."""
    source, origin = write_parquet(BUILT, tmp_path / "m.parquet", group_rows=60), tmp_path / "origin"
    if kind == "replace":
        build_here(f"file://{origin}", OLDER)
    elif kind != "build":
        put_files(f"file://{origin}", tmp_path / "root", *WRITTEN, items=1_000, max_late_s=10**10)
    for number in itertools.count():
        folder, left, published = tmp_path / f"{number}", [number if number else 1_000], list[str]()
        if origin.exists():
            shutil.copytree(origin, folder)

        def address(uri: str, options: Any, left: Any = left, published: Any = published) -> Address:
            return Address(uri, options, left=left, records=published, driver=os.getpid())

        with monkeypatch.context() as patched:
            for module in ("build", "merge"):
                patched.setattr(sys.modules[f"tiered_index.spark.writing.{module}"], "StorageAddress", address)
            if not number:
                run(spark, kind, source, folder)
                writes = 1_000 - left[0]
            else:
                with pytest.raises(Killed):
                    run(spark, kind, source, folder)
        check_state(folder, kind, len(published), records)
        if kind == "build" and len(published) == records:
            with pytest.raises(InvalidArgument, match="has a table already"):
                run(spark, kind, source, folder)
        else:
            run(spark, kind, source, folder)
        check_state(folder, kind, records, records)
        check_stored(f"file://{folder}", *((BUILT,) if kind in ("build", "replace") else WRITTEN))
        sweep(f"file://{folder}")
        check_state(folder, kind, records, records)
        if number == writes:
            break
    assert writes > records


def run(spark: Any, kind: str, source: str, folder: Path) -> None:
    storage = f"file://{folder}"
    if kind == "merge":
        merge(spark, storage=storage, window="1d", options=MergeOptions(min_age_s=0, shard_bytes=1 << 20))
    else:
        mode = "replace" if kind == "replace" else "error"
        build(spark, source, storage=storage, shards=2, mode=mode, config=IndexConfig(slots=64, items=100_000))


def check_state(folder: Path, kind: str, done: int, records: int) -> None:
    """Assert that the answers are as the first `done` of the job's records leave them."""
    uri = f"file://{folder}"
    if kind == "build" and not done:
        with pytest.raises(NotAnIndex):
            states(uri)
        return
    old: tuple[Any, ...] = {"build": (), "replace": (OLDER,), "merge": WRITTEN}[kind]
    new = WRITTEN if kind == "merge" else (BUILT,)
    tables = new if done == records else old
    state = states(uri)
    assert sum(stored.count for stored in state.objects.values()) == sum(map(len, tables))
    if kind == "merge":
        assert (len(state.files), len(state.tables)) == (2 - done, done)
    if tables:
        check(uri, *tables, keys=2)
