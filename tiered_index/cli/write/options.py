"""The options of `tiered-index ingest`, by the kinds of source that they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tiered_index.cli.options import Column, Constant, GeometryOptions, IntakeOptions, LogAs
from tiered_index.connectors.files.spec import FilesOptions, RowOptions
from tiered_index.connectors.kafka.spec import KafkaOptions
from tiered_index.connectors.options import declare
from tiered_index.connectors.rocketmq.spec import RocketmqOptions

ARCHIVE_SCHEME = "archive:"
"""The scheme of a source that is the archive of an index."""


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
class IngestOptions:
    """All options of `ingest`."""

    run: RunOptions
    of_files: FileOptions
    of_rows: RowOptions
    rocketmq: RocketmqOptions
    kafka: KafkaOptions
    geometry: GeometryOptions
    intake: IntakeOptions

    @property
    def files(self) -> FilesOptions:
        """The options of rows of files."""
        kafka = self.kafka
        of_keys: dict[str, Any] = {"key": kafka.key, "drop_key": kafka.drop_key, "archive": kafka.archive}
        return FilesOptions(rows=self.of_rows, skip_bad=self.of_files.skip_bad, **of_keys)

    @property
    def of_connectors(self) -> tuple[Any, ...]:
        """The options of each connector of this package."""
        return self.files, self.kafka, self.rocketmq

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the index that have options."""
        return {"preset": self.run.preset, "hash": self.run.hash_rule, **vars(self.geometry)}
