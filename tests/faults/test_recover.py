"""`recover` sends what the storage lacks, also if it was interrupted, and keeps what it can not send."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.cli.command_lines import run_here
from tests.support.restores import NOW_MS, Life, entries, the_storage
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexConfig, IndexReader, IndexService, Retention, erase, expire
from tiered_index.errors import InvalidArgument, RootBehind, TieredIndexError
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service import anew
from tiered_index.service.anew import begin_anew
from tiered_index.service.root import Root
from tiered_index.storage.local import LocalStorage


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


@pytest.mark.parametrize("broken_off", ["put_source_batch", "before the marker"])
def test_recover_continues_after_an_interrupt(life: Life, monkeypatch: pytest.MonkeyPatch, broken_off: str) -> None:
    the_storage(life)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        if broken_off == "put_source_batch":
            broken.setattr(IndexService, "put_source_batch", lambda *_: 1 / 0)
        else:
            broken.setattr(Root, "write_file", lambda *_: 1 / 0)
        life.begin_anew()
    with pytest.raises(RootBehind, match="interrupted"):
        life.open()
    with pytest.raises(TieredIndexError, match="set aside"), IndexReader.open(root=life.root) as reader:
        life.offsets_found(reader)
    done = life.begin_anew()
    assert (done.sent, done.entries, done.stored, done.kept) == (2, 50, 1, {})
    life.publish_all()
    assert life.offsets_found() == entries((1, 80))


def test_recover_compares_the_log_although_the_index_starts_without_its_storage(life: Life) -> None:
    life.write(30, upload=True)
    life.keep("storage")
    life.write(40, upload=True)
    life.write(10, upload=False)
    life.restore("storage")
    faulty = FaultStorage(LocalStorage(life.folder / "storage"))
    faulty.fail("list", name_prefix="checkpoint/")
    config = IndexConfig(root=life.root, slots=7, items=1000, background=False, query_threads=2)
    done = begin_anew(config, clock=life.clock, storage=faulty)
    assert (done.sent, done.entries, done.stored, done.kept) == (2, 50, 1, {})
    life.publish_all()
    assert life.offsets_found() == set(range(1, 81))


def test_recover_repeats_the_erasures_that_a_restored_storage_lacks(life: Life) -> None:
    """Otherwise it would bring erased entries back, also those that only the root has."""
    for _ in range(2):
        life.write(1, upload=True)
    life.keep("storage")
    with life.open(refresh_interval_s=0) as index:
        for key in ("k", "other"):
            index.put("t", 0, key, 100, 1, NOW_MS)
        index.seal()
        index.run_lifecycle()
        uri, later_ms = f"file://{life.folder}/storage", NOW_MS + 10**6
        assert erase(uri, "t", keys="k", before_ms=later_ms, yes=True, clock=life.clock).status == "hidden"
        for _ in range(2):
            index.run_lifecycle()
        assert life.offsets_found(index) == set()
    life.restore("storage")
    assert len(life.offsets_found()) == 2
    assert life.begin_anew().entries == 2
    life.publish_all()
    assert life.offsets_found() == life.reopened() == set()
    with IndexReader.open(uri) as reader:
        assert [item.offset for item in reader.query("t", "other")] == [100]


def test_recover_keeps_the_documents_of_topics_that_a_restored_storage_lacks(life: Life) -> None:
    life.write(1, upload=True)
    life.keep("storage")
    older, newer = (TopicDocument.of("kafka", 1, {"keys": keys}) for keys in (["a"], ["a", "b"]))
    for document, upload in ((older, True), (newer, False)):
        with life.open() as index:
            index.describe_topics(["t"], document)
            life.ingest(index, 1, upload=upload)
    life.restore("storage")
    assert life.begin_anew().entries == 2
    life.publish_all()
    with IndexReader.open(life.uri) as reader:
        assert reader.topic_documents() == {"t": newer}


def test_recover_says_that_the_storage_lacks_an_expiry_that_replaced_an_erasure(life: Life) -> None:
    life.write(3, upload=True)
    life.keep("storage")
    uri = f"file://{life.folder}/storage"
    erase(uri, "t", keys="k", before_ms=NOW_MS + 10_000, yes=True, clock=life.clock)
    life.clock.advance(10 * 86400)
    assert expire(uri, Retention(age_s=86400), yes=True, clock=life.clock).expired.tombstones == ()
    life.write(1, upload=True)
    life.restore("storage")
    outcome = run_here("recover", "--root", life.root)
    assert outcome.code == 0 and "the storage lacks an expiry that the root knows" in outcome.out
    assert life.offsets_found() == {1, 2, 3}


def test_recover_says_that_it_can_not_repeat_erasures(life: Life) -> None:
    life.write(3, upload=True)
    life.keep("storage")
    life.write(1, upload=True)
    life.restore("storage")
    (life.root / "log").write_bytes(b"damaged")
    begun = life.begin_anew()
    assert list(begun.kept) == ["log"] and begun.left is not None
    assert (begun.left / "log").read_bytes() == b"damaged"


def test_files_that_recover_has_sent_are_deleted_also_after_a_crash(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    life.write(10, upload=False)
    life.keep("root")
    life.write(10, upload=True)
    life.restore("root")
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(anew, "shutil", SimpleNamespace(rmtree=lambda *_, **__: 1 / 0))
        life.begin_anew()
    assert life.reopened() == set(range(1, 21))
    assert not [path for path in life.root.iterdir() if path.name.startswith(("aside", "sent"))]


def test_recover_keeps_unreadable_files(life: Life) -> None:
    life.write(10, upload=False)
    life.keep("root")
    life.write(10, upload=True)
    life.restore("root")
    (path,) = (life.root / "unsealed").glob("*.index")
    data = bytearray(path.read_bytes())
    data[200:300] = bytes(100)
    path.write_bytes(data)
    done = life.begin_anew()
    assert list(done.kept) == [path.stem]
    assert done.left is not None
    assert (done.left / "unsealed" / path.name).read_bytes() == data
    assert life.reopened() == set(range(1, 21))


def test_recover_keeps_a_file_that_the_index_refuses(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.write(10, upload=True)
    life.keep("storage")
    with life.open() as index:
        life.ingest(index, 5, upload=True)
        life.ingest(index, 5, upload=False)
    life.restore("storage")
    put_source_batch = IndexService.put_source_batch

    def refuse_first(index: IndexService, columns: Any) -> int:
        if 11 in columns["offset"].to_pylist():
            raise InvalidArgument("a row is not valid")
        return put_source_batch(index, columns)

    monkeypatch.setattr(IndexService, "put_source_batch", refuse_first)
    done = life.begin_anew()
    assert (done.sent, done.entries, list(done.kept.values())) == (1, 5, ["a row is not valid"])
    assert done.left is not None
    assert life.reopened() == {*range(1, 11), *range(16, 21)}
