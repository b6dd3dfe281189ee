"""Row groups are checked by their stated sizes before they are read. Files of any coding are read unchanged."""

import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.memory import arrow_memory
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.sources import parquet
from tiered_index.sources.places import LocalFile, StoredFile
from tiered_index.storage.opening import open_storage

BOUND = 1 << 20
LONG = "x" * (1 << 18)


def written(path: Path, keys: Any, encoding: str = "PLAIN", **options: Any) -> Path:
    """Write one column `key` as one row group."""
    name = "key" if keys.type == pa.string() else "key.list.element"
    how = {"use_dictionary": False, "column_encoding": {name: encoding}, "write_statistics": False}
    pq.write_table(pa.table({"key": keys}), path, write_batch_size=1, **how, **options)
    return path


def test_a_row_group_that_states_too_much_for_its_rows_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_ROW_GROUP_ROW_BYTES", BOUND)
    path = written(tmp_path / "m.parquet", pa.array([LONG * 5] * 10), compression="zstd", row_group_size=5)
    assert path.stat().st_size < 20_000
    said = r"m\.parquet: row group 0 states 6,5\d\d,\d{3} bytes for 5 rows, but a row may have 1,048,576 bytes: write"
    with arrow_memory() as pool, pytest.raises(InvalidArgument, match=said):
        list(parquet.ParquetTable(LocalFile(path)).read(["key"]))
    assert pool.max_memory() < BOUND
    monkeypatch.setattr(parquet, "MAX_ROW_GROUP_ROW_BYTES", 2 * BOUND)
    assert sum(len(rows) for _, rows in parquet.ParquetTable(LocalFile(path)).read(["key"])) == 10


def test_rows_are_read_in_batches_by_the_stated_size_of_their_row_group(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_BYTES", BOUND)
    path = written(tmp_path / "m.parquet", pa.array([LONG] * 40), compression="zstd", data_page_size=1 << 16)
    with arrow_memory() as pool:
        sizes = [rows.nbytes for _, rows in parquet.ParquetTable(LocalFile(path)).read(["key"])]
    assert sum(sizes) > 40 * len(LONG) and max(sizes) <= BOUND and pool.max_memory() < 8 * BOUND


def test_a_page_of_more_values_than_the_footer_states_is_damage(tmp_path):
    """Arrow finds this out. A file with other wrong sizes may cost memory."""
    path = written(tmp_path / "m.parquet", pa.array(["k"] * 100), compression="none")
    data = path.read_bytes()
    # the page's header has the number of values, in zigzag form: field 1 of the struct in field 5
    header = bytes([0x15, 0xC8, 0x01])
    assert data.count(header) >= 1
    path.write_bytes(data.replace(header, bytes([0x15, 0xC8, 0x7F]), 1))
    with pytest.raises(CorruptFile, match="can't be read"):
        list(parquet.ParquetTable(LocalFile(path)).read(["key"]))


@pytest.mark.parametrize(
    ("encoding", "compression"),
    [
        ("PLAIN", "lz4"),
        ("DELTA_LENGTH_BYTE_ARRAY", "none"),
        ("DELTA_BYTE_ARRAY", "snappy"),
        ("DELTA_BYTE_ARRAY", "gzip"),
        ("RLE_DICTIONARY", "brotli"),
        ("RLE_DICTIONARY", "zstd"),
    ],
)
def test_files_of_any_coding_are_read_whole(tmp_path, monkeypatch, encoding, compression):
    drawn = random.Random(f"{encoding}{compression}")
    texts = [f"{drawn.randrange(300):04}" * drawn.randrange(1, 40) for _ in range(1_000)]
    flat = [text if drawn.random() < 0.9 else None for text in texts]
    cuts = sorted({0, len(texts), *(drawn.randrange(len(texts)) for _ in range(400))})
    lists = [texts[begin:end] if drawn.random() < 0.9 else None for begin, end in itertools.pairwise(cuts)]
    lists += [[]] * 5
    for bound in (32 << 20, 50_000):
        monkeypatch.setattr(parquet, "BATCH_BYTES", bound)
        for keys, version in itertools.product((flat, lists), ("1.0", "2.0")):
            path, path_of_keys = tmp_path / "m.parquet", "key" if keys is flat else "key.list.element"
            options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {path_of_keys: encoding}}
            if encoding == "RLE_DICTIONARY":
                # pages without a dictionary follow a full dictionary
                options = {"use_dictionary": True, "dictionary_pagesize_limit": 5_000}
            options |= {"compression": compression, "data_page_version": version, "data_page_size": 4_000}
            pq.write_table(pa.table({"n": range(len(keys)), "key": keys}), path, write_batch_size=50, **options)
            storage, name = open_storage(f"memory://{tmp_path.name}"), f"{version}{encoding}{path_of_keys}{bound}"
            storage.put(name, path.read_bytes())
            for place in (LocalFile(path), StoredFile(name, storage, name, path.stat().st_size)):
                for shared in ([], ["key"] if keys is flat else []):
                    found = [rows for _, rows in parquet.ParquetTable(place).read_group(0, ["n", "key"], shared=shared)]
                    got = [value for rows in found for value in rows.column("key").to_pylist()]
                    assert got == keys
                    assert [n for rows in found for n in rows.column("n").to_pylist()] == list(range(len(keys)))


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("values", [[f"k{n}" for n in range(500)], [["a", f"k{n}"] for n in range(500)]], ids=type)
def test_delta_encoded_text_in_lz4_of_old_writers(tmp_path, encoding, version, values):
    """The codec is the old number 5, which Arrow once wrote without Hadoop's frames."""
    path = written(tmp_path / "m.parquet", pa.array(values), encoding, compression="lz4", data_page_version=version)
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    codecs = data[footer:].replace(bytes([0x15, 0x0E]), bytes([0x15, 0x0A]))
    path.write_bytes(data[:footer] + codecs)
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    assert column.compression not in ("LZ4", "LZ4_RAW")
    found = [rows for _, rows in parquet.ParquetTable(LocalFile(path)).read(["key"])]
    assert [value for rows in found for value in rows.column("key").to_pylist()] == values
