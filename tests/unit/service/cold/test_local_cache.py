"""The local cache of directories and filters saves requests. A wrong entry never changes an answer."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.cold_index import cold_index
from tests.support.model import Answer
from tiered_index.service.read.caches.disk import CacheFolder, DiskCache
from tiered_index.storage.opening import open_storage

ABSENT = [f"absent{n}" for n in range(6)]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cold")
    return cold_index(folder / "root", files=2, entries=60, slots=4, storage=open_storage(f"file://{folder}/objects"))


@pytest.fixture
def cache(index, tmp_path):
    """A cache that a reader has filled."""
    with index.reader(cache_dir=tmp_path / "cache", filter_after_probes=1) as reader:
        ask_all(index, reader)
    entries = sorted(path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert entries == [".filter", ".filter", ".trailer", ".trailer"]
    index.storage.reset()
    return tmp_path / "cache"


def ask_all(index, reader, keys=("all", "k0-5", "k1-7", *ABSENT)):
    for key in keys:
        answer = reader.query("t", key)
        assert ([Answer.of(item) for item in answer], answer.status) == (index.expected("t", key), "complete")


def entry(cache, index, kind, number=0):
    (path,) = cache.glob(f"*/{index.stored[number].name.replace('/', ',')}.{kind}")
    return path


def fetched(index):
    """Return the objects whose directories and filters were fetched since the last reset."""
    names = {"trailer": set(), "filter": set()}
    for read in index.storage.reads:
        stored = next(o for o in index.stored if o.name == read.name)
        if read.start == stored.directory_position:
            names["trailer"].add(read.name)
        elif read.start == stored.trailer_position:
            names["filter"].add(read.name)
    return names


_PROCESS = """
import json, sys
from tiered_index import IndexReader
uri, cache, keys = sys.argv[1], sys.argv[2], sys.argv[3:]
counts = []
for _ in range(5):
    with IndexReader.open(uri, cache_dir=cache, filter_after_probes=1) as reader:
        counts.append([len(reader.query("t", key)) for key in keys])
print(json.dumps(counts))
"""


def test_processes_share_a_cache(index, tmp_path):
    """Two processes fill the cache at the same time, and a third one deletes entries."""
    cache = tmp_path / "cache"
    program = [sys.executable, "-c", _PROCESS, index.inner.uri, str(cache), "all", *ABSENT]
    processes = [subprocess.Popen(program, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    while any(process.poll() is None for process in processes):
        for path in cache.rglob("*.trailer"):
            path.unlink(missing_ok=True)
        time.sleep(0.005)
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert json.loads(output) == [[2, 0, 0, 0, 0, 0, 0]] * 5
    with index.reader(cache_dir=cache, filter_after_probes=1) as reader:
        ask_all(index, reader)


@pytest.mark.usefixtures("large_filters")
@pytest.mark.parametrize("kind", ["trailer", "filter"])
def test_no_flipped_byte_of_an_entry_is_believed(index, cache, kind, caplog):
    path = entry(cache, index, kind)
    whole = path.read_bytes()
    other = "filter" if kind == "trailer" else "trailer"
    folder = CacheFolder(DiskCache(cache, 1 << 30, read_only=True), path.parent.name)
    name = index.stored[0].name
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x04]) + whole[at + 1 :])
        assert folder.read(name, kind, len(whole) - 4) is None
        caplog.clear()
        if at % 7:
            continue
        index.storage.reset()
        # a new reader, which has nothing in memory
        with index.reader(cache_dir=cache, filter_after_probes=1) as reader:
            ask_all(index, reader, ("k0-5", *ABSENT[:2]))
        assert [path.name in record.getMessage() for record in caplog.records] == [True]
        caplog.clear()
        assert fetched(index) == {kind: {index.stored[0].name}, other: set()}
        assert path.read_bytes() == whole  # fetched again


def _other_object(path):
    (other,) = (p for p in path.parent.glob(f"*{path.suffix}") if p != path)
    shutil.copy(other, path)


def _another_index(path):
    """Copy the same bytes from the cache of another index."""
    name, kind, length = path.stem.replace(",", "/"), path.suffix[1:], path.stat().st_size - 4
    data = CacheFolder(DiskCache(path.parent.parent, 1 << 30), path.parent.name).read(name, kind, length)
    assert data is not None
    elsewhere = path.parent.parent / "elsewhere"
    CacheFolder(DiskCache(elsewhere, 1 << 30), "another").write(name, kind, data)
    shutil.copy(elsewhere / "another" / path.name, path)


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "other kind": lambda p: shutil.copy(p.with_suffix(".filter" if p.suffix == ".trailer" else ".trailer"), p),
    "other object": _other_object,
    "another index": _another_index,
}


@pytest.mark.parametrize("kind", ["trailer", "filter"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_not_this_entry_is_fetched_again(index, cache, damage, kind):
    path = entry(cache, index, kind)
    whole = path.read_bytes()
    damage(path)
    assert path.read_bytes() != whole
    with index.reader(cache_dir=cache, filter_after_probes=1) as reader:
        ask_all(index, reader)
    assert index.stored[0].name in fetched(index)[kind]
    assert path.read_bytes() == whole


@pytest.mark.parametrize("of_index", [False, True], ids=["the cache", "the folder of the index"])
def test_a_cache_that_is_not_a_folder_changes_no_answer(index, cache, of_index):
    folder = next(cache.iterdir()) if of_index else cache
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    with index.reader(cache_dir=cache, filter_after_probes=1) as reader:
        ask_all(index, reader)
        index.storage.reset()
        for key in ABSENT:
            assert reader.query("t", key).explain.requests == 0


@pytest.fixture
def folder(tmp_path):
    return CacheFolder(DiskCache(tmp_path / "bounded", 100_000), "an-index")


def used(folder):
    return sum(path.stat().st_size for path in folder._cache.folder.rglob("*") if path.is_file())


def test_the_bound_is_kept_and_the_oldest_used_go(folder):
    data = os.urandom(8192)
    for number in range(11):
        assert folder.write(f"data/o{number}", "filter", data)
        os.utime(folder._cache.folder / "an-index" / f"data,o{number}.filter", (1000 + number, 1000 + number))
    assert folder.read("data/o1", "filter", len(data)) == data  # used just now
    assert folder.read("data/o2", "filter", len(data)) == data
    for number in range(11, 14):
        assert folder.write(f"data/o{number}", "filter", data)
        assert used(folder) <= 100_000
    left = {number for number in range(14) if folder.read(f"data/o{number}", "filter", len(data)) is not None}
    assert {1, 2, 11, 12, 13} <= left and not {0, 3} & left
    for number in range(14, 200):
        folder.write(f"data/o{number}", "trailer", data[: 1 + 37 * number % len(data)])
        assert used(folder) <= 100_000


def test_temporary_files_of_a_crash_are_swept_and_foreign_files_are_not(folder):
    folder.write("data/o", "filter", b"x")
    mine = folder._cache.folder / "an-index"
    old, young, stranger = mine / ".tmp-old", mine / ".tmp-young", mine / "notes.txt"
    for path in (old, young, stranger):
        path.write_bytes(b"left")
    os.utime(old, (1000, 1000))
    os.utime(stranger, (1000, 1000))
    CacheFolder(DiskCache(folder._cache.folder, 10), "an-index").write("data/p", "filter", b"y")
    assert not old.exists() and young.exists() and stranger.exists()


def test_an_entry_of_an_object_that_goes_while_it_is_written_is_deleted(tmp_path, monkeypatch):
    """Erased entries must disappear from the cache, too."""
    folder = CacheFolder(DiskCache(tmp_path / "cache", 1 << 30), "index")
    folder.forget_unnamed(set())
    replace, threads = Path.replace, []

    def slow(path, target):
        threads.append(threading.Thread(target=folder.forget_unnamed, args=(set(),)))
        threads[0].start()
        # without the lock it would run to its end here
        threads[0].join(0.2)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", slow)
    assert folder.write("data/a/b.index", "trailer", b"x" * 100)
    threads[0].join(60)
    assert folder.read("data/a/b.index", "trailer", 100) is None


def test_entries_of_a_process_that_has_ended_are_deleted_by_another_one(tmp_path):
    """Both use one folder. Erased entries must disappear from it, too."""
    first, second = (CacheFolder(DiskCache(tmp_path / "cache", 1 << 30), "index") for _ in range(2))
    assert second.write("data/a/b.index", "filter", b"x" * 100)
    first.forget_unnamed({"data/a/b.index"})
    assert first.read("data/a/b.index", "filter", 100) == b"x" * 100
    first.forget_unnamed(set())
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_reader_beside_its_writer_changes_nothing_in_the_writers_cache(tmp_path):
    made = cold_index(tmp_path / "root", files=2, entries=60, slots=4)
    (damaged, *_), (gone, *_) = (sorted((made.root / "cache").rglob(f"*.{kind}")) for kind in ("trailer", "filter"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    gone.unlink()
    before = {path: path.read_bytes() for path in (made.root / "cache").rglob("*") if path.is_file()}
    with made.reader(root=made.root, filter_after_probes=1) as reader:
        ask_all(made, reader)
    assert {path: path.read_bytes() for path in (made.root / "cache").rglob("*") if path.is_file()} == before
