"""`tiered-index serve`: lookups over HTTP. It needs the extra `server`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from typer import Option

from tiered_index.cli.kafka import KafkaOptions
from tiered_index.cli.options import ArchiveOptions, LogAs, declare, size
from tiered_index.cli.session import Session, command
from tiered_index.errors import ConfigError, install_hint


@contextlib.contextmanager
def server_extra() -> Iterator[None]:
    """Raise `ConfigError`, which names the extra, if an import in the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tiered_index"):
            raise
        missing = (error.name or "").partition(".")[0]
        raise ConfigError(f"serve needs the extra 'server' ({missing} is missing): {install_hint('server')}") from error


# readable=False: an unreadable file is not bad usage; the same command line may work later
_of_address = partial(declare, readable=False, rich_help_panel="Listening")
_of_writing = partial(declare, readable=False, rich_help_panel="Writing")
_of_tools = partial(declare, readable=False, rich_help_panel="RocketMQ's tools")
_of_bounds = partial(declare, rich_help_panel="Bounds")


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


@command
def serve(
    session: Session,
    address: AddressOptions,
    store: Path | None = Option(None, readable=False, help="Folder of the RocketMQ store, for reading messages."),
    *,
    writing: WritingOptions,
    tools: ToolsOptions,
    audit_log: Path | None = Option(None, readable=False, metavar="FILE", help="Append a JSON line for each lookup."),
    log_format: LogAs = "text",
    bounds: BoundOptions,
    archiving: ArchiveOptions,
    kafka: KafkaOptions,
) -> int:
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
    session.log_as(log_format)
    # the brackets of an IPv6 address in a URL
    address = replace(address, host=address.host.removeprefix("[").removesuffix("]"))
    with server_extra():
        from tiered_index.cli.serving import Serving
    Serving(session, address, store, writing, tools, audit_log, bounds, archiving, kafka).run()
    session.out.answer({"status": "stopped"}, streamed=True)
    return 0
