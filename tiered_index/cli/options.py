"""Options that several commands share; those of every command are in `session`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer import Argument, Option
from typer.models import OptionInfo

from tiered_index.errors import InvalidArgument
from tiered_index.retention import parse_bytes
from tiered_index.retention import parse_duration as parse_duration
from tiered_index.service.lookup.budget import LookupLimits
from tiered_index.types import parse_time

_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def human_duration(seconds: int) -> str:
    """Return a duration in the largest unit that divides it: ``30d``, ``90m``."""
    unit = next(unit for unit, size in _UNITS_S.items() if not seconds % size)
    return f"{seconds // _UNITS_S[unit]}{unit}"


def _option(parse: Callable[[str], int]) -> Callable[[str | int], int]:
    """Return `parse` for an option: a `ValueError` becomes bad usage; a default, already an integer, is kept."""

    def option(text: str | int) -> int:
        try:
            return text if isinstance(text, int) else parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return option


time_option, duration_option, bytes_option = _option(parse_time), _option(parse_duration), _option(parse_bytes)
end_option = _option(partial(parse_time, end=True))
# The help texts of a time, and of the end of a range
TIME = "epoch ms, or ISO 8601 (UTC without a zone)"
LAST = "inclusive, by the second; a date alone is its whole day"


@dataclass(frozen=True)
class IntakeOptions:
    """Options of commands that put entries into an index: ingest, import, import-classic, rebuild."""

    wait: Annotated[bool, Option("--wait", help="Seal, compact and upload everything before the command ends.")] = False
    patience: Annotated[
        float, Option(min=0, help="Seconds to wait while the disk is full or the storage does not answer.")
    ] = 60.0


@dataclass(frozen=True)
class GeometryOptions:
    """Options for the size of new files: ingest, import, rebuild."""

    slots: Annotated[
        int | None, Option(help="Hash slots per file. Default: those of the index; for a new index, of the preset.")
    ] = None
    items: Annotated[
        int | None, Option(help="Items per file. Default: those of the index; for a new index, of the preset.")
    ] = None


@dataclass(frozen=True)
class RangeOptions:
    """Options for a time range: query, topics, export, spark lookup, spark audit."""

    begin: Annotated[
        int | None, Option(parser=time_option, metavar="T", help=f"Earliest time: {TIME}.", show_default=False)
    ] = None
    end: Annotated[
        int | None, Option(parser=end_option, metavar="T", help=f"Latest time: {LAST}.", show_default=False)
    ] = None


# For commands that read single files: inspect, dump, verify
File = Annotated[
    str, Argument(metavar="FILE", help="Path, object name, or file id (its end is enough).", show_default=False)
]

# For commands that run until stopped: serve, ingest --follow
LogAs = Annotated[
    Literal["text", "json"],
    Option("--log-format", help="Form of log records on stderr. JSON has one record per line. -v logs each request."),
]

# For commands that follow a store: ingest --follow, serve --follow
MaxLag = Annotated[
    float | None,
    Option(
        min=0,
        metavar="SECONDS",
        help="/readyz fails while the follower is further behind its source.",
        show_default=False,
    ),
]

of_store = partial(Option, rich_help_panel="RocketMQ stores")


@dataclass(frozen=True)
class SelectionOptions:
    """Options that select the messages of a store: ingest, rebuild."""

    topics: Annotated[
        list[str] | None,
        of_store(
            metavar="PATTERN",
            help="Index matching topics only, for example 'order*'. Repeatable. Default: all except internal ones.",
        ),
    ] = None
    exclude_topics: Annotated[
        list[str] | None, of_store(metavar="PATTERN", help="Leave out matching topics. Repeatable.")
    ] = None
    index_tags: Annotated[
        bool, of_store("--index-tags", help="Also index messages by their tags, for query --tag.")
    ] = False
    index_prepared: Annotated[
        bool, of_store("--index-prepared", help="Also index prepared messages of transactions.")
    ] = False

    @property
    def arguments(self) -> tuple[tuple[str, ...], tuple[str, ...], bool, bool]:
        """The arguments of a `Selection`."""
        return tuple(self.topics or ()), tuple(self.exclude_topics or ()), self.index_tags, self.index_prepared


@dataclass(frozen=True)
class ArchiveOptions:
    """Options for archiving a followed store: ingest, serve."""

    archive_segments: Annotated[
        bool, of_store("--archive-segments", help="Upload each closed segment of the commit log.")
    ] = False
    archive_queues: Annotated[
        bool,
        of_store(
            "--archive-queues",
            help="As --archive-segments, and also store queue offsets, so that clients can pull from the archive.",
        ),
    ] = False


def flag_of(name: str, info: object) -> str:
    """Return the flag of an option: the first declared one, or one made from its name."""
    # within Annotated, typer stores the first declaration as the default
    first = getattr(info, "default", None)
    declared = (*([first] if isinstance(first, str) else []), *(getattr(info, "param_decls", None) or ()))
    return next((each for each in declared if each.startswith("--")), "--" + name.replace("_", "-"))


def given_flags(group: Any) -> Iterator[str]:
    """Yield the flags of a group's options that were given; for an option that is on by default, its opposite."""
    hints = get_type_hints(type(group), include_extras=True)
    for each in fields(group):
        if getattr(group, each.name) != each.default:
            info = next(i for i in hints[each.name].__metadata__ if isinstance(i, OptionInfo))
            yield flag_of(each.name, info).rpartition("/")[2]


def refuse_others(source: str, kind: str, *groups: tuple[str, Any]) -> None:
    """Raise `InvalidArgument` for a given option of `groups` (each with its kind of source) that is not of `kind`."""
    for owner, group in groups:
        if owner != kind and (given := next(given_flags(group), None)) is not None:
            raise InvalidArgument(f"{given} is for {owner}, and {source} is {kind}")


_service = partial(Option, show_default=False, rich_help_panel="Service")
_limit = partial(Option, show_default=False, rich_help_panel="Limits")


@dataclass(frozen=True)
class ServiceOptions:
    """Options of commands that read an index or, in its place, a service."""

    url: Annotated[str | None, _service(metavar="URL", help="Ask this service (`serve`) instead of an index.")] = None
    token_file: Annotated[Path | None, _service(metavar="FILE", help="With --url: file with the token.")] = None


@dataclass(frozen=True)
class LimitOptions:
    """Options that limit the lookups of one command."""

    max_requests: Annotated[int | None, _limit(metavar="N", help="Limit of requests to the storage.")] = None
    max_bytes: Annotated[int | None, _limit(metavar="BYTES", help="Limit of bytes read from the storage.")] = None
    timeout: Annotated[
        float | None,
        _limit(metavar="SECONDS", help="Time limit, also for opening the index. After it no new request starts."),
    ] = None

    @property
    def of_lookups(self) -> LookupLimits:
        """The bounds. Raises `InvalidArgument`."""
        return LookupLimits(self.max_requests, self.max_bytes, self.timeout)


@dataclass(frozen=True)
class WindowOptions:
    """Options of the commands that merge: merge, spark merge."""

    window: Annotated[
        int,
        Option(
            parser=duration_option,
            metavar="1h|1d|30d",
            help="Length of a window. Windows start at multiples of it since 1970 (UTC).",
            show_default="1d",
        ),
    ] = 86400
    tiers: Annotated[
        str | None, Option(metavar="1d,30d", help="Several window lengths, the shortest first, in place of --window.")
    ] = None
    begin: Annotated[
        int | None, Option(parser=time_option, metavar="T", help="Merge windows that begin at this time or later.")
    ] = None
    end: Annotated[
        int | None,
        Option(parser=end_option, metavar="T", help="Merge windows that end at this time or earlier (inclusive)."),
    ] = None
    min_age: Annotated[
        int,
        Option(
            parser=duration_option,
            metavar="1h",
            help="Merge windows that ended at least this long ago.",
            show_default="1h",
        ),
    ] = 3600
    dry_run: Annotated[bool, Option("--dry-run", help="Print windows, sources, requests and cost; change nothing.")] = (
        False
    )
    skip_lost: Annotated[bool, Option("--skip-lost", help="Skip tables with missing objects.")] = False


# For commands that delete: expire, erase
Yes = Annotated[bool, Option("--yes", help="Apply the changes.")]


@dataclass(frozen=True)
class EraseOptions:
    """Options of the commands that erase: erase, spark erase."""

    topic: Annotated[str, Option(metavar="T", help="Exact name of the topic.")]
    key: Annotated[list[str] | None, Option(metavar="K", help="Erase this key only. Repeatable.")] = None
    queue: Annotated[int | None, Option(metavar="Q", help="Erase this queue only.", show_default=False)] = None
    before: Annotated[
        int | None, Option(parser=time_option, metavar="T", help="Erase entries before this time. Default: now.")
    ] = None
    grace: Annotated[
        int,
        Option(
            parser=duration_option,
            metavar="1h",
            help="Time to keep the bytes of removed objects, for running exports and jobs.",
            show_default="1h",
        ),
    ] = 3600
    yes: Yes = False


@dataclass(frozen=True)
class SparkOptions:
    """Options of the commands that run on Spark."""

    master: Annotated[
        str | None,
        Option(
            help="Spark master: local[4], spark://host:7077, yarn. Default: that of spark-submit, else this machine."
        ),
    ] = None
    conf: Annotated[list[str] | None, Option(metavar="NAME=VALUE", help="Setting of Spark. Repeatable.")] = None
    ship: Annotated[
        bool, Option("--ship", help="Send this package to the executors. They then need only its dependencies.")
    ] = False


Column = Annotated[
    list[str] | None,
    Option(metavar="FIELD=COLUMN", help="Read a field from this column, for example key=order_id. Repeatable."),
]
Constant = Annotated[
    list[str] | None,
    Option(metavar="FIELD=VALUE", help="Give a field this value in all entries, for example topic=orders. Repeatable."),
]


def pairs(option: str, given: Sequence[str] | None) -> dict[str, str]:
    """Return ``name=value`` options as a dict. Raises `InvalidArgument`, which names the option."""
    found: dict[str, str] = {}
    for text in given or ():
        name, mark, value = text.partition("=")
        if not mark or not name or not value or name in found:
            # without the value, which may be a secret
            raise InvalidArgument(f"write {option} as NAME=VALUE, each name once: name {name!r}")
        found[name] = value
    return found


def given_columns(
    column: Sequence[str] | None, constant: Sequence[str] | None, texts: Collection[str] = ("topic", "key")
) -> tuple[dict[str, str], dict[str, str]]:
    """Return both options as dicts; constants other than `texts` must be whole numbers. Raises `InvalidArgument`."""
    columns, constants = pairs("--column", column), pairs("--constant", constant)
    if both := sorted(columns.keys() & constants.keys()):
        raise InvalidArgument(f"{both[0]} is given by --column and by --constant")
    for name, value in constants.items():
        if name not in texts and not value.removeprefix("-").isdecimal():
            raise InvalidArgument(f"--constant {name}={value}: a whole number is needed")
    return columns, constants
