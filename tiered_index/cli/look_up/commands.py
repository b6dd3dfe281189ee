"""The commands that look up: entries, messages, topics and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from typer import Argument, Option

from tiered_index.cli.declaring import done_by
from tiered_index.cli.options import LimitOptions, RangeOptions, ServiceOptions
from tiered_index.connectors.kafka.spec import KafkaClientOptions
from tiered_index.connectors.options import declare
from tiered_index.errors import InvalidArgument

# each page reads the files again
_PAGE = 100_000
# Small: a message may have megabytes.
_PAGE_OF_MESSAGES = 256
_FEW = 64


@dataclass(frozen=True)
class QueryOptions:
    """Options of `query`."""

    tag: bool = declare(False, "--tag", help="Look up KEY as a tag. The index must have tags (`ingest --index-tags`).")
    max_count: int | None = declare(
        None,
        "--max",
        help="Limit of entries (default 64). With --all: entries per page (default 100,000; of a service 1,000; with "
        "--messages 256).",
    )
    cursor: str | None = declare(help="Continue the truncated answer that gave this cursor.")
    explain: bool = declare(False, "--explain", help="Print the files, requests, bytes and cost of the lookup.")
    every: bool = declare(
        False, "--all", help="Print all entries. With --json: one per line; the last line is the status."
    )
    allow_partial: bool = declare(
        False, "--allow-partial", help="Answer from the readable files, and name the others (exit code 6)."
    )
    messages: bool = declare(
        False, "--messages", help="Print the messages, from --store, a broker, the archive or files."
    )
    store: str | None = declare(
        metavar="SOURCE", help="With --messages: folder of a RocketMQ store, or another source."
    )
    body: Literal["text", "json", "hex", "none"] | None = declare(
        help="With --messages: form of the bodies (default text)."
    )
    raw: bool = declare(
        False, "--raw", help="With --messages: print the whole of values of more than 4,000 characters or 50 lines."
    )
    rows: bool = declare(
        False,
        "--rows",
        help="With --messages: print the values alone, one JSON document a line, for jq, DuckDB and pandas. A value "
        "that is not JSON is a text.",
    )
    keys: Path | None = declare(
        None, "--keys", metavar="FILE", help="Look up every row of a file of CSV, NDJSON, Parquet or Arrow."
    )
    keys_out: Path | None = declare(
        None, "--out", metavar="FILE", help="With --keys: new .parquet or .ndjson file for the answers."
    )

    def check(self, topic: str | None, key: str | None, url: str | None, kafka: KafkaClientOptions) -> None:
        """Raise `InvalidArgument` for options that can't be used together."""
        if self.keys is not None:
            of_key: dict[str, object] = {"TOPIC": topic, "--tag": self.tag, "--cursor": self.cursor}
            of_key |= {"--out": self.keys_out} if self.messages else {}
            if wrong := [name for name, value in of_key.items() if value not in (None, False)]:
                whose = "--keys with --messages" if wrong[0] == "--out" else "--keys"
                raise InvalidArgument(f"leave {wrong[0]} out: {whose} can't be used with it")
            if url is not None:
                raise InvalidArgument("--keys can't be used with --url: call IndexClient.query_many from Python")
        elif topic is None or key is None:
            raise InvalidArgument("give a TOPIC and a KEY, or --keys FILE")
        elif self.keys_out is not None:
            raise InvalidArgument("--out needs --keys")
        has_form = self.body is not None or self.raw
        of_messages = self.store is not None or has_form or self.rows or kafka != KafkaClientOptions()
        if of_messages and not self.messages:
            raise InvalidArgument("--store, --body, --raw, --rows and --kafka need --messages")
        if self.rows and (has_form or self.explain):
            raise InvalidArgument("leave --body, --raw and --explain out: --rows prints values alone")

    def page(self, most: int = _PAGE) -> int:
        """Return the entries of a page; `most`: those of a large one."""
        if self.max_count is not None or not self.every:
            return _FEW if self.max_count is None else self.max_count
        return _PAGE_OF_MESSAGES if self.messages else most


@done_by("tiered_index.cli.look_up.query:query")
def query(
    topic: str | None = Argument(None, metavar="TOPIC", help="Topic of the messages."),
    key: str | None = Argument(
        None, metavar="KEY", help="Key of the messages. Write -- before a key that begins with -."
    ),
    *,
    options: QueryOptions,
    within: RangeOptions,
    limits: LimitOptions,
    service: ServiceOptions,
    kafka: KafkaClientOptions,
) -> None:
    """Look up a key: print its entries, the newest first, or its messages.

    [bold]Examples[/bold]

      tiered-index query orders order-4711 --storage s3://bucket/index

      tiered-index query orders order-4711 --root /data/index --begin 2026-11-01 --end 2026-11-02T12:00:00Z --explain

      tiered-index query orders customer-7 --storage file:///tmp/store --all --json

      tiered-index query orders order-4711 --storage s3://bucket/index --max-requests 20 --timeout 2

      tiered-index query orders order-4711 --storage s3://bucket/broker-a --storage s3://bucket/broker-b

      tiered-index query orders order-4711 --root /data/index --messages --store /home/rocketmq/store --body json

      tiered-index query orders order-4711 --root /data/index --messages --kafka bootstrap.servers=broker:9092

      tiered-index query orders order-4711 --storage s3://bucket/index --messages --rows --all | jq .status

      tiered-index query orders order-4711 --url http://localhost:8080 --token-file token

      tiered-index query --keys orders.csv --storage s3://bucket/index --out answers.parquet

    No match is an empty answer with exit code 0.

    With --storage alone the answer has the uploaded entries, and states the time of the newest one. With --root, on the
    writer's host, it also has entries that are flushed but not uploaded.

    With --messages each message has a state: local, archived, expired (deleted by the broker, not archived), erased, or
    missing with the reason. Messages of other keys with the same hash are dropped and counted. With --rows, stderr has
    all that is no value. Exit code 1: a message has none, because it is missing, expired or erased.

    --max-requests, --max-bytes and --timeout limit the whole command, all pages together. At a limit the command prints
    the entries found so far, names the files that it did not read, and ends with exit code 6. With --url it prints the
    entries only if you pass --allow-partial. Requests that open the index are not counted.

    To read several indexes as one, repeat --storage, or name a prefix above them. Each entry then has the URI of its
    index as source. Messages come from the archived segments of each index.

    The file of --keys has the columns topic, key and optionally begin_ms and end_ms. --begin and --end apply to
    rows without these. --max applies to each key, unless you pass --all. The command looks up the keys in batches of
    100,000, and reads each stored file once per batch. The output has a row for each entry, and one row for a key
    without entries. With --json each row is one line, and the last line is the status. With --messages the command
    looks up one key after the other, and prints the messages of each.
    """


@dataclass(frozen=True)
class MessageOptions:
    """Options of `message`."""

    topic: str | None = declare(help="Topic. ID is then a unique key, or any key of rows of files.")
    queue_id: int | None = declare(None, "--queue-id", min=0, help="Queue of --offset.")
    queue_offset: int | None = declare(
        None, "--offset", min=0, help="Queue offset, with --topic and --queue-id in place of ID."
    )
    store: str | None = declare(metavar="SOURCE", help="Folder of the RocketMQ store, or another source.")
    body: Literal["text", "json", "hex", "none"] = declare("text", help="Form of the body.")
    raw: bool = declare(False, "--raw", help="Print the whole of values of more than 4,000 characters or 50 lines.")
    cursor: str | None = declare(help="With --topic: continue the truncated answer that gave this cursor.")


@done_by("tiered_index.cli.look_up.message:message")
def message(
    msg_id: str | None = Argument(
        None, metavar="ID", help="Offset message id; with --topic, a key; kafka:TOPIC/PARTITION/OFFSET."
    ),
    *,
    options: MessageOptions,
    limits: LimitOptions,
    service: ServiceOptions,
    kafka: KafkaClientOptions,
) -> None:
    """Show one message by its id, unique key or queue offset, or one record of Kafka.

    [bold]Examples[/bold]

      tiered-index message 7F00000100002A9F0000000000000000 --store /home/rocketmq/store

      tiered-index message 7F00000100002A9F0000000000000000 --storage s3://bucket/index --body json

      tiered-index message 7F00000100002A9F0000000000000000 --storage s3://bucket/index --max-requests 2 --timeout 1.5

      tiered-index message 0A010203000004D218B4AAC200000000 --topic orders --root /data/index --store
      /home/rocketmq/store --json

      tiered-index message --topic orders --queue-id 0 --offset 17 --store /home/rocketmq/store

      tiered-index message 7F00000100002A9F0000000000000000 --url http://localhost:8080 --token-file token

      tiered-index message kafka:orders/3/1234 --storage s3://bucket/index --kafka bootstrap.servers=broker:9092

    An offset message id (32 or 56 hexadecimal digits) names the store host and the commit log offset. With --topic, ID
    is the unique key that the producer gave the message; if the topic is one of files, ID is any key of its rows. The
    command then needs the index. It shows up to 32 messages or rows with that key, and --cursor shows the next ones. To
    show a message by its queue offset, pass --topic, --queue-id and --offset in place of ID. The offset is looked up in
    --store, and in segments archived with --archive-queues.

    kafka:TOPIC/PARTITION/OFFSET is a record of Kafka. If --kafka or --kafka-config gives bootstrap.servers, the command
    reads it from the broker, else from the archive.

    The command reads the message from --store. If --storage or --root names the index, it also reads archived segments.
    Exit code 1: the id is valid, but the message can't be read. The command then prints the message's state and the
    reason. With --url it prints only the reason.
    """


@done_by("tiered_index.cli.look_up.topics:topics")
def topics(
    allow_partial: bool = Option(
        False, "--allow-partial", help="List the readable files, and name the others (exit code 6)."
    ),
    by: str | None = Option(
        None, metavar="topic,day,state", help="Sum stored entries, bytes and monthly cost by one or more of these."
    ),
    *,
    within: RangeOptions,
    limits: LimitOptions,
    service: ServiceOptions,
) -> None:
    """List the topics, each with its entries, bytes of entries and time range.

    [bold]Examples[/bold]

      tiered-index topics --storage s3://bucket/index

      tiered-index topics --root /data/index --begin 2026-11-01 --json

      tiered-index topics --url http://localhost:8080 --token-file token

      tiered-index topics --by topic,day,state --storage s3://bucket/index

    The command reads the directory of each stored file: one request per file unless it is cached. A message with two
    keys has two entries: its bytes count twice. So does an entry that was put twice, until its files are merged. So
    do replaced rows of files, which the command says. With --begin or --end, the sums have all entries of a topic in
    each file where the topic's times overlap the range.

    --by sums all entries. Days are UTC days. A file's bytes are divided among its topics in proportion to their
    entries. If a file has several days, its entries are divided evenly among them (estimated). The cost is the price of
    the stored bytes, without requests. The settings have the prices (default: S3 Standard's list price). Archived
    segments have a row of their own. The log and orphans are not counted.
    """


@done_by("tiered_index.cli.look_up.files:files")
def files(
    file: str | None = Argument(
        None, metavar="[FILE]", help="Show this file: its path, object name, file id, or the end of a file id."
    ),
    entries: bool = Option(
        False, "--entries", help="Print the entries of FILE as JSON lines, in the order of the file."
    ),
    *,
    service: ServiceOptions,
) -> None:
    """List all files and window tables, then the archived segments, or show one file.

    [bold]Examples[/bold]

      tiered-index files --storage s3://bucket/index

      tiered-index files --root /data/index --json

      tiered-index files --url http://localhost:8080 --token-file token

      tiered-index files /data/index/uploaded/001700000000000-0123456789ab.index

      tiered-index files 456789ab --storage s3://bucket/index --json

      tiered-index files 456789ab --storage s3://bucket/index --entries | head

      tiered-index files store/tiered_index_file/1700000000000 --set slots=5000000 --set items=20000000

    A row has the state, lane, time range, entries, bytes and place of a file. The lane is `main`, or `quarantine` for
    implausible times. Exit code 6: a file can't be read.

    With FILE the command shows the header, metadata and statistics of that file. With --entries it prints only entries
    that match their checksum. The last line is {"status": ...}. At the first mismatch the command ends with status
    "corrupt" and exit code 4. Files written by RocketMQ have no checksums, and the status says so. To check entries
    without printing them, use verify. An unsealed file in RocketMQ's format does not state its numbers of slots and
    items: pass them with --set.
    """
