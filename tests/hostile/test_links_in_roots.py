"""Links in a root, and documents that name other places: a writer makes, changes and deletes nothing outside its
root.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tiered_index import IndexService
from tiered_index.errors import TieredIndexError

NOW_MS = 1_700_000_000_000
PRECIOUS = b"precious " * 1000


def opened(folder: Path, **settings: object) -> IndexService:
    chosen = {"storage": f"file://{folder}/storage", "slots": 7, "items": 20, "background": False, **settings}
    return IndexService.open(root=folder / "root", **chosen)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed root with a file in each state."""
    with opened(tmp_path) as index:
        for number in range(3):
            index.put("t", 0, ["k"], number, 10, NOW_MS + number)
            if number < 2:
                index.seal()
                index.run_lifecycle()
        index.flush()
    return tmp_path


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in (".tmp-1", "000001700000000-0123456789ab.index", "lock"):
        (outside / name).write_bytes(PRECIOUS)
    return outside


def folder_as_link(name: str) -> Callable[[Path, Path], None]:
    def spoil(root: Path, outside: Path) -> None:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).symlink_to(outside)

    return spoil


def file_as_link(pattern: str) -> Callable[[Path, Path], None]:
    """Move the file elsewhere, append bytes to it, and put a link in its place."""

    def spoil(root: Path, outside: Path) -> None:
        path = sorted(root.glob(pattern))[-1]
        (outside / path.name).write_bytes(path.read_bytes() + PRECIOUS)
        path.unlink()
        path.symlink_to(outside / path.name)

    return spoil


_SPOILED = {
    "lock": file_as_link("lock"),
    "journal": file_as_link("unsealed/*.journal"),
    "entries": file_as_link("unsealed/*.index"),
    **{name: folder_as_link(name) for name in ("unsealed", "compacted", "uploaded", "followers")},
}


@pytest.mark.parametrize("kind", _SPOILED)
def test_a_writer_that_opens_touches_nothing_outside(folder: Path, outside: Path, kind: str) -> None:
    _SPOILED[kind](folder / "root", outside)
    before = content(outside)
    try:
        with opened(folder) as index:
            index.put("t", 0, ["k"], 9, 10, NOW_MS)
            index.seal()
            index.run_lifecycle()
    except TieredIndexError as error:
        assert "link" in str(error)  # "a symbolic link", "Too many levels of symbolic links"
    else:
        assert kind == "entries"  # the writer does not use a link as a file
    assert content(outside) == before


@pytest.mark.parametrize("name", ["unsealed", "compacted", "uploaded"])
def test_a_folder_that_becomes_a_link_is_noticed(folder: Path, outside: Path, name: str) -> None:
    index = opened(folder)
    index.run_lifecycle()
    (folder / "root" / name).rename(folder / "away")
    (folder / "root" / name).symlink_to(outside)
    before = content(outside)
    with pytest.raises(TieredIndexError, match="symbolic link"):
        index.run_lifecycle()
    assert any("symbolic link" in problem for problem in index.health()["problems"])
    assert len(index.query("t", "k")) == 3
    assert content(outside) == before
    (folder / "root" / name).unlink()
    (folder / "away").rename(folder / "root" / name)
    index.run_lifecycle()
    assert index.health()["problems"] == []
    index.close()


def test_a_marker_that_names_another_place_makes_nothing_there(folder: Path) -> None:
    marker = folder / "root" / "tiered_index.json"
    for scheme, name in (("file", "elsewhere"), ("sqlite", "elsewhere.db")):
        document = json.loads(marker.read_text()) | {"storage": f"{scheme}://{folder}/{name}"}
        marker.write_text(json.dumps(document))
        with pytest.raises(TieredIndexError):
            opened(folder, storage=None)
        assert not (folder / name).exists()


def test_the_root_itself_may_be_a_link(folder: Path) -> None:
    (folder / "root").rename(folder / "disk")
    (folder / "root").symlink_to(folder / "disk")
    with opened(folder) as index:
        assert len(index.query("t", "k")) == 3
        index.seal()
        index.run_lifecycle()
