"""`import-classic`: RocketMQ's golden index files and made ones, with the commit log whole, partly deleted, and of
another store.
"""

import json
import re
import shutil

import pytest

from tests.rocketmq import golden_store
from tests.rocketmq.followed import SEGMENT, check, scan
from tests.rocketmq.messages import NOW_MS
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader, IndexService
from tiered_index.errors import BackPressure
from tiered_index.rocketmq.classic import ENTRY_BYTES, ClassicImport, Geometry
from tiered_index.rocketmq.log.layout import TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.storage.memory import MemoryStorage

GEOMETRY = Geometry(20, 100)
SPANNING = Geometry(20, 51)
"""Files of 50 entries, so that the three entries of a message are sometimes in two files."""
SMALL = ("--set", "slots=50", "--set", "items=2000")


def made(folder, count=200, geometry=GEOMETRY, index_tags=False, **fields):
    """Write a store with classic index files of 99 entries, with two keys and a unique one per message; return its
    offsets. With `index_tags` the files have tags, too.
    """
    names = iter(f"2026112010000{n:04d}" for n in range(1_000))
    names_files = {"index_name": lambda: next(names), "index_tags": index_tags}
    with StoreWriter(folder, segment_bytes=SEGMENT, index=geometry, **names_files) as writer:
        offsets = []
        for n in range(count):
            topic, more = "orders" if n % 3 else "payments", {"uniq_key": f"U{n}", "store_ms": NOW_MS + n, **fields}
            offsets.append(writer.put(topic, n % 4, keys=f"k{n % 7} own-{n}", **more).offset)
        return offsets


@pytest.fixture
def where(tmp_path):
    return ("--root", tmp_path / "root", "--storage", f"file://{tmp_path / 'objects'}", *SMALL, "--json")


def open_index(folder):
    small = {"slots": 50, "items": 2_000, "background": False, "offset_space": "commitlog"}
    return IndexService.open(root=folder / "root", storage_backend=MemoryStorage(), **small)


def imported(index, store, put=None):
    work = ClassicImport(index, store / "index", StoreDirectory.open(store), put or index.put_batch)
    list(work.run())
    index.flush()
    return work


def test_golden_index_files_give_the_entries_of_the_log(run_here, tmp_path, where):
    store = golden_store.unpack(tmp_path / "store")
    outcome = run_here("import-classic", store / "index", *where, "--wait")
    assert outcome.code == 0, outcome.err
    document = outcome.document
    hidden = {m["offset"] for m in golden_store.expected() if golden_store.hidden(m)}
    assert (document["index_files"], document["missing_messages"], document["mismatched_entries"]) == (4, 0, 0)
    assert 0 < document["hidden_messages"] < len(hidden)
    assert set(document["files"]) == {"uploaded"}
    with IndexReader.open(root=tmp_path / "root") as reader:
        assert check(reader, scan(store)) == document["entries"]
        for line in golden_store.raw("index_queries.jsonl").splitlines():
            query = json.loads(line)
            if query["key"] and query["begin"] == 0 and query["end"] == 2**63 - 1:
                found = {item.offset for item in reader.query(query["topic"], query["key"], max_count=1_000)}
                assert set(query["phyOffsets"]) - hidden <= found
    again = run_here("import-classic", store / "index", *where).document
    assert again["resumed_from"] == document["position"]
    assert again["entries_read"] == again["hidden_messages"] == 0
    # the store itself adds nothing to existing answers
    assert run_here("ingest", store, *where).document["messages"] == 170
    with IndexReader.open(root=tmp_path / "root") as reader:
        check(reader, scan(store))


def test_missing_messages_are_counted_and_named(run_here, tmp_path, where):
    offsets = made(tmp_path / "store")
    (tmp_path / "store" / "commitlog" / f"{SEGMENT:020d}").unlink()
    lost = [offset for offset in offsets if SEGMENT <= offset < 2 * SEGMENT]
    document = run_here("import-classic", tmp_path / "store" / "index", *where).document
    assert (document["missing_messages"], document["missing_offsets"]) == (len(lost), lost[:100])
    assert document["entries"] == 3 * (200 - len(lost))
    with IndexReader.open(root=tmp_path / "root") as reader:
        check(reader, scan(tmp_path / "store"))
    lines = run_here("import-classic", tmp_path / "store" / "index", *where[:-1], "--restart").out
    assert re.search(f"missing messages +{len(lost)}\n +missing offsets +{lost[0]}, ", lines)


@pytest.mark.parametrize("they_are", ["there", "missing", "hidden"])
def test_a_message_whose_keys_are_in_two_files_is_counted_once(tmp_path, they_are):
    store = tmp_path / "store"
    offsets = made(store, 120, SPANNING, sys_flag=TRANSACTION_PREPARED if they_are == "hidden" else 0)
    assert len(list((store / "index").iterdir())) == 8
    if they_are == "missing":
        shutil.rmtree(store / "commitlog")
    with open_index(tmp_path) as index:
        work = imported(index, store)
        assert (work.read, work.entries, work.mismatched) == (360, 360 * (they_are == "there"), 0)
        assert (work.missing, work.hidden) == (120 * (they_are == "missing"), 120 * (they_are == "hidden"))
        assert work.missing_offsets == offsets[:100] * (they_are == "missing")
        again = imported(index, store)
        assert (again.read, again.entries, again.missing, again.hidden, again.files) == (0, 0, 0, 0, 8)


def test_entries_of_tags_as_rocketmq_5_4_writes_them_are_those_of_messages(tmp_path):
    store, later = tmp_path / "store", tmp_path / "later"
    # files of 50 entries, and four entries a message: the tag of message 12 is in the second file
    offsets = made(store, 100, SPANNING, index_tags=True, tags="paid")
    names = sorted(path.name for path in (store / "index").iterdir())
    (store / "index").rename(later)
    (store / "index").mkdir()
    (later / names[0]).rename(store / "index" / names[0])
    with open_index(tmp_path) as index:
        first = imported(index, store)
        assert (first.read, first.entries, first.mismatched, first.position) == (50, 50, 0, offsets[12])
        for name in names[1:]:
            (later / name).rename(store / "index" / name)
        second = imported(index, store)
        assert (second.mismatched, second.missing, second.hidden) == (0, 0, 0)
        assert second.position == offsets[-1] + 1
        found = {item.offset for item in index.query("orders", "T#paid", max_count=1_000)}
        assert found == {offset for n, offset in enumerate(offsets) if n % 3}


def test_the_tag_of_the_last_message_is_taken_when_it_comes(tmp_path):
    """A file ends between the keys of a message and its tag."""
    store, later = tmp_path / "store", tmp_path / "later"
    offsets = made(store, 20, Geometry(20, 48), index_tags=True, tags="paid")
    (store / "index").rename(later)
    (store / "index").mkdir()
    with open_index(tmp_path) as index:
        for name in sorted(path.name for path in later.iterdir()):
            (later / name).rename(store / "index" / name)
            assert imported(index, store).mismatched == 0
        found = {item.offset for item in index.query("orders", "T#paid", max_count=1_000)}
        assert found == {offset for n, offset in enumerate(offsets) if n % 3}


def test_further_keys_of_the_last_message_are_taken_when_they_come(tmp_path):
    store = tmp_path / "store"
    offsets = made(store, 100, SPANNING)
    names = sorted(path.name for path in (store / "index").iterdir())
    (tmp_path / "later").mkdir()
    for name in names[1:]:
        (store / "index" / name).rename(tmp_path / "later" / name)
    with open_index(tmp_path) as index:
        first = imported(index, store)
        assert (first.entries, first.position) == (50, offsets[16])  # 16 messages, and two keys of the next one
        (tmp_path / "later" / names[1]).rename(store / "index" / names[1])
        second = imported(index, store)
        assert (second.read, second.position) == (52, offsets[33])
        for name in names[2:]:
            (tmp_path / "later" / name).rename(store / "index" / name)
        imported(index, store)
        check(index, scan(store))


def test_entries_without_a_message_and_hidden_messages_are_counted_apart(tmp_path):
    store = tmp_path / "store"
    made(store, 20)
    (path,) = (store / "index").iterdir()
    data = bytearray(path.read_bytes())
    at = GEOMETRY.entries_at + 5 * ENTRY_BYTES
    (hashed,) = [int.from_bytes(data[at : at + 4], "big")]
    # another hash of the same slot, so that the file stays valid
    data[at : at + 4] = (hashed - GEOMETRY.slots).to_bytes(4, "big")
    path.write_bytes(data)
    with open_index(tmp_path) as index:
        work = imported(index, store)
        assert (work.read, work.entries, work.mismatched, work.missing, work.hidden) == (60, 59, 1, 0, 0)
    prepared = tmp_path / "prepared"
    made(prepared / "store", 10, sys_flag=TRANSACTION_PREPARED)
    with open_index(prepared) as index:
        work = imported(index, prepared / "store")
        assert (work.read, work.entries, work.hidden) == (30, 0, 10)
    rolled = tmp_path / "rolled"
    made(rolled / "store", 10, sys_flag=TRANSACTION_ROLLBACK)
    with open_index(rolled) as index:
        assert imported(index, rolled / "store").read == 0


def test_an_import_continues_where_it_stopped_also_within_a_message(tmp_path):
    store = tmp_path / "store"
    made(store)
    calls = []
    with open_index(tmp_path) as index:

        def put(columns, source, position):
            calls.append(position)
            if len(calls) == 4:
                raise BackPressure("killed here")
            put_now = index.put_batch(columns, source, position)
            index.flush()
            return put_now

        with pytest.raises(BackPressure):
            imported(index, store, put)
        assert index.durable_position(f"classic:{store / 'index'}") == calls[2]
        work = imported(index, store)
        assert 0 < work.read < 600
        check(index, scan(store))


def test_another_brokers_store_is_refused(run_here, tmp_path, where):
    made(tmp_path / "store")
    made(tmp_path / "other")
    assert run_here("ingest", tmp_path / "store", *where).code == 0
    refused = run_here("import-classic", tmp_path / "other" / "index", *where)
    assert (refused.code, refused.error["type"]) == (2, "ConfigError")
    assert run_here("import-classic", tmp_path / "other" / "index", *where, "--store", tmp_path / "store").code == 0


def test_bad_usage_and_a_damaged_index_file(run_here, tmp_path, where):
    made(tmp_path / "store")
    assert run_here("import-classic", tmp_path / "absent", *where).code == 2
    assert run_here("import-classic", tmp_path / "store" / "commitlog", *where).code == 2
    index = tmp_path / "store" / "index"
    assert run_here("import-classic", index, *where, "--store", index).code == 2
    first = min((tmp_path / "store" / "index").iterdir())
    first.write_bytes(b"x" * 500)
    damaged = run_here("import-classic", tmp_path / "store" / "index", *where)
    assert (damaged.code, damaged.error["file"]) == (4, str(first))


def test_a_file_that_the_broker_deletes_during_the_import_is_left_out(tmp_path):
    store = tmp_path / "store"
    made(store)
    paths = sorted((store / "index").iterdir())
    with open_index(tmp_path) as index:
        work = ClassicImport(index, store / "index", StoreDirectory.open(store), index.put_batch)
        importing = work.run()
        next(importing)
        paths[1].unlink()
        list(importing)
        assert work.files == len(paths) - 1
