"""One rule for the numbers of all settings: finite, within a bound that the error names, and usable up to it."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

import pytest

from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.config import TABLES
from tiered_index.errors import ConfigError
from tiered_index.retention import Retention
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.prices import PriceTable
from tiered_index.storage.s3.options import S3Options

NOW_MS = 1_700_000_000_000
KINDS = {"s3": S3Options, "prices": PriceTable, "retention": Retention}
PATHS = [(each.name,) for each in fields(IndexConfig) if each.name not in TABLES]
PATHS += [(table, name) for table, names in TABLES.items() for name in names]
VALUES = [math.nan, math.inf, -math.inf, 1e300, 10**30, -1, True, "", None]
# the greatest values; an index of so many slots or items is not for a test
GREATEST = {
    "flush_interval_s": 1e9,
    "buffer_max_entries": 10**18,
    "buffer_max_bytes": 10**18,
    "disk_max_bytes": 10**18,
    "seal_after_s": 1e12,
    "compact_timeout_s": 1e9,
    "local_keep_s": 1e12,
    "local_keep_bytes": 10**18,
    "max_late_s": 1e12,
    "max_early_s": 1e12,
    "upload_part_bytes": 5 << 30,
    "query_threads": 256,
    "coalesce_gap_bytes": 10**18,
    "block_cache_bytes": 10**18,
    "directory_cache_bytes": 10**18,
    "cache_max_bytes": 10**18,
    "filter_after_probes": 10**18,
    "lease_ttl_s": 1e9,
    "lifecycle_interval_s": 1e9,
    "refresh_interval_s": 1e9,
    "checkpoint_every": 10**18,
}
GREATEST_IN_TABLES: dict[str, dict[str, float]] = {
    "s3": {
        "connect_timeout_s": 86_400,
        "read_timeout_s": 86_400,
        "max_pool_connections": 10_000,
        "max_attempts": 1_000,
        "transfer_attempts": 1_000,
        "backoff_s": 86_400,
    },
    "prices": {name: 10**9 for name in TABLES["prices"] if name != "as_of"},
    "retention": {"max_bytes": 10**18},
}
# ages in tables have units
GREATEST_AGES = dict.fromkeys(("age_s", "segments_age_s", "grace_s"), 253402300799)


def kind_of(path: tuple[str, ...]) -> Any:
    hints = get_type_hints(KINDS[path[0]] if path[1:] else IndexConfig)
    return hints[path[-1]]


def works(folder: Any, settings: dict[str, Any]) -> None:
    """Open a writer with its threads, and a reader: an entry is flushed, sealed and found by both."""
    storage = MemoryStorage()
    given = {"environment": False, "root": folder, "slots": 7, "items": 12, **settings}
    given.pop("storage", None)
    with IndexService.open(IndexConfig(**given), storage_backend=storage) as service:
        service.put("t", 0, "k", 1, 1, NOW_MS)
        service.flush()
        service.seal()
        service.run_lifecycle()
        assert [item.offset for item in service.query("t", "k")] == [1]
        with IndexReader.open(config=service.config.changed(root=None), storage_backend=storage) as reader:
            assert [item.offset for item in reader.query("t", "k")] == [1]
    if "s3" in settings:
        service.config.open_storage("s3://bucket/prefix?region=eu-central-1&endpoint_url=http://127.0.0.1:9").close()


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_a_value_is_refused_by_name_or_the_index_works(path, tmp_path):
    is_number = {int, float} & {kind_of(path), *get_args(kind_of(path))}
    for number, value in enumerate(VALUES):
        setting = {path[0]: {path[1]: value} if path[1:] else value}
        try:
            IndexConfig(environment=False, **setting)
            works(tmp_path / str(number), setting)
        except ConfigError as error:
            assert path[-1] in str(error), f"{value!r}: {error}"
        else:
            is_refused = is_number and value is not None
            assert not is_refused, f"{value!r} is accepted"


def test_the_greatest_numbers_work_together(tmp_path):
    retention = GREATEST_IN_TABLES["retention"] | {name: f"{age_s}s" for name, age_s in GREATEST_AGES.items()}
    works(tmp_path, {**GREATEST, **GREATEST_IN_TABLES, "retention": retention})


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_every_number_has_a_bound(path):
    kinds = {kind_of(path), *get_args(kind_of(path))}
    if not {int, float} & kinds or path in (("slots",), ("items",), ("retention", "topics")):
        return  # no number; bounded by the size of a file; ages by topic, which are in `test_retention`
    above: Any
    if path[-1] in GREATEST_AGES:
        above = f"{GREATEST_AGES[path[-1]] + 1}s"
    else:
        greatest = GREATEST_IN_TABLES[path[0]][path[1]] if path[1:] else GREATEST[path[0]]
        above = math.nextafter(greatest, math.inf) if float in kinds else greatest + 1
    with pytest.raises(ConfigError, match=path[-1]):
        IndexConfig(environment=False, **{path[0]: {path[1]: above} if path[1:] else above})


def test_a_copy_is_checked_as_the_first_one():
    config = IndexConfig(environment=False, slots=3)
    assert config.changed(items=9).given == {"slots", "items"}
    with pytest.raises(ConfigError, match="unknown setting 'slotz'; did you mean 'slots'"):
        config.changed(slotz=3)
    with pytest.raises(ConfigError, match="lease_ttl_s"):
        config.changed(lease_ttl_s=math.inf)


@pytest.mark.parametrize("kind", [IndexConfig, *KINDS.values()])
def test_defaults_have_the_types_that_are_declared(kind):
    hints = get_type_hints(kind)
    for each in fields(kind):
        if each.default is not MISSING and hints[each.name] in (int, float, bool, str):
            assert type(each.default) is hints[each.name], each.name
