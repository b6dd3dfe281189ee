"""Objects that are a source may have any name, written with the escapes of a URI or without."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from tiered_index import IndexConfig
from tiered_index.errors import InvalidArgument
from tiered_index.sources.places import StoredFile, opened_place

NAMES = [
    "a::b+00:00.ndjson",
    "has blanks (1).ndjson",
    "50%.ndjson",
    "x%3Ay.ndjson",
    "täg,~.ndjson",
    "ts=22%3A00/p.ndjson",
]


@pytest.mark.parametrize("name", NAMES)
def test_an_object_of_any_name_is_one_source(s3_environment: Any, name: str) -> None:
    bucket, config = s3_environment.new_bucket(), IndexConfig()
    parameters = f"?endpoint_url={s3_environment.endpoint_url}&addressing_style=path"
    with config.open_storage(f"s3://{bucket}{parameters}", any_names=True) as storage:
        storage.put(name, name.encode())
    known = set()
    for spelled in {name, quote(name)}:
        with opened_place(f"s3://{bucket}/{spelled}{parameters}", config) as place, place.open() as file:
            assert isinstance(place, StoredFile) and file.read() == name.encode()
            known.add(str(place))
    assert len(known) == 1
    missing = f"s3://{bucket}/no%3A{parameters}"
    with pytest.raises(InvalidArgument, match="no such object"), opened_place(missing, config):
        pass


def test_an_index_keeps_its_rule_of_names(s3_environment: Any) -> None:
    with IndexConfig().open_storage(f"s3://{s3_environment.new_bucket()}") as storage:
        with pytest.raises(InvalidArgument, match="not a valid object name"):
            storage.put("a:b", b"")
