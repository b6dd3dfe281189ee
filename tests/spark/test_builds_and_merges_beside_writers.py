"""Live writers, builds, merges and sweeps at once on one storage: no entry is lost, doubled, or missed by a reader for
a moment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.spark.side_by_side import Beside
from tests.support.s3_server import S3Server
from tiered_index.service.merge import task as task_module
from tiered_index.storage.opening import open_storage


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "_PART_BYTES", 700)


def run(folder: Path, uri: str, seed: int, *, rounds: int, builds: int, **settings: Any) -> Beside:
    with open_storage(uri) as storage:
        beside = Beside(folder, storage, seed, settings)
        try:
            beside.run(rounds=rounds, builds=builds)
            beside.check_the_end()
        finally:
            beside.service.abandon()
    seen = beside.seen
    print(f"seed {seed}: {beside.stored.entries} entries, {dict(seen)}")
    assert (seen["append"], seen["replace"]) == (builds, builds // 2)
    short = builds < 8
    assert (
        seen["published"] > rounds // 3
        and seen["merged"] >= (1 if short else 5)
        and seen["swept"] >= (1 if short else 20)
    )
    assert short or (seen["merge in trouble"] and seen["build in trouble"])
    assert seen["lookups"] >= 50 and seen["standing"] >= 20
    return beside


def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    run(tmp_path / "root", f"sqlite://{tmp_path}/store.db", 1, rounds=12, builds=2)


# three moves of the clock are less than it, four are more
STAGING: dict[str, Any] = {"compaction": "spark", "compact_timeout_s": 100 * 3600}


def check_jobs(beside: Beside) -> None:
    """Only jobs compact here, so an adopted file is the work of one. A job that another job overtook counts nothing
    as its own, so `compacted` proves nothing.
    """
    assert beside.seen["staged"] and beside.seen["adopted"]


def test_nothing_is_lost_or_doubled_where_jobs_compact(tmp_path: Path) -> None:
    check_jobs(run(tmp_path / "root", f"sqlite://{tmp_path}/store.db", 11, rounds=12, builds=2, **STAGING))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [("file", 12), ("memory", 13), ("sqlite", 14)])
def test_nothing_is_lost_or_doubled_where_jobs_compact_for_long(tmp_path: Path, kind: str, seed: int) -> None:
    uris = {
        "file": f"file://{tmp_path}/store",
        "memory": f"memory://beside-{seed}",
        "sqlite": f"sqlite://{tmp_path}/store.db",
    }
    beside = run(tmp_path / "root", uris[kind], seed, rounds=50, builds=8, **STAGING)
    check_jobs(beside)
    assert beside.seen["compaction in trouble"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [("sqlite", 1), ("file", 2), ("memory", 3), ("memory", 4)])
def test_nothing_is_lost_or_doubled_for_long(tmp_path: Path, kind: str, seed: int) -> None:
    uris = {
        "file": f"file://{tmp_path}/store",
        "memory": f"memory://beside-{seed}",
        "sqlite": f"sqlite://{tmp_path}/store.db",
    }
    run(tmp_path / "root", uris[kind], seed, rounds=120, builds=24)


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_on_s3(tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts have the 5 MiB at least that S3 wants, so all objects are put whole."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{s3.new_bucket()}/index?endpoint_url={s3.endpoint_url}"
    beside: Any = run(tmp_path / "root", uri, 6, rounds=30, builds=8)
    assert beside.seen["swept uploads"] == 0
