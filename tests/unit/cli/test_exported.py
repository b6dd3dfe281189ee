"""`ingest` of an export raises a typed error that names the file, whatever the damage of the file is."""

import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tiered_index import IndexService
from tiered_index.cli.write.export import NdjsonWriter
from tiered_index.cli.write.exported import ExportedFile
from tiered_index.connectors.files.rows.forms import rows_at
from tiered_index.connectors.files.rows.places import LocalFile
from tiered_index.errors import CorruptFile, InvalidArgument, TieredIndexError, UnsupportedVersion
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.service.read.export import METADATA


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    root = tmp_path_factory.mktemp("index") / "root"
    with IndexService.open(root=root, storage="memory://importing", slots=10, items=100, background=False) as index:
        for n in range(50):
            index.put("orders", 0, f"order-{n}", offset=n, size=100, timestamp_ms=1_700_000_000_000 + n * 1000)
        with index.export() as export:
            return pa.Table.from_batches(export, export.schema)


def written(entries, path):
    with path.open("wb") as sink:
        if path.suffix == ".parquet":
            pq.write_table(entries, sink, row_group_size=20)
        elif path.suffix == ".arrow":
            with pa.ipc.new_file(sink, entries.schema) as writer:
                writer.write_table(entries)
        else:
            NdjsonWriter(sink).write_table(entries)
    return path


def read(path):
    file = ExportedFile.of(rows_at(LocalFile(path)))
    if file is None:  # then it is read as a file of messages
        raise InvalidArgument(f"{path} is no export")
    file.settings(None, None, None)
    file.check(KEYED_SCHEMA, None)
    return sum(map(len, file.batches(KEYED_SCHEMA)))


def test_lines_may_be_gzipped(entries, tmp_path):
    path = written(entries, tmp_path / "entries.ndjson")
    data = gzip.compress(path.read_bytes())
    path.write_bytes(data)
    assert read(path) == 50
    path.write_bytes(data[:-9])
    with pytest.raises(CorruptFile, match="damaged gzip file"):
        read(path)


def damaged_copies(data, count):
    """Yield copies with a flipped bit, noise, a cut, inserted bytes or zeros, half of them in the footer.

    The last eight bytes begin with the length of the footer.
    """
    chance = random.Random(7)
    footer_bytes = min(int.from_bytes(data[-8:-4], "little"), len(data) - 16)
    for number in range(count):
        at = chance.randrange(len(data) - 8 - footer_bytes if number % 2 else 4, len(data))
        flipped, noise = bytes([data[at] ^ 1 << chance.randrange(8)]), chance.randbytes(chance.randrange(1, 30))
        kinds = ((flipped, 1), (noise, len(noise)), (b"", len(data)), (noise, 0), (bytes(100), 100))
        new, gone = kinds[number % 5]
        yield data[:at] + new + data[at + gone :]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "ndjson"])
def test_damage_is_a_typed_error(entries, tmp_path, kind):
    path = written(entries, tmp_path / f"entries.{kind}")
    assert read(path) == 50
    seen = set()
    for copy in damaged_copies(path.read_bytes(), 120):
        path.write_bytes(copy)
        try:
            count = read(path)
            assert count == 50 or kind == "ndjson"
        except TieredIndexError as error:
            assert str(path) in str(error)
            seen.add(type(error))
    assert len(seen) >= 1


OTHER_SPACE = '{"version": 1, "layout": {}, "offset_space": "x"}'


@pytest.mark.parametrize("about", ["", "nope", "[1]", '{"version": 1}', '{"version": 1, "layout": 5}', OTHER_SPACE])
def test_damaged_metadata_are_named(entries, tmp_path, about):
    for kind in ("parquet", "arrow"):
        path = written(entries.replace_schema_metadata({METADATA: about}), tmp_path / f"entries.{kind}")
        with pytest.raises(CorruptFile, match=str(path)) as caught:
            read(path)
        assert type(caught.value) is CorruptFile


def test_an_export_of_another_version_is_refused_by_name(entries, tmp_path):
    about = json.loads(entries.schema.metadata[METADATA]) | {"version": 2}
    path = written(entries.replace_schema_metadata({METADATA: json.dumps(about)}), tmp_path / "entries.parquet")
    with pytest.raises(UnsupportedVersion, match=r"export of version 2, .*: build the index again"):
        read(path)
