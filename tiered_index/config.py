"""`IndexConfig`: the settings of an index.

`IndexConfig.load` reads them from these sources. Each source overrides those before it:

1. defaults
2. a TOML file
3. environment variables `TIERED_INDEX_*`, with ``__`` before the name of a nested setting
4. arguments

An unknown setting in any source is an error. An empty variable counts as not set. Variables that Kubernetes derives
from the name of a Service are ignored. Instances are immutable.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from tiered_index.errors import ConfigError, did_you_mean
from tiered_index.format.hashing import HashRule
from tiered_index.format.layout import PRESETS, ROCKETMQ, Layout
from tiered_index.format.schema import Schema
from tiered_index.retention import TABLES_OF_TOPICS, Retention
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import absolute_path
from tiered_index.storage.opening import open_storage, split_uri
from tiered_index.storage.prices import PriceTable
from tiered_index.storage.s3.options import S3Options
from tiered_index.types import IndexItem

if TYPE_CHECKING:
    # exists only as a stub, which is generated from the fields of `IndexConfig`
    from tiered_index._settings import Settings

PREFIX = "TIERED_INDEX_"
# Environment variables of this package's tests, which are not settings
_TESTS_PREFIX = "TIERED_INDEX_TEST_"
# Variables that Kubernetes sets in each pod for a Service whose name begins with tiered-index. A topic may be SEA_PORT.
_SERVICE_LINK = re.compile(
    r"TIERED_INDEX_(?!(?i:RETENTION)__)(\w+_)?"
    r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
OffsetSpace = Literal["commitlog", "tiered_queue", "custom"]
_YEAR_S = 365.25 * 86400
# Bounds of settings without a bound of their own. A wait of more than some 10**9 seconds overflows in Python.
_LONGEST_AGE_S, _LONGEST_WAIT_S = 1e12, 1e9
MOST = 10**18
"""The bound of sizes and counts, which fits the compiled core's numbers."""
# settings that need no pydantic: most readers have no other
_PATHS, _URI = ("root", "cache_dir"), "storage"
# Settings that are tables, with the names of the settings in each
TABLES: dict[str, Collection[str]] = {
    "s3": [each.name for each in fields(S3Options)],
    "prices": PriceTable.__dataclass_fields__,
    "retention": Retention.__dataclass_fields__,
}


def setting(default: Any, *, description: str, **rules: float) -> Any:
    """Declare a setting. `rules` are bounds as pydantic's `Field` takes them."""
    return field(default=default, metadata={"description": description, **rules})


@dataclass(frozen=True, init=False)
class IndexConfig:
    """The settings of an index. Times are in seconds, sizes in bytes; docs/settings.md lists all.

    Give settings by name. The environment supplies those that you do not give, unless `environment` is false. Raises
    `ConfigError` naming every setting that is unknown or wrong. Instances are immutable; any thread.
    """

    root: Path | None = setting(None, description="Folder of the local files. It has one writer at a time")
    storage: str | None = setting(
        None,
        description="Storage URI: file:///dir, s3://bucket/prefix, gs:// and az://, sqlite:///file.db, memory://name",
    )
    preset: Literal["native", "rocketmq"] = setting(
        "native", description="File format: `native`, or `rocketmq` (that of RocketMQ's `IndexStoreFile`)"
    )
    hash: Literal["abs", "mask"] | None = setting(
        None,
        description="With preset rocketmq: hash rule of new files, `abs` (RocketMQ up to 5.5.0) or `mask` "
        "(from 5.5.1 on). None: the index's rule, or `mask` for a new index",
    )
    slots: int | None = setting(
        None,
        gt=0,
        description="Slots of the hash table in each file. None: 1,000,000, or 5,000,000 with preset rocketmq",
    )
    items: int | None = setting(
        None,
        gt=1,
        description="Number of items in a file. Item 0 stays empty, so 1,000 items hold 999 entries. "
        "None: 4,000,000, or 20,000,000 with preset rocketmq",
    )
    item_type: type[IndexItem] | None = setting(None, description="Class of entries. None: the class of the preset")
    offset_space: OffsetSpace = setting(
        "custom",
        description="Meaning of `offset`: `commitlog` (position in RocketMQ's commit log), `tiered_queue` "
        "(position in a queue of RocketMQ's tiered store) or `custom` (any other number)",
    )
    flush_interval_s: float = setting(
        0.5, gt=0, le=_LONGEST_WAIT_S, description="Longest time from a put until the flush of its entry to disk"
    )
    buffer_max_entries: int = setting(2_000_000, gt=0, le=MOST, description="Most entries in the write buffer")
    buffer_max_bytes: int = setting(
        512 << 20,
        gt=0,
        le=MOST,
        description="Most memory of the write buffer, by an estimate of the size of its entries",
    )
    disk_max_bytes: int | None = setting(
        None, gt=0, le=MOST, description="Most bytes of local files. None: the size of the disk"
    )
    seal_after_s: float = setting(
        3 * 3600.0,
        gt=0,
        le=_LONGEST_AGE_S,
        description="Age at which the writer seals a file, then uploads it. It may be less than a second",
    )
    compaction: Literal["local", "spark"] = setting(
        "local",
        description="Process that compacts sealed files: the writer (`local`), or jobs of `spark compact` (`spark`)",
    )
    compact_timeout_s: float = setting(
        3600.0,
        gt=0,
        le=_LONGEST_WAIT_S,
        description="With compaction `spark`: time that a file waits for a job before this host compacts it",
    )
    local_keep_s: float = setting(
        86400.0, ge=0, le=_LONGEST_AGE_S, description="Time that the writer keeps the local copy of an uploaded file"
    )
    local_keep_bytes: int | None = setting(
        None,
        ge=0,
        le=MOST,
        description="Most bytes of local copies of uploaded files. The writer deletes the oldest first",
    )
    max_late_s: float = setting(
        20 * _YEAR_S,
        gt=0,
        le=_LONGEST_AGE_S,
        description="Entries older than this go to files of their own, the quarantine",
    )
    max_early_s: float = setting(
        86400.0, gt=0, le=_LONGEST_AGE_S, description="Entries further in the future than this go to the quarantine"
    )
    upload_part_bytes: int = setting(
        16 << 20, ge=5 << 20, le=5 << 30, description="The writer uploads larger files in parts of this size"
    )
    query_threads: int = setting(
        32, gt=0, le=256, description="Most ranges that lookups read from the storage in parallel"
    )
    coalesce_gap_bytes: int | Literal["price"] = setting(
        256 << 10,
        description="A lookup reads two slot groups of a file in one request if at most this many bytes are between "
        "them. The value `price` means the bytes that cost as much as one request",
    )
    block_cache_bytes: int = setting(
        64 << 20,
        ge=0,
        le=MOST,
        description="Memory for slot groups: pieces of some 16 KiB of the stored files, which lookups read",
    )
    directory_cache_bytes: int = setting(
        256 << 20,
        ge=0,
        le=MOST,
        description="Memory for directories of stored files: the places of their slot groups. "
        "Filters get further memory: half of this value",
    )
    cache_dir: Path | None = setting(
        None,
        description="Folder for cached directories and filters. None: a folder in the root, or no cache on disk if "
        "there is no root",
    )
    cache_max_bytes: int = setting(4 << 30, gt=0, le=MOST, description="Most bytes in `cache_dir`")
    filter_after_probes: int = setting(
        8,
        gt=0,
        le=MOST,
        description="After this many lookups that found nothing in a file, the next lookup fetches the file's filter",
    )
    prices: PriceTable = setting(
        PriceTable(), description="Price list for estimated costs; S3 Standard's as of 2026-11"
    )
    retention: Retention = setting(Retention(), description="Rule of expiry; by default nothing expires")
    lease_ttl_s: float = setting(
        60.0,
        gt=0,
        le=_LONGEST_WAIT_S,
        description="Time to live of the writer's lease. After a crash, a writer on another host waits this long",
    )
    lifecycle_interval_s: float = setting(
        1.0,
        gt=0,
        le=_LONGEST_WAIT_S,
        description="Pause between rounds of the life cycle: seal, compact, upload, retire, expire",
    )
    refresh_interval_s: float = setting(
        30.0, ge=0, le=_LONGEST_WAIT_S, description="Time between two reads of the storage's log, for new files"
    )
    source_timeout_s: float = setting(
        5.0,
        ge=0.01,
        le=_LONGEST_WAIT_S,
        description="A reader of several indexes waits this long for a response of each. Then lookups report the index "
        "in `failed` and no longer wait for it, until it answers a request in the background",
    )
    checkpoint_every: int | None = setting(
        None, gt=0, le=MOST, description="Log records from one checkpoint to the next. None: 1"
    )
    background: bool = setting(
        True,
        description="Flush, compact and upload in background threads. False: only by your calls of `flush` and "
        "`run_lifecycle`",
    )
    raise_file_limit: bool = setting(
        True,
        description="Raise the process's soft limit of open files, to 65,536 or the hard limit. It stays raised after "
        "`close`",
    )
    s3: S3Options = setting(S3Options(), description="How to reach S3")

    def __init__(self, *, environment: bool = True, **values: Any) -> None:
        """Make settings from arguments. The environment supplies the others, unless `environment` is false.

        Raises `ConfigError` naming every key that is unknown or wrong.
        """
        if environment:
            found: dict[str, Any] = {}
            for _, path, value in of_environment():
                found = with_value(found, path, value)
            values = _merged(found, values)
        self._set(_checked(values))

    def _set(self, values: Mapping[str, Any]) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, values.get(each.name, each.default))
        object.__setattr__(self, "_given", frozenset(values))

    @property
    def given(self) -> frozenset[str]:
        """The names of the settings that a file, the environment or an argument gives."""
        found: frozenset[str] = self.__dict__["_given"]
        return found

    def changed(self, **values: Any) -> IndexConfig:
        """Return a copy with other values. Raises `ConfigError` naming every key that is unknown or wrong."""
        copy = object.__new__(type(self))
        copy._set({name: getattr(self, name) for name in self.given} | _checked(values))
        return copy

    def open_storage(self, uri: str | None = None, *, any_names: bool = False) -> Storage:
        """Open the storage at `uri` (None: the index's storage) with the options set here. Raises `ConfigError`.

        `any_names` is that of `Storage`.
        """
        place = str(self.storage) if uri is None else uri
        return open_storage(place, options=self.s3, parallel_reads=self.query_threads, any_names=any_names)

    @classmethod
    def load(
        cls, config_file: Path | None = None, *, environment: bool = True, **given: Unpack[Settings]
    ) -> IndexConfig:
        """Load the settings of a TOML file, the environment and arguments. None as an argument counts as not given.

        If `environment` is false, the environment is not read.

        Raises `ConfigError` naming every key that is unknown or wrong.
        """
        values: dict[str, Any] = {}
        if config_file is not None:
            import tomllib

            try:
                values = tomllib.loads(absolute_path(config_file).read_text("utf-8"))
            except OSError as error:
                raise ConfigError(f"{config_file} can't be read: {error.strerror}") from error
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{config_file} is not TOML: {error}") from error
        in_file = dict(values)
        for _, path, value in of_environment(is_strict=True) if environment else ():
            values = with_value(values, path, value)
        given_values = {name: value for name, value in given.items() if value is not None}
        try:
            config = object.__new__(cls)  # a file may have any name, also one of the arguments of `__init__`
            config._set(_checked(_merged(values, given_values)))
            return config
        except ConfigError as error:
            from tiered_index.config_checks import located

            raise located(error, given_values, in_file, config_file, environment) from error.__cause__

    def schema_of(self) -> Schema:
        """Return the schema of the index's entries."""
        return Schema.of(self.item_type) if self.item_type is not None else PRESETS[self.preset].schema

    def geometry(self) -> Layout:
        """Return the geometry of new files. Raises `ConfigError` for an impossible one."""
        preset = PRESETS[self.preset]
        slots = preset.slots if self.slots is None else self.slots
        items = preset.items if self.items is None else self.items
        # the rule of RocketMQ's newest release, 5.5.1
        rule: HashRule = self.hash or ("mask" if preset is ROCKETMQ else "abs")
        return Layout(preset, self.schema_of(), slots, items, rule)


def checked_config(config: object) -> IndexConfig:
    """Return `config` if it is an `IndexConfig`. Otherwise raise `ConfigError`, which suggests the right argument."""
    if isinstance(config, IndexConfig):
        return config
    meant = ""
    if isinstance(config, str | Path):
        meant = f"; did you mean {'storage' if '://' in str(config) else 'root'}={str(config)!r:.80}?"
    elif isinstance(config, Storage):
        meant = "; did you mean storage_backend=?"
    raise ConfigError(f"config must be an IndexConfig, not {type(config).__name__}{meant}")


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the types that they are declared with. Raises `ConfigError` naming every wrong one."""
    if values.keys() <= {_URI, *_PATHS}:
        with contextlib.suppress(ConfigError):  # `checked` raises it, with the setting's name
            return {name: _plain(name, value) for name, value in values.items()}
    from tiered_index.config_checks import checked

    return checked(values)


def _plain(name: str, value: Any) -> Any:
    """Return a setting of `_PATHS` or `_URI`. Raises `ConfigError`."""
    if value is None:
        return None
    if not value or not isinstance(value, str if name == _URI else str | Path):
        raise ConfigError(f"{name} must be a text that is not empty")
    return usable_uri(value) if name == _URI else absolute_path(Path(value))


def usable_uri(uri: str) -> str:
    """Return a storage's URI. Raises `ConfigError` for one with credentials, which must not be logged or printed."""
    split_uri(uri)
    return uri


def unknown(name: str, known: Iterable[str], *tables: str) -> str:
    """Return the message about a setting, in `tables`, that is not one of the `known`."""
    prefix = "".join(f"{table}." for table in tables)
    hint = f"; {tables[0]} has {', '.join(known)}" if tables else "; docs/settings.md lists the settings"
    return f"unknown setting {prefix + name!r}{did_you_mean(name.lower(), known, prefix) or hint}"


def variables() -> list[str]:
    """Return the names of environment variables that are settings."""
    return [name for name in os.environ if name.upper().startswith(PREFIX) and not _SERVICE_LINK.fullmatch(name)]


def _path(name: str) -> list[str]:
    """Return the path of the setting that a variable names. Only the names of topics keep their case."""
    field, *inner = name[len(PREFIX) :].split("__")
    return [field.lower(), *(part.lower() for part in inner[:1]), *inner[1:]]


def of_environment(*, is_strict: bool = False) -> Iterator[tuple[str, list[str], Any]]:
    """Yield variable, path and value of each setting in the environment. A table comes before the settings in it.

    Raises `ConfigError` for a table that is not JSON, and if `is_strict` for an unknown setting.
    """
    known = [each.name for each in fields(IndexConfig)]
    for name in sorted(variables(), key=lambda each: each.count("__")):
        path = _path(name)
        if path[0] not in known or (path[1:] and path[0] not in TABLES):
            if is_strict and not name.upper().startswith(_TESTS_PREFIX):
                raise ConfigError(f"environment variable {name}: {unknown('.'.join(path), known)}")
            continue
        value: Any = os.environ[name]
        if not value:
            continue
        is_table = path[0] in TABLES and len(path) == 1
        if is_table or (path[0] == "retention" and path[1:] in [[table] for table in TABLES_OF_TOPICS]):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
            if is_table and not isinstance(value, dict):
                raise ConfigError(f"environment variable {name} must be a table of settings, as JSON")
        # a table replaces only the settings that it has
        yield from ((name, [*path, inner], one) for inner, one in value.items()) if is_table else [(name, path, value)]


def _merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Return both merged; `high` wins, nested tables are merged key by key."""
    result = dict(low)
    for name, value in high.items():
        below = result.get(name)
        if isinstance(below, dict) and isinstance(value, dict):
            result[name] = _merged(below, value)
        elif not (isinstance(value, dict) and _is_no_table(name, below)):
            result[name] = value
    return result


def _is_no_table(name: str, below: Any) -> bool:
    """Return whether a table has another value in a lower place. It is kept, so that the check reports it."""
    return name in (*TABLES, *TABLES_OF_TOPICS) and below is not None and not isinstance(below, dict)


def with_value(values: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of nested tables with `value` at `path`."""
    first, *inner = path
    if inner:
        below = values.get(first)
        if _is_no_table(first, below):
            return values
        value = with_value(below if isinstance(below, dict) else {}, inner, value)
    return {**values, first: value}


def holds(values: dict[str, Any], path: list[str]) -> bool:
    """Return whether nested tables have a value at `path`, or a value other than a table at the beginning of it."""
    inner: Any = values
    for name in path:
        if not isinstance(inner, dict):
            return True
        if name not in inner:
            return False
        inner = inner[name]
    return True
