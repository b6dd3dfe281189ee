"""The commands that check, repair and serve an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from typer import Argument, Option

from tiered_index.cli.declaring import done_by, done_with_others
from tiered_index.cli.options import LogAs, ServiceOptions, size
from tiered_index.connectors.kafka.spec import KafkaClientOptions, KafkaOptions
from tiered_index.connectors.options import declare
from tiered_index.connectors.rocketmq.spec import ArchiveOptions
from tiered_index.errors import InvalidArgument

# readable=False: an unreadable file is not bad usage; the same command line may work later
_of_address = partial(declare, readable=False, rich_help_panel="Listening")
_of_writing = partial(declare, readable=False, rich_help_panel="Writing")
_of_tools = partial(declare, readable=False, rich_help_panel="RocketMQ's tools")
_of_bounds = partial(declare, rich_help_panel="Bounds")


@done_with_others("tiered_index.cli.operate.doctor:doctor")
def doctor(
    uri: str | None = Argument(None, metavar="[URI]", help="Storage to check. Default: --storage."),
    source: str | None = Option(
        None, "--source", metavar="SOURCE", help="Source to check, as that of ingest; the files of a folder as 'DIR/*'."
    ),
    *,
    kafka: KafkaClientOptions,
) -> None:
    """Check that a storage and a disk have the abilities that the engine needs.

    [bold]Examples[/bold]

      tiered-index doctor s3://bucket/index

      tiered-index doctor 's3://bucket/index?endpoint_url=https://minio:9000' --json

      tiered-index doctor file:///mnt/share/index --root /data/index

      tiered-index doctor --source kafka://broker:9092/orders --kafka-config client.properties

    The command puts a few objects below probe/, reads, lists and deletes them. With --root it also checks
    the disk of that folder: it makes a file there, or in the next existing parent, and deletes it. It needs no index,
    and changes none. The creation of an index makes the same checks, except that of multipart uploads. With --source
    it asks the source for what `ingest` reads: topics and their retention, a store, or files.

    The table has each ability, its use, and the result. A result other than yes is a lack. If the engine works round
    it, the result names the price, and the exit code is 0. Exit code 1: an ability is missing. Exit code 3: the
    storage did not answer or refused access. A missing folder or database is not made: make the folder first.
    """


@dataclass(frozen=True)
class RepairOptions:
    """Options of `verify` beside its files."""

    deep: bool = declare(False, "--deep", help="Read every byte of every object, and compare it with the local copy.")
    repair: bool = declare(False, "--repair", help="With --deep: print a repair for each damaged or missing object.")
    source: str | None = declare(
        metavar="STORE", help="With --repair: RocketMQ store to restore archived segments from."
    )
    store_name: str | None = declare(help="Name of that store in the index. Default: its path.")
    standby: str | None = declare(
        None,
        "--from",
        metavar="URI",
        help="With --repair: copy of the index to restore objects from (`tiered-index copy`).",
    )
    yes: bool = declare(False, "--yes", help="With --repair: apply the repairs.")

    def check(self, files: Sequence[str]) -> None:
        """Raise `InvalidArgument` for options that can't be used together."""
        if self.repair and (files or not self.deep):
            deeper = "pass --deep, too: --repair reads every byte"
            raise InvalidArgument("leave FILE out: --repair repairs an index" if files else deeper)
        if not self.repair and (self.yes or self.source is not None or self.standby is not None):
            flags = "--yes" if self.yes else "--source and --from"
            raise InvalidArgument(f"{flags} can't be used without --repair: pass --deep --repair, too")
        if self.source is None and self.store_name is not None:
            raise InvalidArgument("--store-name needs --source STORE")


@done_by("tiered_index.cli.operate.verify:verify")
def verify(
    files: list[str] | None = Argument(
        None, metavar="[FILE]...", help="Paths, object names, file ids or ends of file ids. Default: all files."
    ),
    *,
    options: RepairOptions,
    service: ServiceOptions,
) -> None:
    """Check all checksums of an index: local files, log records, checkpoints and objects.

    [bold]Examples[/bold]

      tiered-index verify --root /data/index

      tiered-index verify --deep --storage s3://bucket/index --json

      tiered-index verify --deep --repair --root /data/index --source /home/rocketmq/store

      tiered-index verify --deep --repair --yes --root /data/index

      tiered-index verify /data/index/uploaded/001700000000000-0123456789ab.index

      tiered-index verify --deep --url http://localhost:8080 --token-file token

    The command compares the log with the objects, and local copies with the objects. Without --deep it checks the size
    of each object, and the directory and metadata at its end; with --deep every byte. Exit code 1: it has findings, and
    prints them. Exit code 3: the storage did not answer. Objects that the log does not name are notes, not findings.

    --repair prints a repair for each damaged or missing object. With --yes it applies the repairs. It restores an
    object from the first good copy: the root's file (--root), another upload of the same object, or a copy of the
    index (--from). It replaces a damaged local copy by the object in the storage. It restores an archived segment from
    another upload, --from or --source; the bytes must match the log.

    An object or segment without a good copy stays, because its undamaged parts still answer. To give it up, pass its
    name to `tiered-index recover --lost NAME`, which first prints how much is lost (--dry-run).

    The command verifies each new object before a log record names it. With --root, stop the root's writer before you
    pass --yes. Without --root or --yes the writer may run. Readers and jobs may always run. Exit code 0: nothing is
    left to repair.
    """


@done_by("tiered_index.cli.operate.recover:recover")
def recover(
    lost: list[str] | None = Option(
        None, "--lost", metavar="NAME", help="Give up the missing and damaged objects of this name. Repeatable."
    ),
    dry_run: bool = Option(False, "--dry-run", help="With --lost: print how much would be given up; change nothing."),
    takes_over: bool = Option(
        False,
        "--take-over",
        help="Claim the index at once, without waiting for the other writer's lease. Use it if that writer is gone.",
    ),
) -> None:
    """Recover a root after a crash, a restore or a loss.

    [bold]Examples[/bold]

      tiered-index recover --root /data/index

      tiered-index recover --root /data/new --storage s3://bucket/index --json

      tiered-index recover --root /data/new --storage s3://bucket/index --take-over

      tiered-index recover --storage s3://bucket/index --lost 001700000000000-0123456789ab --dry-run

      tiered-index recover --storage s3://bucket/index --lost 001700000000000-0123456789ab

    The command deletes unfinished files, and rebuilds the hash tables of unsealed files. If a crash left a file in two
    states (such as unsealed and compacted), it keeps the later one. Every command that writes does this at its start;
    `recover` does only this, and prints a report. If the root is lost, pass a new one and --storage: the new root
    continues the index. Exit code 4: a file is damaged and kept as it is. Exit code 3: the storage did not answer.

    If the root or the storage was restored to an earlier state, or the root is a clone, the other commands refuse the
    root. `recover` makes the root match the storage: it uses the storage's source positions, and keeps the local
    entries that the storage lacks. The next `ingest` uploads them and reads the missing messages from the source.

    --take-over claims the index at once, although another writer holds the lease. If that writer is alive, it is
    fenced: it publishes nothing more and keeps its files.

    --lost gives up lost data: objects that are missing or damaged, as `verify --deep` names them. NAME is
    the name of an object, an archived segment or a catalog of segments, a file id, or the id of a window table.
    With --root it can also be a local file that somebody deleted before its upload. The command reads each object of
    NAME, and appends a log record that gives up the missing and damaged ones permanently. From then on answers name
    them as lost. Their status is complete, although they lack these entries. With a catalog you give up all segments
    that it lists: their messages are missing, and `orphans` deletes their objects a day later. First restore as much
    as you can with `verify --deep --repair`. If the root has an undamaged copy, the command refuses.
    """


@dataclass(frozen=True)
class AddressOptions:
    """Options for the address of a service, its callers and its encryption: serve."""

    host: str = _of_address("127.0.0.1", help="Address to listen on. If other hosts can reach it, pass --tokens.")
    port: int = _of_address(8080, min=0, max=65535, help="Port to listen on. 0: any free port.")
    tokens: Path | None = _of_address(None, metavar="FILE", help="File of tokens, written by `tiered-index token`.")
    console: bool = _of_address(True, help="Serve the console for browsers at /console/ (default).")
    insecure: bool = _of_address(
        False, "--insecure", help="Serve other hosts even if --tokens or --rocketmq-keys is not set."
    )
    tls_cert: Path | None = _of_address(None, help="Server certificate (PEM).")
    tls_key: Path | None = _of_address(None, help="Key of the certificate (PEM).")
    tls_clients: Path | None = _of_address(None, help="CA for client certificates (PEM). Makes them mandatory.")


@dataclass(frozen=True)
class WritingOptions:
    """Options of a service that writes its index: serve."""

    write: bool = _of_writing(False, "--write", help="Write the index: accept POST /v1/entries, upload, expire.")
    follow: str | None = _of_writing(
        None,
        metavar="SOURCE",
        help="Write the index, and follow a source: folder of a RocketMQ store, or kafka://HOST:PORT/TOPIC,...",
    )
    store_name: str | None = _of_writing(
        None, help="Name of the source in the index. Default: the store's path, or the cluster's id."
    )
    max_lag: float | None = declare(
        None, min=0, metavar="SECONDS", help="Limit of the follower's lag behind its source. Above it /readyz fails."
    )


@dataclass(frozen=True)
class ToolsOptions:
    """Options for RocketMQ's protocol: serve."""

    rocketmq_port: int | None = _of_tools(
        None, min=0, max=65535, help="Port for RocketMQ's protocol. 0: any free port."
    )
    rocketmq_keys: Path | None = _of_tools(
        None,
        metavar="FILE",
        help='JSON file with the keys of callers: {"NAME": {"secret": "...", "topics": ["PREFIX"]}}.',
    )
    rocketmq_cluster: str | None = _of_tools(
        None, help="Name of the cluster for RocketMQ's tools. Default: tiered-index."
    )
    rocketmq_broker: str | None = _of_tools(
        None, help="Name of the broker for RocketMQ's tools. Default: tiered-index."
    )
    rocketmq_advertise: str | None = _of_tools(
        None, metavar="HOST:PORT", help="Address of the broker for clients. Default: the address that they connect to."
    )

    @property
    def named(self) -> dict[str, str]:
        """The given names of a `ReadOnlyBroker`, by its arguments."""
        names = {"cluster": self.rocketmq_cluster, "name": self.rocketmq_broker, "advertised": self.rocketmq_advertise}
        return {argument: name for argument, name in names.items() if name is not None}


@dataclass(frozen=True)
class BoundOptions:
    """Bounds of a service: serve."""

    threads: int = _of_bounds(16, min=1, max=1024, help="Number of lookups that run at a time.")
    waiting: int = _of_bounds(256, min=0, help="Limit of waiting requests. Further ones get 503.")
    lookup_timeout: float = _of_bounds(30.0, min=0.001, help="Limit of seconds per lookup.")
    lookup_requests: int = _of_bounds(10_000, min=0, help="Limit of storage requests per lookup.")
    lookup_bytes: int = _of_bounds(**size("1GiB"), help="Limit of bytes read per lookup.")
    lookup_cost: float = _of_bounds(0.05, min=0, help="Limit of dollars per lookup.")
    message_bytes: int = _of_bounds(**size("8MiB"), help="Limit of bytes of messages per answer.")
    max_body: int = _of_bounds(**size("16MiB"), help="Limit of bytes per request body.")


@done_with_others("tiered_index.cli.operate.serve:serve")
def serve(
    address: AddressOptions,
    store: str | None = Option(
        None, metavar="SOURCE", help="Folder of a RocketMQ store, or another source, for reading messages."
    ),
    *,
    writing: WritingOptions,
    tools: ToolsOptions,
    audit_log: Path | None = Option(None, readable=False, metavar="FILE", help="Append a JSON line for each lookup."),
    log_format: LogAs = "text",
    bounds: BoundOptions,
    archiving: ArchiveOptions,
    kafka: KafkaOptions,
) -> None:
    """Serve lookups over HTTP until SIGTERM or SIGINT.

    [bold]Examples[/bold]

      tiered-index serve --storage s3://bucket/index

      tiered-index token grafana --role read --topics order --file tokens.json

      tiered-index serve --storage s3://bucket/a --storage s3://bucket/b --host 0.0.0.0 --tokens tokens.json

      tiered-index serve --root /data/index --storage s3://bucket/index --follow /home/rocketmq/store

      tiered-index serve --root /data/index --storage s3://bucket/index --follow kafka://broker:9092/orders --key key

      tiered-index serve --storage s3://bucket/broker-a --rocketmq-port 9876

      curl -H "Authorization: Bearer $TOKEN" "http://localhost:8080/v1/query?topic=orders&key=order-4711"

    /openapi.json describes the requests. /console/ is for browsers. /metrics is for Prometheus, /livez and /readyz are
    for probes.

    With --storage alone (repeatable) the process has no state: run any number behind a load balancer. With --root, on
    the writer's host, answers also have entries that are flushed but not uploaded. With --write or --follow the process
    is the writer: it ingests, compacts, uploads and serves.

    With -v the process logs each request. After SIGTERM it accepts no new connection, answers running requests, and
    ends.
    """


@done_by("tiered_index.cli.operate.token:token")
def token(
    name: str = Argument(metavar="NAME", help="Name of the token, also in logs."),
    file: Path = Option(Path("tokens.json"), "--file", metavar="FILE", help="File of tokens, for serve --tokens."),
    role: Literal["read", "write", "admin"] = Option(
        "read", help="read: lookups and lists. write: also POST /v1/entries. admin: also verify."
    ),
    topics: list[str] | None = Option(None, metavar="PREFIX", help="Allow topics with this prefix only. Repeatable."),
    max_topics: int | None = Option(
        None, min=0, help="Limit of topics that it may write to while a service runs. Default with --topics: 10000."
    ),
) -> None:
    """Create a token for the service and print it, once.

    [bold]Examples[/bold]

      tiered-index token grafana --file tokens.json

      tiered-index token billing --role read --topics order --topics invoice --file tokens.json

    The file has only the token's hash. To revoke a token, remove it from the file: a running service refuses it within
    a second.
    """
