"""Another index's storage replaces that of a running index: neither storage gets data of the other index."""

from pathlib import Path

import pytest

from tiered_index import IndexReader, IndexService
from tiered_index.errors import StorageBehind, StorageUnavailable

NOW_MS = 1_700_000_000_000


class Place:
    """Indexes in neighbouring folders, each with a storage of `kind` that can be moved."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind

    def uri(self, name: str) -> str:
        return f"{self.kind}://{self.folder}/{name}"

    def open(self, name: str) -> IndexService:
        settings = {"slots": 7, "items": 20, "background": False}
        return IndexService.open(root=self.folder / f"root-{name}", storage=self.uri(name), **settings)

    def move(self, name: str, to: str) -> None:
        for end in ("", "-wal", "-shm"):
            path = self.folder / (name + end)
            if path.exists():
                path.rename(self.folder / (to + end))


def publish(index: IndexService, key: str, files: int) -> None:
    for number in range(files):
        index.put("t", 0, [key], number, 10, NOW_MS + number * 1000)
        index.seal()
        index.run_lifecycle()


@pytest.mark.parametrize("more", [-1, 0, 2], ids=lambda more: f"{more:+}")
@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_another_indexs_storage_gets_nothing(tmp_path: Path, kind: str, more: int) -> None:
    """The other log has fewer, as many, or more records than ours."""
    place = Place(tmp_path, kind)
    ours = place.open("ours")
    publish(ours, "ours", 2)
    with place.open("other") as other:
        publish(other, "other", 2 + more)
    place.move("ours", "away")
    place.move("other", "ours")
    number = ours.log_state.number
    ours.put("t", 0, ["ours"], 100, 10, NOW_MS + 100_000)
    for _ in range(2):
        ours.seal()
        with pytest.raises((StorageBehind, StorageUnavailable), match=r"restored|is this another storage"):
            ours.run_lifecycle()
    assert ours.health()["problems"]
    assert len(ours.query("t", "ours")) == 3
    assert len(ours.query("t", "other")) == 0
    assert ours.log_state.number == number
    with IndexReader.open(place.uri("ours")) as other_reader:
        assert len(other_reader.query("t", "other")) == 2 + more
        assert len(other_reader.query("t", "ours")) == 0
        assert other_reader.log_state.number == number + more
    place.move("ours", "other")
    place.move("away", "ours")
    ours.run_lifecycle()
    assert ours.health()["problems"] == []
    assert len(ours.query("t", "ours")) == 3
    ours.close()
    with IndexReader.open(place.uri("ours")) as ours_reader:
        assert len(ours_reader.query("t", "ours")) == 3


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_a_deleted_storage_is_not_created_again(tmp_path: Path, kind: str) -> None:
    place = Place(tmp_path, kind)
    ours = place.open("ours")
    publish(ours, "ours", 1)
    place.move("ours", "away")
    ours.put("t", 0, ["ours"], 100, 10, NOW_MS + 100_000)
    ours.seal()
    with pytest.raises(StorageUnavailable, match="is this another storage"):
        ours.run_lifecycle()
    assert not list(Path(tmp_path / "ours").rglob("*.index"))
    assert len(ours.query("t", "ours")) == 2
    ours.abandon()
