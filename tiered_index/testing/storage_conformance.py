"""The storage contract as a pytest suite: subclass it with a `storage` fixture to test every line of the contract.

    class TestMyStorage(StorageConformance):
        @pytest.fixture
        def storage(self):
            with MyStorage(...) as storage:
                yield storage

The fixture's storage must be empty. Override `another` if a second instance can open the same place, as another process
would. Objects are smaller than 20 MiB. Threads: races use `racers` threads, parallel reads `readers`.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tiered_index.errors import InvalidArgument, ObjectExists, ObjectNotFound, StorageError, StorageUnavailable
from tiered_index.storage.base import PART_BYTES, Storage
from tiered_index.storage.probe import probe

_LONG = "/".join(["x" * 200, "x" * 200, "x" * 110])
_BAD_NAMES = (
    *("", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a/.", "a b", "é", "a\n", "a\0b", "a\\b", "a%b", "a~"),
    *(_LONG + "x", "x" * 201, "a/" + "x" * 201),
)
_ODD_NAMES = (
    *("a", "a/b", "a/b/c", "a-b", "a.b", "a+b", "a=b", "a@b", "a0", "a_b", "A", "Ab", "aa", "a/b-c"),
    *("a/b.c/d", "a-b/c", "...", "..a", ".hidden", ".tmp-looks-temporary", ".tmp-x/y", "@", "=+", "-", "_"),
    *("0", "00", "10", "9", "z"),
    *(_LONG, "y" * 199 + "-", "y" * 200, "y" * 200 + "/z", "y" * 199 + "z"),
)
_PREFIXES = ("a", "a/", "a/b", ".", ".tmp-", "y", "y" * 200, "y" * 200 + "/", "y" * 201, "absent", "A")
_STARTS = ("", "a", "a/b", "a/", "a-b", "a.", "y", "y" * 199, "y" * 200 + "/z", "zz", "-")


class StorageConformance:
    """The tests that every `Storage` must pass."""

    racers = 8
    readers = 16
    # More objects than one page of a listing has.
    many = 1_100
    # Shorter only for a storage that prepends a prefix to names.
    longest_name = 512
    # Whether the storage gives etags; None: it may.
    has_etags: bool | None = None

    @pytest.fixture
    def storage(self) -> Iterable[Storage]:
        """Yield an empty storage; a subclass must override it."""
        raise NotImplementedError("a conformance suite needs a `storage` fixture")

    @pytest.fixture
    def another(self, storage: Storage) -> Storage:
        """Return another instance of the same storage, as another process would open it."""
        return storage

    # Whole objects.

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_put_stores_a_copy_of_the_bytes(self, storage: Storage, another: Storage, kind: type) -> None:
        source = bytearray(random.Random(1).randbytes(70_000))
        expected = bytes(source)
        storage.put("folder/object", kind(source))
        source[:10] = b"overwritten"[:10]
        assert another.get("folder/object") == expected
        assert type(another.get("folder/object")) is bytes

    def test_put_replaces(self, storage: Storage) -> None:
        for data in (b"a longer first version", b"", b"short"):
            storage.put("object", data)
            info = storage.head("object")
            assert (info.name, info.size_bytes, storage.get("object")) == ("object", len(data), data)
            assert info.modified_ms > 1_000_000_000_000
            assert list(storage.list()) == [info]

    def test_an_etag_tells_an_object_from_its_predecessors(self, storage: Storage, another: Storage) -> None:
        etags = []
        for data in (b"first", b"other", b"", b"longer than before"):
            storage.put("a/object", data)
            info = storage.head("a/object")
            assert [another.head("a/object"), *another.list(), *storage.list("a/")] == [info] * 3
            etags.append(info.etag)
        storage.put("another", b"x")
        storage.get("a/object")
        assert storage.head("a/object").etag == etags[-1]
        has_etags = None not in etags
        assert len(set(etags)) == (len(etags) if has_etags else 1)
        assert self.has_etags in (has_etags, None)

    def test_reading_a_missing_object_raises_object_not_found(self, storage: Storage) -> None:
        storage.put("there/object", b"x")
        reads: tuple[Callable[[str], object], ...] = (
            storage.get,
            storage.head,
            lambda name: storage.get_range(name, 0, 1),
            lambda name: storage.get_suffix(name, 1),
            lambda name: storage.get_suffix(name, 0),
        )
        for name in ("missing", "there", "there/object/below", "there/other"):
            for read in reads:
                with pytest.raises(ObjectNotFound) as caught:
                    read(name)
                assert caught.value.name == name

    def test_deletes_remove_only_what_they_name(self, storage: Storage) -> None:
        for name in ("a/b/c", "a", "kept", "a/b", "c", "d/e"):
            storage.put(name, name.encode())
        for _ in range(2):
            storage.delete_many(["a/b"])
            assert [storage.get(info.name) for info in storage.list()] == [b"a", b"a/b/c", b"c", b"d/e", b"kept"]
        with pytest.raises(ObjectNotFound):
            storage.get("a/b")
        storage.delete_many(name for name in ("a", "missing", "d/e", "c"))
        storage.delete_many([])
        assert [storage.get(info.name) for info in storage.list()] == [b"a/b/c", b"kept"]

    @pytest.mark.parametrize("name", _BAD_NAMES, ids=lambda name: repr(name[:12]))
    def test_every_call_refuses_bad_names(self, storage: Storage, name: str) -> None:
        calls: tuple[Callable[[], object], ...] = (
            lambda: storage.get(name),
            lambda: storage.get_range(name, 0, 1),
            lambda: storage.get_range(name, 0, 0),
            lambda: storage.get_suffix(name, 1),
            lambda: storage.put(name, b"x"),
            lambda: storage.put_if_absent(name, b"x"),
            lambda: storage.head(name),
            lambda: storage.delete_many([name]),
            lambda: storage.open_writer(name),
        )
        for call in calls:
            with pytest.raises(InvalidArgument):
                call()
        assert list(storage.list()) == []

    @pytest.mark.parametrize("prefix", ["../a", "a/..", "a b", "é", _LONG + "x"], ids=lambda prefix: repr(prefix[:12]))
    def test_bad_prefixes_are_refused(self, storage: Storage, prefix: str) -> None:
        with pytest.raises(InvalidArgument):
            list(storage.list(prefix))

    # Ranges.

    def test_ranges_at_the_bounds_of_an_object(self, storage: Storage) -> None:
        data = bytes(range(250)) * 4
        storage.put("object", data)
        for start, length in ((0, 1), (0, 1000), (999, 1), (500, 500), (1, 998), (0, 0), (1000, 0), (7, 0)):
            answer = storage.get_range("object", start, length)
            assert answer == data[start : start + length]
            assert type(answer) is bytes
        for start, length in ((0, 1001), (999, 2), (1000, 1), (5000, 1), (-1, 1), (0, -1), (-1, 0), (5, -5)):
            with pytest.raises(InvalidArgument):
                storage.get_range("object", start, length)

    def test_an_object_is_opened_now_or_not(self, storage: Storage) -> None:
        data = bytes(range(250)) * 4
        storage.put("object", data)
        if (opened := storage.open_now("object", 1000)) is not None:
            assert os.pread(opened.descriptor, 1001, 0) == data
            opened.close(1, 1000)
        for name, size in (("object", 999), ("object", 1001), ("missing", 1000)):
            assert storage.open_now(name, size) is None

    def test_settling_changes_no_object(self, storage: Storage, another: Storage) -> None:
        storage.put("log/1", b"data")
        before = [*storage.list()]
        another.settle("log/1")
        # also not its time
        assert [*storage.list()] == before and storage.get("log/1") == b"data"

    def test_no_object_is_older_than_a_time_before_it(self, storage: Storage, another: Storage) -> None:
        storage.put("first", b"x")
        before_ms = another.now_ms()
        storage.put("object", b"x")
        assert storage.head("object").modified_ms >= before_ms
        assert [info.name for info in storage.list()] == ["first", "object"]

    def test_parallel_reads_of_one_object(self, storage: Storage, another: Storage) -> None:
        data = random.Random(6).randbytes(300_000)
        storage.put("object", data)
        barrier = threading.Barrier(self.readers)

        def read(reader: int) -> int:
            rng = random.Random(reader)
            barrier.wait(30)
            wrong = 0
            for _ in range(20):
                start, length = rng.randrange(len(data) - 20_000), rng.randint(1, 20_000)
                part = (storage, another)[reader % 2].get_range("object", start, length)
                wrong += part != data[start : start + length]
            return wrong

        with ThreadPoolExecutor(self.readers) as pool:
            assert sum(pool.map(read, range(self.readers))) == 0

    @pytest.mark.parametrize("size", [0, 1000])
    def test_suffix(self, storage: Storage, size: int) -> None:
        data = random.Random(3).randbytes(size)
        storage.put("object", data)
        for length in (1, 10, 999, 1000, 1001, 65_536):
            assert storage.get_suffix("object", length) == (data[-length:], size)
        assert storage.get_suffix("object", 0) == (b"", size)
        with pytest.raises(InvalidArgument):
            storage.get_suffix("object", -1)

    def test_an_empty_object_exists(self, storage: Storage) -> None:
        storage.put("empty", b"")
        assert storage.get_range("empty", 0, 0) == b""
        with pytest.raises(InvalidArgument):
            storage.get_range("empty", 0, 1)
        with pytest.raises(ObjectExists):
            storage.put_if_absent("empty", b"x")

    def test_the_probe_finds_every_ability(self, storage: Storage) -> None:
        assert {finding.what: finding.result for finding in probe(storage) if finding.state == "missing"} == {}
        assert list(storage.list()) == []

    # Put-if-absent and races.

    def test_put_if_absent_keeps_an_existing_object(self, storage: Storage, another: Storage) -> None:
        storage.put_if_absent("log/1", b"first")
        for other in (storage, another):
            with pytest.raises(ObjectExists) as caught:
                other.put_if_absent("log/1", b"second")
            assert caught.value.name == "log/1"
        assert storage.get("log/1") == b"first"
        storage.put("log/2", b"put")
        with pytest.raises(ObjectExists):
            another.put_if_absent("log/2", b"second")
        storage.delete_many(["log/1"])
        another.put_if_absent("log/1", b"third")
        assert storage.get("log/1") == b"third"

    def test_racing_put_if_absent_has_one_winner(self, storage: Storage, another: Storage) -> None:
        rounds, barrier = 8, threading.Barrier(self.racers)

        def race(racer: int) -> list[int]:
            won = []
            for n in range(rounds):
                barrier.wait(30)
                with contextlib.suppress(ObjectExists):
                    (storage, another)[racer % 2].put_if_absent(f"log/{n}", b"%d" % racer * 1000)
                    won.append(n)
            return won

        with ThreadPoolExecutor(self.racers) as pool:
            wins = list(pool.map(race, range(self.racers)))
        assert sorted(n for won in wins for n in won) == list(range(rounds))
        for racer, won in enumerate(wins):
            for n in won:
                assert storage.get(f"log/{n}") == b"%d" % racer * 1000

    def test_racing_reads_never_see_a_torn_put(self, storage: Storage, another: Storage) -> None:
        sizes = {b"a": 200_000, b"b": 50_000, b"c": 0}
        storage.put("object", b"a" * sizes[b"a"])
        stop = threading.Event()

        def write() -> None:
            rng = random.Random(4)
            for _ in range(25):
                letter = rng.choice(list(sizes))
                storage.put("object", letter * sizes[letter])
            stop.set()

        def read() -> int:
            seen = 0
            while not stop.is_set():
                parts = [(data := another.get("object"), len(data))]
                # it may take two requests, and fails if the object is replaced between them again and again
                with contextlib.suppress(StorageUnavailable):
                    parts.append(another.get_suffix("object", 10))
                for part, length in parts:
                    assert len(set(part)) <= 1
                    assert length == sizes[part[:1] or b"c"]
                seen += len(parts) - 1
            return seen

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                pool.submit(write).result()
            finally:
                stop.set()
            assert all(reader.result() > 0 for reader in readers)

    # Listings.

    def test_list_is_in_order_of_name(self, storage: Storage) -> None:
        names = [name for name in _ODD_NAMES if len(name) <= self.longest_name]
        longest = "x" * self.longest_name
        random.Random(5).shuffle(names)
        for name in names:
            storage.put(name, name.encode())
        ordered = sorted(names, key=str.encode)
        assert [(info.name, info.size_bytes) for info in storage.list()] == [(name, len(name)) for name in ordered]
        assert all(storage.get(name) == name.encode() for name in names)
        for prefix in (*_PREFIXES, longest):
            expected = [name for name in ordered if name.startswith(prefix)]
            assert [info.name for info in storage.list(prefix)] == expected, prefix
            for start_after in (*_STARTS, longest):
                after = [name for name in expected if name > start_after]
                names = [info.name for info in storage.list(prefix, start_after=start_after)]
                assert names == after, (prefix, start_after)

    def test_list_returns_the_objects_of_all_pages(self, storage: Storage) -> None:
        names = [f"log/{n:05d}" for n in range(self.many)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: storage.put(name, b"x"), names))
        storage.put("lof", b"x")
        storage.put("log0", b"x")
        assert [info.name for info in storage.list("log/")] == names
        assert [info.name for info in storage.list("log/", start_after=names[3])] == names[4:]
        assert list(storage.list("log/", start_after=names[-1])) == []
        assert next(storage.list("log/", start_after=names[-50])).name == names[-49]
        storage.delete_many(names)
        assert [info.name for info in storage.list()] == ["lof", "log0"]

    # Streams of whole objects.

    @pytest.mark.parametrize("sizes", [(), (0,), (1,), (70_000, 0, 5), (PART_BYTES,), (3, PART_BYTES, PART_BYTES)])
    def test_a_writer_shows_nothing_before_its_close(
        self, storage: Storage, another: Storage, sizes: tuple[int, ...]
    ) -> None:
        storage.put("big/object", b"old")
        pieces = [
            random.Random(n).randbytes(min(size, 1 << 16)) * -(-size // (1 << 16)) for n, size in enumerate(sizes)
        ]
        source = bytearray()
        with storage.open_writer("big/object") as writer:
            for piece in pieces:
                source[:] = piece
                writer.write(memoryview(source))
                source[:] = bytes(len(source))  # the writer holds no buffer of the caller
            assert another.get("big/object") == b"old"
            assert [info.name for info in storage.list()] == ["big/object"]
        expected = b"".join(pieces)
        assert (writer.size_bytes, another.head("big/object").size_bytes) == (len(expected), len(expected))
        assert another.get("big/object") == expected
        assert another.get_suffix("big/object", 10) == (expected[-10:], len(expected))
        writer.close()
        writer.abort()
        assert storage.get("big/object") == expected
        with pytest.raises(InvalidArgument):
            writer.write(b"late")

    @pytest.mark.parametrize("size", [0, 5, PART_BYTES + 5])
    @pytest.mark.parametrize("end", ["abort", "garbage", "error"])
    def test_a_writer_that_is_not_closed_leaves_nothing(
        self, storage: Storage, another: Storage, end: str, size: int
    ) -> None:
        storage.put("object", b"old")
        writer = storage.open_writer("object")
        writer.write(bytes(size))
        if end == "abort":
            writer.abort()
            writer.abort()
            with pytest.raises(InvalidArgument):
                writer.close()
            with pytest.raises(InvalidArgument):
                writer.write(b"late")
        elif end == "error":
            with pytest.raises(ZeroDivisionError), writer:
                raise ZeroDivisionError
        del writer
        assert another.get("object") == b"old"
        assert [info.name for info in storage.list()] == ["object"]
        assert storage.purge(0) == another.purge(0) == ()

    def test_the_last_writer_to_close_replaces_the_object(self, storage: Storage, another: Storage) -> None:
        first, second = storage.open_writer("object"), another.open_writer("object")
        second.write(b"second")
        first.write(b"first")
        second.close()
        assert storage.get("object") == b"second"
        first.close()
        assert another.get("object") == b"first"

    def before_uploads_ms(self, storage: Storage) -> int:
        """Return a time before that of a new upload."""
        return storage.now_ms() - 3_600_000

    def test_purge_drops_only_uploads_that_are_older(self, storage: Storage, another: Storage) -> None:
        closed, dropped = storage.open_writer("kept"), storage.open_writer("dropped")
        for writer in (closed, dropped):
            writer.write(bytes(PART_BYTES + 5))
        another.purge(self.before_uploads_ms(storage))
        closed.close()
        another.purge(another.now_ms() + 3_600_000)
        # a backend that sends nothing before the close has nothing to drop
        with contextlib.suppress(StorageError):
            dropped.close()
        assert {info.size_bytes for info in storage.list()} == {PART_BYTES + 5}
        assert storage.head("kept").size_bytes == PART_BYTES + 5

    # The storage itself.

    def test_a_storage_has_a_uri_and_closes_twice(self, storage: Storage) -> None:
        assert "://" in storage.uri
        with storage as same:
            assert same is storage
        storage.close()
