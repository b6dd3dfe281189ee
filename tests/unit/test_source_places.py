"""Objects that are a source may have any name, with the escapes of a URI or without. They are read ahead."""

import random
from typing import Any
from urllib.parse import quote

import pytest

from tiered_index import IndexConfig
from tiered_index.connectors.files.rows.places import StoredFile, opened_place
from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.storage.memory import MemoryStorage

NAMES = [
    "a::b+00:00.ndjson",
    "has blanks (1).ndjson",
    "50%.ndjson",
    "x%3Ay.ndjson",
    "täg,~.ndjson",
    "ts=22%3A00/p.ndjson",
    "/begins with a slash.ndjson",
    "a//b.ndjson",
    "tab\t.ndjson",
    "a?b=c#d.ndjson",
]


@pytest.mark.parametrize("name", NAMES)
def test_an_object_of_any_name_is_one_source(s3_environment: Any, name: str) -> None:
    bucket, config = s3_environment.new_bucket(), IndexConfig()
    parameters = f"?endpoint_url={s3_environment.endpoint_url}&addressing_style=path"
    with config.open_storage(f"s3://{bucket}{parameters}", any_names=True) as storage:
        storage.put(name, name.encode())
    known = set()
    for spelled in {name, quote(name)} if "?" not in name else {quote(name)}:
        with opened_place(f"s3://{bucket}/{spelled}{parameters}", config) as place, place.open() as file:
            assert isinstance(place, StoredFile) and file.read() == name.encode()
            known.add(str(place))
    assert len(known) == 1
    with config.open_storage(f"s3://{bucket}{parameters}") as storage:
        # an index keeps its rule of names
        with pytest.raises(InvalidArgument, match="not a valid object name"):
            storage.put("a:b", b"")
    missing = f"s3://{bucket}/no%3A{parameters}"
    with pytest.raises(InvalidArgument, match="no such object"), opened_place(missing, config):
        pass


MIB = 1 << 20
DATA = random.Random(1).randbytes(22 * MIB)


@pytest.fixture
def storage():
    """An object that is read in pieces of 4 MiB, through a buffer of one."""
    storage = MemoryStorage()
    storage.put("x", DATA)
    return storage


@pytest.mark.parametrize("size", [MIB // 3, 4 * MIB, 4 * MIB + 1, 30 * MIB])
def test_all_bytes_are_read_in_order_from_any_position(storage, size):
    with StoredFile("memory://x", storage, "x", len(DATA)).ahead() as handle:
        for begin in (0, 17, 4 * MIB - 1, len(DATA) - 1, len(DATA)):
            assert handle.seek(begin) == begin
            pieces = [*iter(lambda: handle.read(size), b"")]
            assert b"".join(pieces) == DATA[begin:] and handle.tell() == len(DATA)


def test_an_error_of_a_piece_is_raised_where_it_is_needed(storage, monkeypatch):
    get_range = storage.get_range

    def failing(name, offset, length):
        if offset >= 12 * MIB:
            raise StorageUnavailable("away")
        return get_range(name, offset, length)

    monkeypatch.setattr(storage, "get_range", failing)
    with StoredFile("memory://x", storage, "x", len(DATA)).ahead() as handle:
        assert handle.read(12 * MIB) == DATA[: 12 * MIB]
        with pytest.raises(StorageUnavailable, match="away"):
            handle.read(1)
