"""A database's URI with one slash more than it needs, as other programs write absolute paths, could not be opened: what
follows two slashes is a host to SQLite.
"""

from __future__ import annotations

import pytest

from tiered_index import IndexReader, IndexService
from tiered_index.storage.opening import open_storage

NOW_MS = 1_700_000_000_000
PREFIXES = ["sqlite://", "sqlite:///", "sqlite:////", "sqlite://localhost", "sqlite://localhost/"]


@pytest.mark.parametrize("written", PREFIXES)
@pytest.mark.parametrize("read", PREFIXES)
def test_all_of_them_open_one_database(tmp_path, written, read):
    path = tmp_path / "x.db"
    storage = open_storage(f"{written}{path}")
    storage.put("log/1", b"one")
    storage.close()
    storage = open_storage(f"{read}{path}")
    assert storage.get("log/1") == b"one"
    assert storage.uri == open_storage(f"sqlite://{path}").uri
    storage.close()
    assert path.is_file()


def test_an_index_is_the_same_with_four_slashes(tmp_path):
    settings = {"slots": 7, "items": 20, "background": False}
    with IndexService.open(root=tmp_path / "root", storage=f"sqlite:///{tmp_path}/x.db", **settings) as service:
        service.put("t", 0, "k", 1, 1, NOW_MS)
        service.seal()
        service.run_lifecycle()
    for slashes in ("//", "///", "////"):
        with IndexReader.open(f"sqlite:{slashes}{tmp_path}/x.db") as reader:
            assert [item.offset for item in reader.query("t", "k")] == [1]
    with IndexService.open(root=tmp_path / "root", storage=f"sqlite://{tmp_path}/x.db", background=False) as service:
        assert [item.offset for item in service.query("t", "k")] == [1]
    with IndexReader.open(root=tmp_path / "root") as reader:
        assert [item.offset for item in reader.query("t", "k")] == [1]
