"""The commands that write an index from a source, or a file from an index."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from typer import Argument, Option

from tiered_index.cli.declaring import done_by, done_with_others
from tiered_index.cli.options import RangeOptions
from tiered_index.cli.write.options import IngestOptions

Format = Literal["parquet", "ndjson", "rocketmq"]


@done_with_others("tiered_index.cli.write.ingest:ingest")
def ingest(
    sources: list[str] = Argument(
        metavar="SOURCE...",
        help="Folder of a RocketMQ store; kafka://HOST:PORT/TOPIC,...; archive:URI of an index with archived segments; "
        "NDJSON, CSV, Parquet or Arrow as a file, s3://bucket/file, or - for stdin. With --topic: files, folders and "
        "globs.",
    ),
    *,
    options: IngestOptions,
) -> None:
    """Index messages of a RocketMQ store, Kafka or a file. Run it again to continue where it stopped.

    [bold]Examples[/bold]

      tiered-index ingest /home/rocketmq/store --root /data/index --storage s3://bucket/index --follow

      tiered-index ingest /home/rocketmq/store --root /data/index --storage s3://bucket/index --topics 'order*'

      tiered-index ingest 'kafka://broker:9092/orders,payments-*' --key key --key json:order.id --root /data/index
      --storage s3://bucket/index --follow

      tiered-index ingest 's3://logs/orders/**/*.ndjson.gz' --topic orders --key order_id --key customer.id --time
      occurred_at --storage s3://bucket/index

      tiered-index ingest messages.ndjson --root /data/index --storage s3://bucket/index --wait

      tiered-index ingest day.parquet --root ./index --storage file:///tmp/store --slots 100000 --items 400000 --json

      tiered-index ingest events.csv --item-type events:DeviceEvent --column event=id --column offset=rownumber
      --root ./index --storage file:///tmp/store

      tiered-index ingest archive:s3://bucket/index --storage s3://bucket/index-2

      zcat orders.csv.gz | tiered-index ingest - --column key=order_id --constant topic=orders --root ./index --storage
      file:///tmp/store

    The command changes nothing in a store, so the broker may run. --topics, --exclude-topics, --index-tags and
    --index-prepared apply to the messages that this run reads. Entries of earlier runs stay as they are.

    With --topic, SOURCE is any number of files, folders, globs (** is any number of folders) and prefixes. They have
    NDJSON, CSV with a header, Parquet, or Arrow. Text may be packed by gzip, bzip2, xz or zstd. --key and --time name
    fields: a column, or a JMESPath such as customer.id. Numbers, true, false and UUIDs are keys as their text. The rows
    stay where they are, and `query --messages` reads them there. Run the command again to index new files and lines, or
    pass --follow. Without --root the command uses a folder of your state directory.

    Without --topic, a file has messages. An NDJSON line has the members topic, queue_id, offset, size and timestamp_ms.
    It also has key, or keys (a list). A number as a key keeps the text that it was written with. An empty key is none.
    The line may have topic_id. CSV and Parquet have columns with these names. To index columns of your own, name the
    class of your entries with --item-type. The command ignores all other columns, and prints their names. With
    `--column offset=rownumber` the offset is the row's number.

    If a file has grown, the command reads its new part. If its start has changed, the command fails unless you
    pass --restart. It compares only the text that the first run found, at most 1 MiB. stdin is read from its start each
    time. Lookups show an entry once, even if you put it twice.

    A file that `export` wrote (Parquet, or NDJSON, also packed) puts the same entries, with their hashes of
    keys. NDJSON can also come from stdin. An export has no source positions, erasures and expiries: `copy` keeps them.

    archive:URI indexes the archived segments of RocketMQ, records of Kafka and rows of files in the index at URI,
    as `ingest` would index the store, the topics and the files. It copies the records and the rows. It works even
    if all files of that index are lost, and names what it can't read (exit code 1). Entries that expired or were
    erased there stay out. The new index gets the same slots, items and preset, and a storage of its own, outside
    the old one. Without --root the command uses a temporary folder, and uploads everything before it ends.
    --dry-run compares count and checksum of one store's entries with the index's. Exit code 1: they differ.

    Each partition of Kafka continues at its own position. If a topic was deleted and created again, the command reads
    it from its start, and reports it as rewritten. Kafka before 2.8 is not supported.
    """


@done_by("tiered_index.cli.write.export:export")
def export(
    out: Path = Option(metavar="PATH", help="File to write, or - for stdout. Format rocketmq: a folder."),
    form: Format | None = Option(
        None, "--format", help="Format. Default: by the ending of the name, else parquet; ndjson for stdout."
    ),
    topic: list[str] | None = Option(None, help="Export this topic only. Repeatable."),
    slots: int | None = Option(None, help="With --format rocketmq: hash slots per file, as its reader expects."),
    items: int | None = Option(None, help="With --format rocketmq: items per file, as its reader expects."),
    *,
    within: RangeOptions,
) -> None:
    """Export the entries of an index as one consistent snapshot.

    [bold]Examples[/bold]

      tiered-index export --storage s3://bucket/index --out entries.parquet

      tiered-index export --root /data/index --topic orders --begin 2026-11-01 --out orders.ndjson

      tiered-index export --root /data/index --topic orders --out - | sort

      tiered-index export --storage file:///tmp/store --out rocketmq-files --format rocketmq --slots 5000000 --items
      20000000

    A row is one entry: topic, topic_id, queue_id, offset, size, timestamp_ms, hashes of the key, and columns of your
    own. If the index has files, there are file and row, too. An index does not store keys. `export` and `ingest` print
    the number of entries, and a checksum that does not depend on their order. Compare these to see that no entry is
    missing. In Parquet, timestamp_ms is a timestamp; in NDJSON it is epoch milliseconds.

    If the storage of --root does not answer or is lost, the command exports the root's files. It names the objects that
    only the storage has, and ends with exit code 6.
    """
