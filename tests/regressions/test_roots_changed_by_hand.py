"""A root whose lock, folders or files were deleted, replaced or linked confirms nothing that is not durable."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.cli.command_lines import run_here
from tests.support.restores import Life
from tiered_index import IndexReader
from tiered_index.errors import LockHeld, StorageMisconfigured, StorageUnavailable


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


def test_a_lock_file_that_was_deleted_lets_no_second_writer_in(life: Life) -> None:
    with life.open() as index:
        (life.root / "lock").unlink()
        with pytest.raises(LockHeld):
            life.open()
        life.ingest(index, 3, upload=True)
    assert len(life.reopened()) == 3


@pytest.mark.parametrize("known", ["by an option", "by the environment"])
def test_jobs_refuse_a_storage_and_a_root_of_two_indexes(life: Life, tmp_path: Path, known: str) -> None:
    """Otherwise they would change an index that the operator does not mean, and leave the root's index unchanged."""
    life.write(10, upload=True)
    lost = life.folder / "root" / "unsealed"
    with life.open() as index:
        life.ingest(index, 5, upload=False)
    (file,) = lost.glob("*.journal")
    for path in lost.iterdir():
        path.unlink()
    other = Life(tmp_path / "other")
    other.write(20, upload=True)
    uri = f"file://{other.folder}/storage"
    where = ["--root", str(life.root), *(["--storage", uri] if known == "by an option" else [])]
    environment = {"TIERED_INDEX_STORAGE": uri} if known == "by the environment" else {}
    names = sorted((other.folder / "storage").rglob("*"))
    jobs = ("orphans --yes", "expire --set retention.age_s=10000d --yes", "merge", "erase --topic t --key k --yes")
    for job in (*jobs, f"recover --lost {file.stem}", f"copy --to file://{tmp_path}/copy"):
        refused = run_here(*job.split(), *where, "--json", environment=environment)
        assert (job, refused.code, refused.error["type"]) == (job, 2, "NotAnIndex")
    assert sorted((other.folder / "storage").rglob("*")) == names


def test_a_flush_into_a_folder_that_was_replaced_confirms_nothing_there(life: Life) -> None:
    index = life.open()
    life.ingest(index, 15, upload=False)
    shutil.move(life.root / "unsealed", life.folder / "moved")
    shutil.copytree(life.folder / "moved", life.root / "unsealed")
    with pytest.raises(StorageUnavailable, match="another file replaced it"):
        life.ingest(index, 5, upload=False)
    index.flush()  # into a file of the folder that is there now
    index.abandon()
    with IndexReader.open(root=life.root) as reader:
        assert len(life.found(reader)) == 20


@pytest.mark.parametrize("gone", ["root", "unsealed"])
def test_a_flush_into_a_root_that_was_deleted_confirms_nothing(life: Life, gone: str) -> None:
    index = life.open()
    life.ingest(index, 3, upload=False)
    shutil.rmtree(life.root if gone == "root" else life.root / "unsealed")
    with pytest.raises(StorageUnavailable):
        life.ingest(index, 3, upload=False)
    index.abandon()


@pytest.mark.parametrize("name", ["unsealed", "compacted", "uploaded", "*.journal"])
def test_a_link_in_the_place_of_a_folder_or_a_file_is_refused_by_readers_too(life: Life, name: str) -> None:
    life.write(3, upload=False)
    (path,) = life.root.rglob(name)
    path.rename(life.folder / "elsewhere")
    path.symlink_to(life.folder / "elsewhere")
    with pytest.raises(StorageMisconfigured, match="symbolic link"), IndexReader.open(root=life.root) as reader:
        life.found(reader)
    with pytest.raises(StorageMisconfigured, match="symbolic link"):
        life.open()
