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
    """Run until every kind of work has been done so often that the checks of the readers say something; the bound of
    the crew's patience makes a run that never gets there fail.
    """
    goals = {"published": rounds // 3, "merged": 1, "swept": 1, "lookups": 50, "standing": 20}
    if builds >= 8:
        goals |= {"merged": 5, "swept": 20, "merge in trouble": 1, "build in trouble": 1}
    if settings:
        # only jobs compact here, so an adopted file is the work of one; a job that another job overtook counts nothing
        # as its own, so `compacted` proves nothing
        goals |= {"staged": 1, "adopted": 1, "compaction in trouble": int(builds >= 8)}
    with open_storage(uri) as storage:
        beside = Beside(folder, storage, seed, goals, settings)
        try:
            beside.run(rounds=rounds, builds=builds)
            beside.check_the_end()
        finally:
            beside.service.abandon()
    seen = beside.seen
    print(f"seed {seed}: {len(beside.stored.entries)} entries, {dict(seen)}")
    assert seen["append"] >= builds and seen["replace"] == builds // 2
    assert beside.reached(), (goals, seen)
    return beside


def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    run(tmp_path / "root", f"sqlite://{tmp_path}/store.db", 1, rounds=12, builds=2)


# three moves of the clock are less than it, four are more
STAGING: dict[str, Any] = {"compaction": "spark", "compact_timeout_s": 100 * 3600}


def test_nothing_is_lost_or_doubled_where_jobs_compact(tmp_path: Path) -> None:
    run(tmp_path / "root", f"sqlite://{tmp_path}/store.db", 11, rounds=12, builds=2, **STAGING)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [("file", 12), ("memory", 13), ("sqlite", 14)])
def test_nothing_is_lost_or_doubled_where_jobs_compact_for_long(tmp_path: Path, kind: str, seed: int) -> None:
    uris = {
        "file": f"file://{tmp_path}/store",
        "memory": f"memory://beside-{seed}",
        "sqlite": f"sqlite://{tmp_path}/store.db",
    }
    run(tmp_path / "root", uris[kind], seed, rounds=50, builds=8, **STAGING)


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
