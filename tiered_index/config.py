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
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import ErrorDetails

from tiered_index.errors import ConfigError, StorageMisconfigured, did_you_mean
from tiered_index.format.hashing import HashRule
from tiered_index.format.layout import PRESETS, ROCKETMQ, Layout
from tiered_index.format.schema import Schema
from tiered_index.retention import Retention, parse_bytes, parse_duration
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import absolute_path
from tiered_index.storage.opening import open_storage, split_uri
from tiered_index.storage.prices import PriceTable
from tiered_index.storage.s3.options import S3Options
from tiered_index.types import IndexItem

if TYPE_CHECKING:
    # exists only as a stub, which is generated from the fields of `IndexConfig`
    from tiered_index._settings import Settings

_PREFIX = "TIERED_INDEX_"
# Environment variables of this package's tests, which are not settings
_TESTS_PREFIX = "TIERED_INDEX_TEST_"
# Variables that Kubernetes sets in each pod for a Service whose name begins with tiered-index
_SERVICE_LINK = re.compile(
    r"TIERED_INDEX_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
_YEAR_S = 365.25 * 86400
# Settings that are tables, with the names of the settings in each
TABLES: dict[str, Collection[str]] = {
    "s3": [each.name for each in fields(S3Options)],
    "prices": PriceTable.__dataclass_fields__,
    "retention": Retention.__dataclass_fields__,
}
_AGES = ("age_s", "segments_age_s", "grace_s")


class IndexConfig(BaseModel):
    """The settings of an index. Times are in seconds, sizes in bytes. Raises `ConfigError`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, validate_default=True, hide_input_in_errors=True
    )

    root: Path | None = Field(None, description="folder of the local files; one writer at a time")
    storage: str | None = Field(
        None,
        description="storage URI: file:///dir, s3://bucket/prefix, gs:// and az://, sqlite:///file.db, memory://name",
    )
    preset: Literal["native", "rocketmq"] = Field("native", description="file format; rocketmq writes RocketMQ's own")
    hash: Literal["abs", "mask"] | None = Field(
        None, description="with preset rocketmq: hash rule of new files; None: the index's rule, mask for a new index"
    )
    slots: int | None = Field(
        None, gt=0, description="hash slots per file; None: 1,000,000, or 5,000,000 with preset rocketmq"
    )
    items: int | None = Field(
        None,
        gt=1,
        description="one more than the most entries of a file; None: 4,000,000, or 20,000,000 with preset rocketmq",
    )
    item_type: type[IndexItem] | None = Field(
        None, exclude=True, description="class of entries; None: the class of the preset"
    )
    offset_space: Literal["commitlog", "tiered_queue", "custom"] = Field(
        "custom", description="meaning of `offset`: a position in a commit log, in a tiered queue, or your own number"
    )
    flush_interval_s: float = Field(0.5, gt=0, description="longest time that an entry stays only in the write buffer")
    buffer_max_entries: int = Field(2_000_000, gt=0, description="most entries in the write buffer")
    buffer_max_bytes: int = Field(512 << 20, gt=0, description="most memory of the write buffer, estimated")
    disk_max_bytes: int | None = Field(None, gt=0, description="most bytes of local files; None: the size of the disk")
    seal_after_s: float = Field(3 * 3600, gt=0, description="age at which a file is sealed; may be less than a second")
    compaction: Literal["local", "spark"] = Field(
        "local", description="where sealed files are compacted: on this host, or by jobs of `spark compact`"
    )
    compact_timeout_s: float = Field(
        3600, gt=0, description="time that a staged file waits for a job before this host compacts it"
    )
    local_keep_s: float = Field(86400, ge=0, description="time that an uploaded file keeps its local copy")
    local_keep_bytes: int | None = Field(
        None, ge=0, description="most bytes of local copies of uploaded files; the oldest are deleted first"
    )
    max_late_s: float = Field(20 * _YEAR_S, gt=0, description="entries older than this go to quarantine")
    max_early_s: float = Field(86400, gt=0, description="entries further in the future than this go to quarantine")
    upload_part_bytes: int = Field(16 << 20, ge=5 << 20, description="larger files are uploaded in parts of this size")
    query_threads: int = Field(32, gt=0, le=256, description="ranges read from the storage in parallel")
    coalesce_gap_bytes: int | Literal["price"] = Field(
        256 << 10,
        description="largest gap between two slot groups that one request reads; `price` computes it from `prices`",
    )
    block_cache_bytes: int = Field(64 << 20, ge=0, description="memory for verified slot groups of stored files")
    directory_cache_bytes: int = Field(
        256 << 20, ge=0, description="memory for directories of stored files; filters get half as much in addition"
    )
    cache_dir: Path | None = Field(
        None,
        description="folder for cached directories and filters; None: in the root; without a root, no cache on disk",
    )
    cache_max_bytes: int = Field(4 << 30, gt=0, description="most bytes in `cache_dir`")
    filter_after_probes: int = Field(
        8, gt=0, description="a file's filter is fetched after this many reads of the file without a match"
    )
    prices: PriceTable = Field(
        default_factory=PriceTable, description="price list for estimated costs; S3 Standard's as of 2026-11"
    )
    retention: Retention = Field(default_factory=Retention, description="rule of expiry; by default nothing expires")
    lease_ttl_s: float = Field(
        60,
        gt=0,
        description="time to live of the writer's lease: after a crash, a writer on another host waits this long",
    )
    lifecycle_interval_s: float = Field(
        1.0, gt=0, description="pause between rounds that seal, compact, upload and retire files"
    )
    refresh_interval_s: float = Field(30, ge=0, description="time between reads of the storage's log for new records")
    checkpoint_every: int | None = Field(None, gt=0, description="log records per checkpoint; None: 1")
    background: bool = Field(True, description="run the flusher and the life cycle in threads of their own")
    raise_file_limit: bool = Field(
        True, description="raise the process's soft limit of open files, and leave it raised after closing"
    )
    s3: S3Options = Field(default_factory=S3Options, description="how to reach S3")

    def __init__(self, *, environment: bool = True, **values: Any) -> None:
        """Make settings from arguments. The environment supplies the others, unless `environment` is false.

        Raises `ConfigError` naming every key that is unknown or wrong.
        """
        try:
            if environment:
                of_environment: dict[str, Any] = {}
                for path, value in _of_environment(type(self).model_fields):
                    of_environment = with_value(of_environment, path, value)
                values = _merged(of_environment, values)
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_problems(error)) from error

    def open_storage(self, uri: str | None = None) -> Storage:
        """Open the storage at `uri` (None: the index's storage) with the options set here. Raises `ConfigError`."""
        return open_storage(
            str(self.storage) if uri is None else uri, options=self.s3, parallel_reads=self.query_threads
        )

    @field_validator("*", mode="before")
    @classmethod
    def _no_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and annotation is not bool and bool not in get_args(annotation):
            raise ValueError(f"must not be {str(value).lower()}")  # pydantic converts it to 1 or 0
        return value

    @field_validator("coalesce_gap_bytes", mode="before")
    @classmethod
    def _gap(cls, value: Any) -> Any:
        if value == "price" or isinstance(value, bool):
            return value
        try:
            gap = int(value)
            is_whole = gap >= 0 and (not isinstance(value, float) or gap == value)
        except (OverflowError, TypeError, ValueError):
            is_whole = False
        if not is_whole:
            raise ValueError("must be a whole number of bytes, not negative, or price")
        return gap

    @field_validator("retention", mode="before")
    @classmethod
    def _with_units(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        parsed = dict(value)
        if isinstance(parsed.get("max_bytes"), str):
            parsed["max_bytes"] = _parsed(parse_bytes, "max_bytes", parsed["max_bytes"])
        topics = parsed.get("topics")
        if isinstance(topics, str):  # from an environment variable
            try:
                topics = parsed["topics"] = json.loads(topics)
            except json.JSONDecodeError as error:
                raise ValueError("topics must be a table, as JSON") from error
        if isinstance(topics, Mapping):
            parsed["topics"] = {p: _parsed(parse_duration, f"topics.{p}", age) for p, age in topics.items()}
        ages = {name: _parsed(parse_duration, name, parsed[name]) for name in _AGES if parsed.get(name) is not None}
        return parsed | ages

    @field_validator("root", "cache_dir", "storage", *TABLES, mode="wrap")
    @classmethod
    def _usable(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            if value == "":
                raise ValueError("must not be empty")
            if info.field_name == "storage" and isinstance(value, Path):
                value = str(value)
            value = handler(value)
            if info.field_name == "storage" and value is not None:
                # refuse a URI with credentials before the settings are logged or printed
                split_uri(value)
            return absolute_path(value) if isinstance(value, Path) else value
        except StorageMisconfigured:
            raise
        except ConfigError as error:
            # pydantic adds the name of the setting
            raise ValueError(str(error)) from error

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
            try:
                values = tomllib.loads(absolute_path(config_file).read_text("utf-8"))
            except OSError as error:
                raise ConfigError(f"{config_file} can't be read: {error.strerror}") from error
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{config_file} is not TOML: {error}") from error
        in_file = dict(values)
        for path, value in _of_environment(cls.model_fields, is_strict=True) if environment else ():
            values = with_value(values, path, value)
        given_values = {name: value for name, value in given.items() if value is not None}
        try:
            return cls(environment=False, **_merged(values, given_values))
        except ConfigError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            problems = _problems(error.__cause__, given_values, in_file, config_file, environment)
            raise ConfigError(problems) from error.__cause__

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


def _variables() -> list[str]:
    """Return the names of environment variables that are settings."""
    return [name for name in os.environ if name.upper().startswith(_PREFIX) and not _SERVICE_LINK.fullmatch(name)]


def _path(name: str) -> list[str]:
    """Return the path of the setting that a variable names. Only the names of topics keep their case."""
    field, *inner = name[len(_PREFIX) :].split("__")
    return [field.lower(), *(part.lower() for part in inner[:1]), *inner[1:]]


def _of_environment(known: Collection[str], *, is_strict: bool = False) -> Iterator[tuple[list[str], Any]]:
    """Yield the path and the value of each setting in the environment. A table comes before the settings in it.

    Raises `ConfigError` for a table that is not JSON, and if `is_strict` for an unknown setting.
    """
    for name in sorted(_variables(), key=lambda each: each.count("__")):
        path = _path(name)
        if path[0] not in known or (path[1:] and path[0] not in TABLES):
            if is_strict and not name.upper().startswith(_TESTS_PREFIX):
                raise ConfigError(f"environment variable {name}: {_unknown('.'.join(path), known)}")
            continue
        value: Any = os.environ[name]
        if not value:
            continue
        is_table = path[0] in TABLES and len(path) == 1
        if is_table or path == ["retention", "topics"]:
            with contextlib.suppress(ValueError):
                value = json.loads(value)
            if is_table and not isinstance(value, dict):
                raise ConfigError(f"environment variable {name} must be a table of settings, as JSON")
        yield path, value


_SENTENCES = {
    "bool_": "must be true or false",
    "int_": "must be a whole number",
    "float_": "must be a number",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length:,} characters",
    "string_": "must be text",
    "path_": "must be a path",
    "dict_type": "must be a table",
    "literal_error": "must be one of {expected}",
    "greater_than_equal": "must be at least {ge:.15g}",
    "greater_than": "must be greater than {gt:.15g}",
    "less_than_equal": "must be at most {le:.15g}",
    "less_than": "must be less than {lt:.15g}",
    "is_subclass_of": "must be a class that derives from {class}",
    "model_": "must be a table of settings",
    "dataclass_": "must be a table of settings",
}


def _problems(
    error: ValidationError,
    given: dict[str, Any] | None = None,
    in_file: dict[str, Any] | None = None,
    file: Path | None = None,
    environment: bool = True,
) -> str:
    """Return a message that lists all problems, each with the environment variable or the file that has it."""
    variables = {name.upper(): name for name in _variables()} if environment else {}
    by_place: dict[str, list[str]] = {}
    for each in error.errors():
        path, problem = _problem(each)
        names = [(_PREFIX + "__".join(path[:count])).upper() for count in range(len(path), 0, -1)]
        variable = next((variables[name] for name in names if name in variables), None)
        if given is None or holds(given, path):
            place = ""
        elif variable is not None:
            place = f"environment variable {variable}: "
        else:
            place = f"{file}: " if in_file and holds(in_file, path) else ""
        by_place.setdefault(place, []).append(problem)
    return "; ".join(place + "; ".join(problems) for place, problems in by_place.items())


def _problem(error: ErrorDetails) -> tuple[list[str], str]:
    """Return the path of a pydantic error, and a message. The message omits the value, which may be a secret."""
    path = [str(part) for part in error["loc"]]
    name = ".".join(path) or "settings"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return path, _unknown(path[-1], TABLES[path[0]] if path[1:] else IndexConfig.model_fields, *path[:-1])
    sentence = in_our_words(error)
    if error["type"] != "value_error":
        return path, f"setting {name} {sentence}"
    if name in TABLES:
        # a message about a table begins with the name of a setting in it
        inner = re.split("[ .:]", sentence, maxsplit=1)[0]
        return [name, inner], f"setting {name}.{sentence}"
    return path, f"setting {name}: {sentence}"


def _parsed(parse: Callable[[str], int], name: str, value: Any) -> Any:
    """Parse a setting in a table. Raises `ValueError` naming the setting, also for an age without a unit."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value:g}" if isinstance(value, float) else str(value)
    try:
        return parse(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def in_our_words(error: ErrorDetails) -> str:
    """Return a message for a pydantic error. Only our own checks quote the value, which may be a secret."""
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(context["error"]).removesuffix(".")
    sentence = next((ours for kind, ours in _SENTENCES.items() if error["type"].startswith(kind)), None)
    return sentence.format_map(context) if sentence is not None else error["msg"]


def _unknown(name: str, known: Iterable[str], *tables: str) -> str:
    prefix = "".join(f"{table}." for table in tables)
    return f"unknown setting {prefix + name!r}{did_you_mean(name.lower(), known, prefix)}"


def _merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Return both merged; `high` wins, nested tables are merged key by key."""
    result = dict(low)
    for name, value in high.items():
        below = result.get(name)
        result[name] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def with_value(values: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of nested tables with `value` at `path`."""
    first, *inner = path
    if inner:
        below = values.get(first)
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
