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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

from msgspec import Meta, Struct

from tiered_index.base.retention import TABLES_OF_TOPICS, Retention
from tiered_index.base.units import UNITS_S, human_duration, parse_bytes, parse_duration, parse_tiers
from tiered_index.errors import ConfigError, StorageMisconfigured, did_you_mean
from tiered_index.format.keys.hashing import HashRule
from tiered_index.format.layout import PRESETS, ROCKETMQ, Layout, Preset
from tiered_index.format.schema import Schema
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import absolute_path
from tiered_index.storage.opening import open_storage, spelled, split_uri
from tiered_index.storage.prices import PriceTable
from tiered_index.storage.s3.options import S3Options
from tiered_index.types import IndexItem

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
# characters of a refused value that is shown: keys and tokens have more
_MOST_SHOWN = 16
MOST = 10**18
"""The bound of sizes and counts, which fits the compiled core's numbers."""
Count = Annotated[int, Meta(gt=0, le=MOST)]
Size = Annotated[int, Meta(ge=0, le=MOST)]
# Seconds
Wait = Annotated[float, Meta(gt=0, le=_LONGEST_WAIT_S)]
Age = Annotated[float, Meta(gt=0, le=_LONGEST_AGE_S)]
TABLES: dict[str, type[Struct]] = {"s3": S3Options, "prices": PriceTable, "retention": Retention}
"""The settings that are tables, with their classes."""


class IndexSettings(TypedDict, total=False):
    """The settings of an index by name, as calls take them: one attribute for each. None counts as not given."""

    preset: Literal["native", "rocketmq"] | None
    hash: Literal["abs", "mask"] | None
    slots: int | None
    items: int | None
    offset_space: OffsetSpace | None
    flush_interval_s: float | str | None
    buffer_max_entries: int | None
    buffer_max_bytes: int | None
    disk_max_bytes: int | None
    seal_after_s: float | str | None
    merge: str | None
    merge_max_entries: int | None
    local_keep_s: float | str | None
    local_keep_bytes: int | None
    max_late_s: float | str | None
    max_early_s: float | str | None
    query_threads: int | None
    coalesce_gap_bytes: int | Literal["price"] | None
    read_cache_bytes: int | None
    cache_slot_groups: bool | None
    cache_dir: str | Path | None
    cache_max_bytes: int | None
    filter_after_probes: int | None
    prices: PriceTable | dict[str, Any] | None
    retention: Retention | dict[str, Any] | None
    lease_ttl_s: float | str | None
    lifecycle_interval_s: float | str | None
    refresh_interval_s: float | str | None
    source_timeout_s: float | str | None
    checkpoint_every: int | None
    background: bool | None
    raise_file_limit: bool | None
    s3: S3Options | dict[str, Any] | None


class Settings(IndexSettings, total=False):
    """All settings by name."""

    root: str | Path | None
    storage: str | None
    item_type: type[IndexItem] | None


class _Checked(type(Struct)):  # type: ignore[misc]
    """The class of `IndexConfig`: a call reads the environment, and checks the settings."""

    # type checkers see the `__init__` of `IndexConfig`
    if not TYPE_CHECKING:

        def __call__(cls, *, environment: bool = True, **values: Any) -> IndexConfig:
            return _made(_checked(_merged(_in_environment(), values) if environment else values))


class IndexConfig(Struct, metaclass=_Checked, frozen=True, kw_only=True, dict=True):
    """The settings of an index; docs/reference.md lists all. Sizes are in bytes.

    Durations are seconds, or text with a unit: ``30s``, ``15m``, ``12h`` or ``7d``.

    Give settings by name. The environment supplies those that you do not give, unless `environment` is false. Raises
    `ConfigError` naming every setting that is unknown or wrong. Instances are immutable; any thread.

    - `root`: folder of the local files. It has one writer at a time.
    - `storage`: storage URI: file:///dir, s3://bucket/prefix, gs:// and az://, sqlite:///file.db, memory://name.
    - `preset`: file format: `native`, or `rocketmq` (that of RocketMQ's `IndexStoreFile`).
    - `hash`: with preset rocketmq: hash rule of new files, `abs` (RocketMQ up to 5.5.0) or `mask` (from 5.5.1 on).
      None: the index's rule, or `mask` for a new index.
    - `slots`: slots of the hash table in each file. None: 1,000,000, or 5,000,000 with preset rocketmq.
    - `items`: number of items in a file. Item 0 stays empty, so 1,000 items hold 999 entries. None: 4,000,000, or
      20,000,000 with preset rocketmq.
    - `item_type`: class of entries. None: the class of the preset.
    - `offset_space`: meaning of `offset`: `commitlog` (position in RocketMQ's commit log), `tiered_queue` (position in
      a queue of RocketMQ's tiered store) or `custom` (any other number).
    - `flush_interval_s`: longest time from a put until the flush of its entry to disk.
    - `buffer_max_entries`: most entries in the write buffer.
    - `buffer_max_bytes`: most memory of the write buffer, by an estimate of the size of its entries.
    - `disk_max_bytes`: most bytes of local files. None: the size of the disk.
    - `seal_after_s`: age at which the writer seals a file, then uploads it. It may be less than a second.
    - `merge`: windows into which the writer merges uploaded files once they are over, the shortest first, or `off`.
      None: `1d,30d`, or `off` with preset rocketmq.
    - `merge_max_entries`: most entries of a window that the writer merges. It leaves larger windows to `tiered-index
      merge` and Spark.
    - `local_keep_s`: time that the writer keeps the local copy of an uploaded file, unless it is merged before.
    - `local_keep_bytes`: most bytes of local copies of uploaded files. The writer deletes the oldest first.
    - `max_late_s`: entries older than this go to files of their own, the quarantine.
    - `max_early_s`: entries further in the future than this go to the quarantine.
    - `query_threads`: most ranges that lookups read from the storage in parallel.
    - `coalesce_gap_bytes`: A lookup reads two slot groups of a file in one request if at most this many bytes are
      between them. It reads a filter of at most this size with the directory. The value `price` means the bytes that
      cost as much as one request.
    - `read_cache_bytes`: most memory of a reader for what it caches of stored files: directories (the places of slot
      groups), filters, slot groups (pieces of some 16 KiB, which lookups read) and tables of archived segments. What
      only one lookup used gives way first. A filter of more than a quarter of this is not read.
    - `cache_slot_groups`: cache slot groups in memory. Without them, each lookup reads the entries from the storage.
    - `cache_dir`: folder for cached directories and filters. None: a folder in the root, or no cache on disk if there
      is no root.
    - `cache_max_bytes`: most bytes in `cache_dir`.
    - `filter_after_probes`: after this many lookups that found nothing in a file, the next lookup fetches the file's
      filter, unless it came with the directory.
    - `prices`: price list for estimated costs; S3 Standard's as of 2026-11.
    - `retention`: rule of expiry; by default nothing expires.
    - `lease_ttl_s`: time to live of the writer's lease. After a crash, a writer on another host waits this long.
    - `lifecycle_interval_s`: pause between rounds of the life cycle: seal, compact, upload, retire, expire.
    - `refresh_interval_s`: time between two reads of the storage's log, for new files. A reader reads it only
      if lookups come.
    - `source_timeout_s`: A reader of several indexes waits this long for a response of each. Then lookups report the
      index in `failed` and no longer wait for it, until it answers a request in the background.
    - `checkpoint_every`: log records from one checkpoint to the next. None: 1, or 32 if a checkpoint has 2 MiB or more.
    - `background`: flush, compact, upload and merge in background threads. False: only by your calls of `flush`,
      `run_lifecycle` and `run_merge`.
    - `raise_file_limit`: raise the process's soft limit of open files, to 65,536 or the hard limit. It stays raised
      after `close`.
    - `s3`: how to reach S3.
    """

    root: Path | None = None
    storage: str | None = None
    preset: Literal["native", "rocketmq"] = "native"
    hash: Literal["abs", "mask"] | None = None
    slots: Annotated[int, Meta(gt=0)] | None = None
    items: Annotated[int, Meta(gt=1)] | None = None
    item_type: type[IndexItem] | None = None
    offset_space: OffsetSpace = "custom"
    flush_interval_s: Wait = 0.5
    buffer_max_entries: Count = 2_000_000
    buffer_max_bytes: Count = 512 << 20
    disk_max_bytes: Count | None = None
    seal_after_s: Age = 3 * 3600.0
    merge: str | None = None
    merge_max_entries: Count = 50_000_000
    local_keep_s: Annotated[float, Meta(ge=0, le=_LONGEST_AGE_S)] = 86400.0
    local_keep_bytes: Size | None = None
    max_late_s: Age = 20 * _YEAR_S
    max_early_s: Age = 86400.0
    query_threads: Annotated[int, Meta(gt=0, le=256)] = 32
    coalesce_gap_bytes: Size | Literal["price"] = 256 << 10
    read_cache_bytes: Size = 512 << 20
    cache_slot_groups: bool = True
    cache_dir: Path | None = None
    cache_max_bytes: Count = 4 << 30
    filter_after_probes: Count = 8
    prices: PriceTable = PriceTable()
    retention: Retention = Retention()
    lease_ttl_s: Wait = 60.0
    lifecycle_interval_s: Wait = 1.0
    refresh_interval_s: Annotated[float, Meta(ge=0, le=_LONGEST_WAIT_S)] = 30.0
    source_timeout_s: Annotated[float, Meta(ge=0.01, le=_LONGEST_WAIT_S)] = 5.0
    checkpoint_every: Count | None = None
    background: bool = True
    raise_file_limit: bool = True
    s3: S3Options = S3Options()

    if TYPE_CHECKING:

        def __init__(self, *, environment: bool = True, **values: Any) -> None: ...

    @property
    def given(self) -> frozenset[str]:
        """The names of the settings that a file, the environment or an argument gives."""
        names: frozenset[str] = self.__dict__["_given"]
        return names

    def changed(self, **values: Any) -> IndexConfig:
        """Return a copy with other values. Raises `ConfigError` naming every key that is unknown or wrong."""
        return _made({name: getattr(self, name) for name in self.given} | _checked(values))

    def open_storage(self, uri: str | None = None, *, any_names: bool = False) -> Storage:
        """Open the storage at `uri` (None: the index's storage) with the options set here. Raises `ConfigError`.

        `any_names` is that of `Storage`.
        """
        place = str(self.storage) if uri is None else uri
        return open_storage(place, options=self.s3, any_names=any_names)

    @classmethod
    def load(
        cls, config_file: Path | None = None, *, environment: bool = True, **settings: Unpack[Settings]
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
        for _, path, value in _of_environment(is_strict=True) if environment else ():
            values = with_value(values, path, value)
        given_values = {name: value for name, value in settings.items() if value is not None}

        def place(path: list[str]) -> str:
            if holds(given_values, path):
                return ""
            if environment and (variable := _variable(path)) is not None:
                return f"environment variable {variable}: "
            return f"{config_file}: " if holds(in_file, path) else ""

        # a file may have any name, also one of the arguments of a call
        return _made(_checked(_merged(values, given_values), place))

    def merge_tiers(self, preset: Preset) -> list[int]:
        """Return the lengths in seconds of the windows that a writer of an index with `preset` merges into."""
        text = self.merge or ("off" if preset is ROCKETMQ else "1d,30d")
        return [] if text == "off" else parse_tiers(text)

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


def _made(checked: Mapping[str, Any]) -> IndexConfig:
    config: IndexConfig = type(Struct).__call__(IndexConfig, **checked)
    config.__dict__["_given"] = frozenset(checked)
    return config


Problems = list[tuple[list[str], str]]


def _checked(values: Mapping[str, Any], place: Callable[[list[str]], str] = lambda path: "") -> dict[str, Any]:
    """Return settings with the types that they are declared with.

    Raises `ConfigError` that names every wrong one, after the `place` of its path.
    """
    problems: Problems = []
    checked = {name: _setting(name, value, problems) for name, value in values.items()}
    by_place: dict[str, list[str]] = {}
    for path, problem in problems:
        by_place.setdefault(place(path), []).append(problem)
    if by_place:
        raise ConfigError("; ".join(where + "; ".join(problems) for where, problems in by_place.items()))
    return checked


def _setting(name: str, value: Any, problems: Problems) -> Any:
    """Return the checked value of a setting, or add to `problems`."""
    if name in TABLES and isinstance(value, Mapping):
        return _table(name, value, problems)
    try:
        if name in IndexConfig.__struct_fields__:
            return _value(name, value)
        problems.append(([name], unknown(name, IndexConfig.__struct_fields__)))
    except StorageMisconfigured:
        raise
    except (ConfigError, ValueError) as error:
        problems.append(([name], _said(name, error, value)))
    return None


def _table(table: str, values: Mapping[Any, Any], problems: Problems) -> Any:
    """Return the checked table of settings, or add to `problems`."""
    from tiered_index.base.conversion import converted, kinds

    known, checked, before = TABLES[table].__struct_fields__, {}, len(problems)
    for name, value in values.items():
        if name not in known:
            problems.append(([table, str(name)], unknown(str(name), known, table)))
            continue
        try:
            value = _with_units(name, value) if table == "retention" else value
            checked[name] = converted(value, kinds(TABLES[table])[name])
        except ValueError as error:
            problems.append(([table, name], _said(f"{table}.{name}", error, value)))
        except ConfigError as error:
            problems.append(_inside(table, error, values))
    try:
        return TABLES[table](**checked) if len(problems) == before else None
    except ConfigError as error:
        problems.append(_inside(table, error, values))
        return None


def _inside(table: str, error: ConfigError, values: Mapping[Any, Any]) -> tuple[list[str], str]:
    """Return path and message of an error that begins with the name of a setting in a table."""
    name = re.split("[ .:]", str(error), maxsplit=1)[0]
    return [table, name], _told(f"{table}.{name}", str(error)[len(name) :], values.get(name))


def _said(name: str, error: Exception, value: Any) -> str:
    """Return the message about a wrong setting."""
    sentence = str(error)
    return _told(name, f" {sentence}" if sentence.startswith("must ") else f": {sentence}", value)


def _told(name: str, problem: str, value: Any) -> str:
    """Return a message that begins with a setting, and shows its refused value if it is too short for a secret."""
    problem, texts = problem.removesuffix("."), {repr(value), str(value).lower()}
    if isinstance(value, float | int):
        texts.add(f"{value:g}")
    if isinstance(value, Mapping):
        texts.update(repr(inner) for member in value.values() for inner in (member, str(member)))
    is_shown = any(re.search(rf"(?<!\w){re.escape(text)}(?!\w)", problem) for text in texts if len(text) > 1)
    if is_shown or "credentials" in problem or name == "storage" or len(repr(value)) > _MOST_SHOWN:
        return f"setting {name}{problem}"
    if problem.startswith(" must "):
        return f"setting {name}{problem}, not {value!r}"
    return f"setting {name} = {value!r}{problem}"


def _value(name: str, value: Any) -> Any:
    """Return the checked value of a setting that is no table of values. Raises `ValueError` and `ConfigError`."""
    if name in ("root", "cache_dir", "storage") and value is not None:
        if value == "":
            raise ValueError("must not be empty")
        if isinstance(value, bool):
            raise ValueError(f"must not be {str(value).lower()}")
        if not isinstance(value, str | Path):
            raise ValueError("must be text" if name == "storage" else "must be a path")
        return usable_uri(str(value)) if name == "storage" else absolute_path(Path(value))
    if name == "merge" and isinstance(value, str):
        text = value.strip().lower()
        try:
            return text if text == "off" else ",".join(map(human_duration, parse_tiers(text)))
        except ValueError as error:
            raise ValueError(f"must be off, or windows such as 1d,30d: {error}") from error
    if name == "item_type":
        if value is not None and not (isinstance(value, type) and issubclass(value, IndexItem)):
            raise ValueError("must be a class that derives from IndexItem")
        return value
    from tiered_index.base.conversion import converted, kinds

    if name.endswith("_s") and isinstance(value, str) and value.strip()[-1:] in UNITS_S:
        value = parse_duration(value.strip())
    try:
        return converted(value, kinds(IndexConfig)[name])
    except ValueError:
        if name in TABLES:
            example = TABLES[name].__struct_fields__[0]
            raise ValueError(f"must be a table of settings, such as {name}.{example}") from None
        if name == "coalesce_gap_bytes" and not isinstance(value, bool):
            most = f"at most {MOST:.15g}, or price"
            raise ValueError(f"must be a whole number of bytes, not negative and {most}") from None
        raise


def _with_units(name: str, value: Any) -> Any:
    """Return a value of `Retention` in seconds or bytes. Raises `ValueError`, also for an age without a unit."""
    if name == "max_bytes":
        return parse_bytes(value) if isinstance(value, str) else value
    if value is None:
        return None
    if name not in TABLES_OF_TOPICS:
        return _seconds(value)
    if isinstance(value, str):  # from an environment variable
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError("must be a table, as JSON") from error
    if not isinstance(value, Mapping):
        return value
    ages = {}
    for topic, age in value.items():
        try:
            ages[topic] = _seconds(age)
        except ValueError as error:
            raise ConfigError(f"{name}.{topic}: {error}") from error
    return ages


def _seconds(age: Any) -> Any:
    is_number = isinstance(age, int | float)
    # a truth would count as 1 or 0
    text = str(age).lower() if isinstance(age, bool) else f"{age:g}" if isinstance(age, float) else str(age)
    try:
        return parse_duration(text) if is_number or isinstance(age, str) else age
    except ValueError as error:
        hint = " as text" if is_number else ""
        raise ValueError(f"{error}{hint}") from error


def usable_uri(uri: str) -> str:
    """Return a storage's URI in this package's spelling.

    Raises `ConfigError` for one with credentials, which must not be logged or printed.
    """
    split_uri(uri)
    return spelled(uri)


def unknown(name: str, known: Iterable[str], *tables: str) -> str:
    """Return the message about a setting, in `tables`, that is not one of the `known`."""
    prefix = "".join(f"{table}." for table in tables)
    hint = f"; {tables[0]} has {', '.join(known)}" if tables else "; docs/reference.md lists the settings"
    return f"unknown setting {prefix + name!r}{did_you_mean(name.lower(), known, prefix) or hint}"


def variables() -> list[str]:
    """Return the names of environment variables that are settings."""
    return [name for name in os.environ if name.upper().startswith(PREFIX) and not _SERVICE_LINK.fullmatch(name)]


def _path(name: str) -> list[str]:
    """Return the path of the setting that a variable names. Only the names of topics keep their case."""
    field, *inner = name[len(PREFIX) :].split("__")
    return [field.lower(), *(part.lower() for part in inner[:1]), *inner[1:]]


def _in_environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _, path, value in _of_environment():
        values = with_value(values, path, value)
    return values


def _variable(path: Sequence[str]) -> str | None:
    """Return the environment variable that sets the value at `path`, or a table with it; None: there is none."""
    # not by names: a table in the environment sets only what it has
    set_as = {(PREFIX + "__".join(inner)).upper(): name for name, inner, _ in _of_environment()}
    names = [(PREFIX + "__".join(path[:count])).upper() for count in range(len(path), 0, -1)]
    return next((set_as[name] for name in names if name in set_as), None)


def _of_environment(*, is_strict: bool = False) -> Iterator[tuple[str, list[str], Any]]:
    """Yield variable, path and value of each setting in the environment. A table comes before the settings in it.

    Raises `ConfigError` for a table that is not JSON, and if `is_strict` for an unknown setting.
    """
    known = IndexConfig.__struct_fields__
    for name in sorted(variables(), key=lambda variable: variable.count("__")):
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
                what = f", not {value!r}" if len(repr(value)) <= _MOST_SHOWN else ""
                raise ConfigError(f"environment variable {name} must be a table of settings, as JSON{what}")
        # a table replaces only the settings that it has
        yield from (
            ((name, [*path, inner], member) for inner, member in value.items()) if is_table else [(name, path, value)]
        )


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
