"""What commands need to know of files before they load what reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from tiered_index.connectors.options import declare
from tiered_index.connectors.registry import FILES, ConnectorSpec, Words

DEFAULT_TIME = "timestamp"
"""The field of a row that has its time, by default."""
_files = partial(declare, rich_help_panel="Files of any form")


@dataclass(frozen=True)
class RowOptions:
    """Options of files whose rows are indexed where they are: ingest. `--key` is that of Kafka, too."""

    topic: str | None = _files(
        None,
        metavar="NAME",
        help="Topic of the rows, or field:PATH: the field with the topic of a row. With it, SOURCE is files of any "
        "form.",
    )
    time: str | None = _files(
        None,
        metavar="PATH",
        help="Time of a row: ISO 8601, 29.11.2026 14:05, or a number of --time-unit. Default: timestamp.",
    )
    time_unit: Literal["auto", "s", "ms", "us", "ns"] | None = _files(
        None, "--time-unit", help="Unit of times that are numbers. Default: auto, by the first one."
    )
    time_zone: str | None = _files(
        None,
        "--time-zone",
        metavar="ZONE",
        help="Zone of times that have none, such as Europe/Berlin. Default: UTC, or that of earlier runs.",
    )
    delimiter: str | None = _files(
        None, metavar="CHAR", help="Character between values of CSV. Default: comma, tab, ; or |, by the header."
    )
    quote: str | None = _files(None, metavar="CHAR", help='Quote around values of CSV, or none. Default: ".')
    strict: bool = _files(
        False,
        "--strict",
        help="End at the first file or archive that can't be read as a whole, and at the first bad row.",
    )


@dataclass(frozen=True)
class FilesOptions:
    """Options for following the rows of files. A command may declare these in groups of its own."""

    rows: RowOptions = field(default_factory=RowOptions)
    key: list[str] | None = None
    drop_key: list[str] | None = None
    archive: bool = False
    skip_bad: bool = False


SPEC = ConnectorSpec(
    name=FILES,
    title="a file",
    words=Words(
        "file",
        "row",
        "no file of the topic has it",
        "it is a topic of files: look up a key",
        message="row",
        key="key",
        in_files=True,
    ),
    open="tiered_index.connectors.files.connector:CONNECTOR",
    claims=None,
    several=True,
    options=FilesOptions,
    # as tiered_index.format.names has them, which the help of commands does not load
    stores=("files:", "rows:", "points:"),
)
