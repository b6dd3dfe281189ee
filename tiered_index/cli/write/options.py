"""The options of `tiered-index ingest`, by the kinds of source that they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tiered_index.cli.options import Column, Constant, GeometryOptions, IntakeOptions, LogAs
from tiered_index.connectors.kafka.spec import KafkaOptions
from tiered_index.connectors.options import declare
from tiered_index.connectors.registry import ConnectorSpec
from tiered_index.connectors.rocketmq.spec import RocketmqOptions
from tiered_index.errors import InvalidArgument

if TYPE_CHECKING:
    from tiered_index.connectors.files.rows.mapping import RowMapping

ARCHIVE_SCHEME = "archive:"
"""The scheme of a source that is the archive of an index."""
DEFAULT_TIME = "timestamp"
"""The field of a row that has its time, by default."""
_files = partial(declare, rich_help_panel="Files of any form")


@dataclass(frozen=True)
class RunOptions:
    """Options of `ingest` that do not depend on the kind of its source, or say which kinds they are for."""

    preset: Literal["native", "rocketmq"] | None = declare(
        help="File format: native, or that of RocketMQ's IndexStoreFile."
    )
    hash_rule: Literal["abs", "mask"] | None = declare(
        None, "--hash", help="With preset rocketmq: abs for RocketMQ up to 5.5.0, mask from 5.5.1 on."
    )
    restart: bool = declare(False, "--restart", help="Read the source from its start, even if it has changed.")
    follow: bool = declare(
        False, "--follow", help="Keep indexing new messages, or new rows of files, until SIGTERM or SIGINT."
    )
    store_name: str | None = declare(
        help="Name of the source in the index. Default: its path, or the cluster's id. Give a name to a file that may "
        "move."
    )
    dry_run: bool = declare(
        False,
        "--dry-run",
        help="Write nothing. With archive:URI: compare the archive's entries with the index's. With --topic: print the "
        "first rows as they would be indexed.",
    )
    poll: float | None = declare(
        None, min=0.01, metavar="S", help="With --follow: seconds between checks. Default: 0.2, for files 10."
    )
    log_format: LogAs = "text"


@dataclass(frozen=True)
class FileOptions:
    """Options of files of messages."""

    skip_bad: bool = declare(
        False, "--skip-bad", help="Skip invalid messages. Print the first ten, and the number for each reason."
    )
    column: Column = None
    constant: Constant = None
    item_type: str | None = declare(metavar="MODULE:CLASS", help="Class of entries with your own columns.")


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

    def mapping(self, keys: Sequence[str] | None) -> tuple[str | None, RowMapping]:
        """Return the topic of all rows (None: a field has it) and the mapping. Raises `InvalidArgument`."""
        # imported here: other sources do not need it
        from tiered_index.connectors.files.rows.mapping import TOPIC_FIELD, Dialect, RowMapping
        from tiered_index.connectors.files.rows.zone import TimeZone

        if self.topic is None:
            raise InvalidArgument("--topic is missing: it names the topic of the rows")
        unit = None if self.time_unit in (None, "auto") else self.time_unit
        path = self.topic.removeprefix(TOPIC_FIELD) if self.topic.startswith(TOPIC_FIELD) else None
        dialect = None
        if self.delimiter is not None or self.quote is not None:
            delimiter = "\t" if self.delimiter == "\\t" else self.delimiter
            dialect = Dialect(delimiter, {None: '"', "none": ""}.get(self.quote, self.quote or "none"))
        zone = None if self.time_zone is None else TimeZone(self.time_zone)
        of_times: Any = {"unit": unit, "zone": zone}
        mapping = RowMapping(tuple(keys or ()), self.time or DEFAULT_TIME, topic=path, dialect=dialect, **of_times)
        return (self.topic if path is None else None), mapping


@dataclass(frozen=True)
class IngestOptions:
    """All options of `ingest`."""

    run: RunOptions
    of_files: FileOptions
    of_rows: RowOptions
    rocketmq: RocketmqOptions
    kafka: KafkaOptions
    geometry: GeometryOptions
    intake: IntakeOptions

    def of(self, spec: ConnectorSpec) -> Any:
        """Return the options of a connector; None: it has none."""
        return getattr(self, spec.name, None)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the index that have options."""
        return {"preset": self.run.preset, "hash": self.run.hash_rule, **vars(self.geometry)}
