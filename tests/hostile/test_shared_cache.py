"""A cache folder that other users may write: their files have the right form, index and object, but the reader does not
use them.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cold_index import ColdIndex, cold_index
from tests.support.model import Answer
from tiered_index.service.read.caches.disk import CacheFolder, DiskCache

SOMEBODY = 54321


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> ColdIndex:
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=2, entries=60, slots=4)


def check(index: ColdIndex, cache: Path) -> None:
    with index.reader(cache_dir=cache, filter_after_probes=1) as reader:
        for _ in range(2):
            for key in ("all", "k0-5", "k1-7", "absent"):
                answer = reader.query("t", key)
                assert ([Answer.of(item) for item in answer], answer.status) == (index.expected("t", key), "complete")


def poison(index: ColdIndex, cache: Path) -> list[Path]:
    """Put filters that exclude every key, with right checksums, under the names of the index's own filters."""
    with index.reader() as reader:
        folder = CacheFolder(DiskCache(cache, 1 << 20), reader.genesis.index_id)
    for stored in index.stored:
        assert folder.write(stored.name, "filter", bytes(stored.filter_length))
    return sorted(cache.rglob("*.filter"))


def test_a_private_cache_is_trusted(index: ColdIndex, tmp_path: Path) -> None:
    """So no other user may write it. This also proves that the planted filters would change answers."""
    poison(index, tmp_path)
    with index.reader(cache_dir=tmp_path, filter_after_probes=1) as reader:
        assert [len(reader.query("t", "k0-5")) for _ in range(2)][-1] == 0


def _of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only the superuser can give a file away")
    os.chown(path, SOMEBODY, -1)


def _a_link(path: Path) -> None:
    path.rename(path.with_name("linked"))
    path.symlink_to(path.with_name("linked"))


def _a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


_WAYS: dict[str, Callable[[Path], object]] = {
    "for others to write": lambda path: path.chmod(0o666),
    "for a group to write": lambda path: path.chmod(0o660),
    "of another user": _of_another_user,
    "a link": _a_link,
    "a pipe": _a_pipe,
}


@pytest.mark.parametrize("way", _WAYS.values(), ids=_WAYS)
def test_a_cache_that_others_may_write_is_not_trusted(
    index: ColdIndex, tmp_path: Path, way: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    for path in poison(index, tmp_path):
        way(path)
    with caplog.at_level(logging.WARNING):
        check(index, tmp_path)
    assert "ignoring the cache entry" in caplog.text
    # right filters have replaced them
    filters = sorted(tmp_path.rglob("*.filter"))
    assert len(filters) == 2
    assert all(path.is_file() and not path.is_symlink() and path.stat().st_uid == os.geteuid() for path in filters)
    assert not any(path.stat().st_mode & 0o022 for path in filters)


def test_nothing_is_written_into_anothers_folder(index: ColdIndex, tmp_path: Path) -> None:
    (entry, _) = poison(index, tmp_path / "cache")
    mine, elsewhere = entry.parent, tmp_path / "elsewhere"
    for path in mine.iterdir():
        path.unlink()
    mine.rename(elsewhere)
    mine.symlink_to(elsewhere)
    check(index, tmp_path / "cache")
    assert list(elsewhere.iterdir()) == []
    mine.unlink()
    mine.mkdir()
    mine.chmod(0o777)
    check(index, tmp_path / "cache")
    assert list(mine.iterdir()) == []


def test_making_room_deletes_only_entries(index: ColdIndex, tmp_path: Path) -> None:
    """If the user chose a wrong folder, its other files stay."""
    others = [tmp_path / "mail" / name for name in ("junk.filter", "big.trailer", "data.filter")]
    (tmp_path / "mail").mkdir()
    for path in others:
        path.write_bytes(bytes(5000))
        os.utime(path, (0, 0))
    folder = CacheFolder(DiskCache(tmp_path, 3000), "index")
    for number in range(9):
        folder.write(f"data/{number}/0.index", "filter", bytes(1000))
    assert all(path.exists() for path in others)
    assert len(list(tmp_path.rglob("data,*"))) < 4
