"""An export has every entry once, in any state of its file, as of one log position. An import accepts it."""

import shutil
from collections import Counter

import pyarrow as pa
import pytest

from tests.support.damage import flip
from tests.support.filled import merge_all
from tests.support.rounds import upload
from tiered_index import IndexReader, hash_key
from tiered_index.errors import CorruptFile, IndexClosed, InvalidArgument, StorageUnavailable
from tiered_index.format import compacted
from tiered_index.service.read import export as module
from tiered_index.service.read.export import entries_checksum

T = 1_700_000_000_000


def put(index, numbers, topic="t"):
    for number in numbers:
        index.put(topic, number % 2, [f"k{number % 3}", f"own-{number}"], number, 10 + number, T + 1000 * number)


def rows(export):
    """Return the rows of the export as a multiset, after a check of its counts."""
    with export:
        table = pa.Table.from_batches(list(export), export.schema)
    checksum = sum(entries_checksum(batch, export.entry_schema) for batch in table.to_batches()) % 2**64
    assert (export.entries, export.checksum) == (len(table), checksum)
    return Counter(tuple(row.values()) for row in table.to_pylist())


def expected(numbers, topic="t"):
    """Return the fields of each entry that do not depend on ids and fingerprints."""
    keys = [(n, key) for n in numbers for key in (f"k{n % 3}", f"own-{n}")]
    return Counter((topic, n % 2, n, 10 + n, T + 1000 * n, hash_key(topic, key)) for n, key in keys)


def counted(export):
    return Counter((row[0], *row[2:7]) for row in rows(export).elements())


@pytest.mark.parametrize("place", ["compacted", "unsealed"])
def test_a_file_that_was_merged_before_its_dead_writer_knew_counts_once(open_index, faulty, clock, tmp_path, place):
    index = open_index("root", storage_backend=faulty)
    put(index, range(30))
    index.seal()
    before = rows(index.export())
    shutil.copytree(tmp_path / "root", tmp_path / "unsealed")
    seen = tmp_path / "root" / "seen"
    faulty.fail("put_if_absent", name_prefix="log/", when="after")
    with pytest.raises(StorageUnavailable):
        index.run_lifecycle()
    index.abandon()
    shutil.copy(seen, tmp_path / "unsealed" / "seen")  # the writer notes its attempt before it appends
    (tmp_path / "root").rename(tmp_path / "compacted")
    clock.advance(40 * 86400)
    merge_all(faulty, clock)
    with IndexReader.open(root=tmp_path / place, storage_backend=faulty, clock=clock) as beside:
        assert place in {handle.place for handle in beside.files()}
        assert rows(beside.export()) == before
        assert [(topic.topic, topic.entries) for topic in beside.topics().topics] == [("t", before.total())]
        assert sum(beside.du().column("entries").to_pylist()) == before.total()
    again = open_index(place, storage_backend=faulty, lease_ttl_s=1)
    assert rows(again.export()) == before
    assert sum(topic.entries for topic in again.topics().topics) == before.total()


def test_an_export_stays_at_its_position_beside_writes_and_merges(open_index, storage, clock, tmp_path):
    index = open_index("root", local_keep_s=0)
    put(index, range(60))
    upload(index)
    put(index, range(60, 64))
    exports = [index.export()]
    reader = IndexReader.open(root=tmp_path / "root", storage_backend=storage, clock=clock, refresh_interval_s=0)
    exports.append(reader.export())
    first = [next(export) for export in exports]
    put(index, range(64, 200))
    upload(index)
    clock.advance(40 * 86400)
    merge_all(storage, clock)
    index.run_lifecycle()
    for export, batch in zip(exports, first, strict=True):
        table = pa.Table.from_batches([batch, *export])
        assert Counter(table["offset"].to_pylist()) == Counter([*range(64)] * 2)
    assert counted(index.export()) == expected(range(200))
    reader.close()


def test_a_writer_deletes_nothing_that_an_open_export_may_read(open_index):
    index = open_index("root", local_keep_s=0)
    put(index, range(5))
    index.seal()
    export = index.export()
    index.run_lifecycle()
    (path,) = (index.config.root / "unsealed").glob("*.index")
    export.close()
    index.run_lifecycle()
    assert not path.exists()
    assert counted(index.export()) == expected(range(5))


def test_an_export_that_was_closed_or_read_does_not_look_empty(open_index, storage):
    index = open_index("root", local_keep_s=0)
    put(index, range(30))
    upload(index, rounds=2)
    left = index.export()
    left.close()
    whole = index.export()
    assert pa.table(whole).num_rows == 60
    # a loop over a whole export ends again, as that over any iterator
    assert list(whole) == []
    failed = index.export()
    storage.delete_many(sorted(index.log_state.objects))
    with pytest.raises(CorruptFile):
        list(failed)
    for export in (left, failed):
        with pytest.raises(InvalidArgument, match="begin another export"):
            list(export)
    for export in (left, whole, failed):
        with pytest.raises(InvalidArgument, match="begin another export"):
            pa.table(export)


def test_an_unreadable_object_fails_the_export(open_index, storage):
    index = open_index("root", local_keep_s=0)
    put(index, range(30))
    upload(index, rounds=2)
    names = sorted(index.log_state.objects)
    export = index.export()
    storage.delete_many([names[0]])
    with pytest.raises(CorruptFile, match="the log names this object"):
        list(export)
    put(index, range(30, 35))
    export = index.export(begin_ms=T + 30_000)
    index.close()
    with pytest.raises(IndexClosed, match="closed"):
        next(export)


def test_the_error_for_a_swept_object_says_begin_again(open_index, storage, clock, tmp_path):
    """Local copies of merged files do not count twice."""
    index = open_index("root")
    put(index, range(30))
    upload(index)
    before = rows(index.export())
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        export = reader.export()
        clock.advance(40 * 86400)
        merge_all(storage, clock)
        assert rows(index.export()) == before, "an export has the log position of the writer"
        with IndexReader.open(root=tmp_path / "root", storage_backend=storage, clock=clock) as beside:
            assert any(handle.place == "uploaded" for handle in beside.files())
            assert rows(beside.export()) == before
        for name in index.log_state.objects:
            storage.delete_many([name])
        with pytest.raises(StorageUnavailable, match="begin the export again"):
            list(export)


def test_hashes_are_put_unchanged_or_refused(index):
    put(index, range(3))
    (batch,) = index.export()
    assert index.put_batch(batch) == 6
    assert [item.offset for item in index.query("t", "k1")] == [1], "two equal puts give one answer"
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    with pytest.raises(InvalidArgument, match="'fingerprint' is missing"):
        index.put_batch({name: values for name, values in columns.items() if name != "fingerprint"})
    with pytest.raises(InvalidArgument, match="'key_hash' is unknown"):
        index.put_batch(columns | {"key": ["k"] * 6})
    with pytest.raises(InvalidArgument, match="key_hash -1 in row 0 is outside"):
        index.put_batch(columns | {"key_hash": [-1] * 6})
    with pytest.raises(InvalidArgument, match="ragged batch: column 'size'"):
        index.put_batch(columns | {"size": [1]})


def test_the_checksum_tells_topics_and_values_but_not_ids_or_order(index):
    put(index, range(9))
    (batch,) = index.export()
    schema = index.schema
    checksum = entries_checksum(batch, schema)
    turned = batch.take(pa.array(range(len(batch) - 1, -1, -1)))
    ids = pa.array([7] * len(batch), pa.int32())
    assert entries_checksum(turned.set_column(1, "topic_id", ids), schema) == checksum
    others = {"topic": "u", "queue_id": 5, "offset": 1, "size": 1, "timestamp_ms": T, "key_hash": 0}
    for name, value in others.items():
        place = batch.schema.get_field_index(name)
        other = batch.set_column(place, name, pa.array([value] * len(batch), batch.schema.field(name).type))
        assert entries_checksum(other, schema) != checksum, name


def test_damage_fails_an_export_unless_the_storage_has_the_file(open_index):
    """An export that cannot begin holds up no deletion."""
    index, damaged_at = open_index("root"), 28 + 8 * 7 + 40
    put(index, range(9))
    upload(index)
    put(index, range(9, 14))
    index.flush()
    (uploaded, unsealed) = ([*(index.config.root / state).glob("*.index")] for state in ("uploaded", "unsealed"))
    index.close()
    flip(*uploaded, damaged_at)
    with open_index("root") as index:
        assert counted(index.export()) == expected(range(14))
    flip(*unsealed, damaged_at)
    index = open_index("root")
    put(index, range(14, 18))
    index.seal()
    with pytest.raises(CorruptFile):
        index.export()
    index.run_lifecycle()
    assert list((index.config.root / "unsealed").glob("*.index")) == unsealed


def test_a_file_of_several_windows_and_batches_has_each_entry_once(open_index, monkeypatch):
    monkeypatch.setattr(compacted, "GROUP_BYTES", 256)
    monkeypatch.setattr(module, "_WINDOW_BYTES", 300)
    monkeypatch.setattr(module, "_BATCH_ROWS", 7)
    index = open_index("root", local_keep_s=0, items=200)
    put(index, range(40))
    upload(index, rounds=2)
    put(index, range(40, 60))
    index.flush()
    assert {handle.place for handle in index.files()} == {"storage", "unsealed"}
    with index.export() as batches:
        sizes = [len(batch) for batch in batches]
    assert (max(sizes), sum(sizes)) == (7, 120)
    assert counted(index.export()) == expected(range(60))
    assert counted(index.export(begin_ms=T + 10_000, end_ms=T + 50_000)) == expected(range(10, 51))
