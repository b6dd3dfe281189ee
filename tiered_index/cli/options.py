"""Options that several commands share; those of every command are in `declaring`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from tiered_index.base.units import LIKELY_SECONDS, format_time, parse_bytes, parse_duration, parse_time
from tiered_index.connectors.options import declare, pairs
from tiered_index.errors import InvalidArgument

if TYPE_CHECKING:
    from tiered_index.service.read.answers.budget import LookupLimits


def _option(parse: Callable[[str], int]) -> Callable[[str | int], int]:
    """Return `parse` for an option: a `ValueError` becomes bad usage; a default, already an integer, is kept."""

    def option(text: str | int) -> int:
        try:
            return text if isinstance(text, int) else parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return option


def _with_unit(parse: Callable[[str], int]) -> Callable[[str], dict[str, Any]]:
    """Return a function from an option's default, a text like ``1d`` that `parse` reads, to its arguments."""
    return lambda text: {"default": parse(text), "parser": _option(parse), "metavar": text, "show_default": text}


def _time(text: str, *, end: bool = False) -> int:
    """Return a time as `parse_time`. Raises `ValueError` also for a number that is a likely time only in seconds."""
    time_ms = parse_time(text, end=end)
    if text.strip().isdecimal() and LIKELY_SECONDS[0] <= time_ms < LIKELY_SECONDS[1]:
        raise ValueError(
            f"{time_ms} is {format_time(time_ms)} in epoch milliseconds: if it is in seconds, write {time_ms * 1000}, "
            "otherwise the time as ISO 8601"
        )
    return time_ms


duration, size = _with_unit(parse_duration), _with_unit(parse_bytes)
time_option, end_option = _option(_time), _option(partial(_time, end=True))
# The help texts of a time, and of the end of a range
TIME = "epoch ms, or ISO 8601 (UTC without a zone)"
LAST = "inclusive by whole seconds; a date alone includes that whole day"


@dataclass(frozen=True)
class IntakeOptions:
    """Options of commands that put entries into an index: ingest."""

    wait: bool = declare(False, "--wait", help="Seal, compact and upload everything before the command ends.")
    patience: float = declare(
        60.0,
        min=0,
        help="Seconds to wait while the disk is full or the storage does not answer. "
        "Then the command ends with exit code 7 or 3. Run it again to continue.",
    )
    allow_none: bool = declare(
        False, "--allow-none", help="Exit with 0 also if messages were read, and none of them was indexed."
    )


@dataclass(frozen=True)
class GeometryOptions:
    """Options for the size of new files: ingest."""

    slots: int | None = declare(
        help="Slots of the hash table in each file. Default: that of the index, or of the preset for a new index."
    )
    items: int | None = declare(
        help="Items in each file; item 0 stays empty. Default: that of the index, or of the preset for a new index."
    )


@dataclass(frozen=True)
class RangeOptions:
    """Options for a time range: query, topics, export, spark lookup, spark audit."""

    begin: int | None = declare(parser=time_option, metavar="T", help=f"Earliest time: {TIME}.")
    end: int | None = declare(parser=end_option, metavar="T", help=f"Latest time: {LAST}.")


# For commands that run until stopped: serve, ingest --follow
LogAs = Annotated[
    Literal["text", "json"],
    Option("--log-format", help="Form of log records on stderr: text, or JSON with one record per line."),
]


def flag_of(name: str, info: object) -> str:
    """Return the flag of an option: the first declared one, or one made from its name."""
    # within Annotated, typer stores the first declaration as the default
    first = getattr(info, "default", None)
    declared = (*([first] if isinstance(first, str) else []), *(getattr(info, "param_decls", None) or ()))
    return next((flag for flag in declared if flag.startswith("--")), "--" + name.replace("_", "-"))


def given_flags(group: Any) -> Iterator[str]:
    """Yield the flags of a group's options that were given; for an option that is on by default, its opposite."""
    for option in fields(group):
        value = getattr(group, option.name)
        if is_dataclass(value):
            yield from given_flags(value)
        elif value != option.default:
            yield flag_of(option.name, option.metadata.get("option")).rpartition("/")[2]


def refuse_others(source: str, kind: str, *groups: tuple[str, Any]) -> None:
    """Raise `InvalidArgument` for a given option of `groups` (each with its kind of source) that is not of `kind`."""
    for owner, group in groups:
        if owner != kind and (flag := next(given_flags(group), None)) is not None:
            raise InvalidArgument(f"{flag} is for {owner}, and {source} is {kind}")


_service = partial(declare, rich_help_panel="Service")
_limit = partial(declare, rich_help_panel="Limits")


@dataclass(frozen=True)
class ServiceOptions:
    """Options of commands that read an index or, in its place, a service."""

    url: str | None = _service(metavar="URL", help="Ask this service (`serve`) instead of an index.")
    token_file: Path | None = _service(metavar="FILE", help="With --url: file with the token.")


@dataclass(frozen=True)
class LimitOptions:
    """Options that limit the lookups of one command."""

    max_requests: int | None = _limit(metavar="N", help="Limit of requests to the storage.")
    max_bytes: int | None = _limit(metavar="BYTES", help="Limit of bytes read from the storage.")
    timeout: float | None = _limit(
        metavar="SECONDS", help="Time limit, also for opening the index. After it no new request starts."
    )

    @property
    def of_lookups(self) -> LookupLimits:
        """The bounds. Raises `InvalidArgument`."""
        # imported here: help needs none
        from tiered_index.service.read.answers.budget import LookupLimits

        return LookupLimits(self.max_requests, self.max_bytes, self.timeout)


@dataclass(frozen=True)
class WindowOptions:
    """Options of `merge`."""

    window: str = declare(
        "1d",
        metavar="1d|1d,30d",
        help="Length of a window, or several lengths, the shortest first. The first window begins at 1970-01-01 (UTC).",
    )
    begin: int | None = declare(
        parser=time_option,
        metavar="T",
        help="Merge files and shorter tables whose first entry is at this time or later.",
    )
    end: int | None = declare(
        parser=end_option,
        metavar="T",
        help="Merge files and shorter tables whose last entry is at this time or earlier; a date alone includes that "
        "whole day.",
    )
    min_age: int = declare(**duration("1h"), help="Merge windows that ended at least this long ago.")
    dry_run: bool = declare(False, "--dry-run", help="Print windows, sources, requests and cost; change nothing.")
    skip_lost: bool = declare(False, "--skip-lost", help="Leave out files and tables with missing objects.")


@dataclass(frozen=True)
class EraseOptions:
    """Options of the commands that erase: erase, spark erase."""

    topic: str = declare(..., metavar="T", help="Exact name of the topic.")
    key: list[str] | None = declare(metavar="K", help="Erase the entries of this key only. Repeatable.")
    queue: int | None = declare(metavar="Q", help="Erase the entries of this queue only. Needs --before.")
    before: int | None = declare(parser=time_option, metavar="T", help="Erase entries before this time. Default: now.")
    grace: int = declare(
        **duration("1h"), help="Time to keep the bytes of removed objects, for running exports and jobs."
    )
    yes: bool = declare(False, "--yes", help="Apply the changes.")
    allow_none: bool = declare(False, "--allow-none", help="Exit with 0 also if nothing matches.")


@dataclass(frozen=True)
class SparkOptions:
    """Options of the commands that run on Spark."""

    master: str | None = declare(
        help="Spark master: local[4], spark://host:7077, yarn. Default: that of spark-submit, else this machine."
    )
    conf: list[str] | None = declare(metavar="NAME=VALUE", help="Setting of Spark. Repeatable.")
    ship: bool = declare(
        False, "--ship", help="Send this package to the executors. They then need only its dependencies."
    )


Column = Annotated[
    list[str] | None,
    Option(metavar="FIELD=COLUMN", help="Read a field from this column, for example key=order_id. Repeatable."),
]
Constant = Annotated[
    list[str] | None,
    Option(metavar="FIELD=VALUE", help="Give a field this value in all entries, for example topic=orders. Repeatable."),
]


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
