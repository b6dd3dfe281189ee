"""Folders that are no roots are refused, and nothing in them is changed."""

from __future__ import annotations

import json

import pytest

from tiered_index import IndexReader
from tiered_index.errors import NotAnIndex


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"null", b'{"tiered_index": 2}', b'{"tiered_index": 1}', b"\xff\xfe", b"{" * 3000]
)
def test_an_invalid_marker_is_refused_and_nothing_is_touched(make_world, content):
    world = make_world()
    world.root.mkdir()
    (world.root / "tiered_index.json").write_bytes(content)
    with pytest.raises(NotAnIndex):
        world.open()
    assert [path.name for path in world.root.iterdir()] == ["tiered_index.json"]
    with pytest.raises(NotAnIndex):
        IndexReader.open(root=world.root, storage_backend=world.storage)
    assert not list(world.storage.list())


@pytest.mark.parametrize("name", ["notes.txt", "unsealed/notes.txt", ".hidden", "store/a"])
def test_somebody_elses_folder_is_refused_and_nothing_is_touched(make_world, name):
    world = make_world()
    path = world.root / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    before = sorted(world.root.rglob("*"))
    with pytest.raises(NotAnIndex, match="nothing was changed"):
        world.open()
    assert sorted(world.root.rglob("*")) == before
    assert not list(world.storage.list())


def test_a_root_that_is_a_file_is_refused(make_world):
    world = make_world()
    world.root.write_text("mine")
    with pytest.raises(NotAnIndex):
        world.open()
    assert world.root.read_text() == "mine"


def test_a_marker_of_a_later_version_is_refused(make_world):
    world = make_world()
    world.open()
    world.service.close()
    path = world.root / "tiered_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tiered_index": 2}))
    with pytest.raises(NotAnIndex, match="version 2"):
        world.open()
