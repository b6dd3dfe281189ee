"""No command ever writes into a broker's folders: such a root or storage is refused before it is made."""

from pathlib import Path

import pytest

from tests.support.store_writer import StoreWriter
from tiered_index.rocketmq.classic import Geometry


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with StoreWriter(tmp_path / "broker" / "store", segment_bytes=4096, index=Geometry(20, 100)) as writer:
        writer.put("orders", 0, keys="k", uniq_key="U")
    return tmp_path / "broker" / "store"


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


PLACES = {
    "the store itself": ("broker/store", "file://{}/objects"),
    "root within the store": ("broker/store/deep/root", "file://{}/objects"),
    "root above the store": ("broker", "file://{}/objects"),
    "root by a link": ("link/root", "file://{}/objects"),
    "storage within the store": ("root", "file://{}/broker/store/objects"),
    "storage within, written in another way": ("root", "FILE://localhost{}/broker/../broker/st%6Fre"),
    "database within the store": ("root", "sqlite://{}/broker/store/index.db"),
}


@pytest.mark.parametrize(("root", "storage"), PLACES.values(), ids=PLACES.keys())
def test_a_place_within_the_store_is_refused(in_process, tmp_path: Path, store: Path, root: str, storage: str) -> None:
    (tmp_path / "link").symlink_to(store)
    before = contents(tmp_path)
    where = ("--root", str(tmp_path / root), "--storage", storage.format(tmp_path))
    assert in_process("ingest", str(store), *where) == 2
    assert contents(tmp_path) == before


def test_places_beside_the_store_are_taken(in_process, tmp_path: Path, store: Path) -> None:
    before = contents(store)
    where = ("--root", tmp_path / "broker" / "store-index", "--storage", f"file://{tmp_path}/broker/objects")
    assert in_process("ingest", store, *where, "--quiet", "--set", "slots=50", "--set", "items=2000") == 0
    assert contents(store) == before
