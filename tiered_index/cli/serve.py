"""`tiered-index serve`: lookups over HTTP. It needs the extra `server`."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from tiered_index.cli.follow import open_follower
from tiered_index.cli.kafka import (
    SCHEME,
    KafkaOptions,
    kafka_messages,
    open_kafka_broker,
    open_kafka_follower,
    open_kafka_messages,
)
from tiered_index.cli.options import ArchiveOptions, LogAs, given_flags, refuse_others, size
from tiered_index.cli.session import Session, command
from tiered_index.errors import (
    ConfigError,
    InvalidArgument,
    NotAnIndex,
    SetupUnavailable,
    TieredIndexError,
    install_hint,
)
from tiered_index.follow import Follower
from tiered_index.rocketmq.log.store import StoreDirectory, check_apart
from tiered_index.service.index import IndexService
from tiered_index.service.read.budget import LookupLimits

if TYPE_CHECKING:
    from tiered_index.kafka.client import KafkaBroker
    from tiered_index.kafka.messages import KafkaMessages
    from tiered_index.server.listening import Listener
    from tiered_index.service.reader import IndexReader


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


@contextlib.contextmanager
def _later(kind: type[TieredIndexError]) -> Iterator[None]:
    """Raise `SetupUnavailable` for an error of a `kind` in the block: a later start may succeed.

    A disk may not be mounted yet, or the index not be created.
    """
    try:
        yield
    except kind as error:
        raise SetupUnavailable(str(error)) from error


# readable=False: an unreadable file is not bad usage; the same command line may work later
_Option = partial(Option, readable=False)
_listen = partial(_Option, rich_help_panel="Listening")
_guard = partial(Option, rich_help_panel="Bounds")
_writing = partial(_Option, rich_help_panel="Writing")
_tools = partial(_Option, rich_help_panel="RocketMQ's tools")
# threshold of the garbage collector (objects created less objects freed): an answer to a large batch has thousands
_COLLECTED_AFTER = 50_000


@command
def serve(
    session: Session,
    host: str = _listen("127.0.0.1", help="Address to listen on. If other hosts can reach it, pass --tokens."),
    port: int = _listen(8080, min=0, max=65535, help="Port to listen on. 0: any free port."),
    tokens: Path | None = _listen(None, metavar="FILE", help="File of tokens, written by `tiered-index token`."),
    console: bool = _listen(True, help="Serve the console for browsers at /console/ (default)."),
    insecure: bool = _listen(
        False, "--insecure", help="Serve other hosts even if --tokens or --rocketmq-keys is not set."
    ),
    tls_cert: Path | None = _listen(None, help="Server certificate (PEM)."),
    tls_key: Path | None = _listen(None, help="Key of the certificate (PEM)."),
    tls_clients: Path | None = _listen(None, help="CA for client certificates (PEM). Makes them mandatory."),
    store: Path | None = _Option(None, help="Folder of the RocketMQ store, for reading messages."),
    write: bool = _writing(False, "--write", help="Write the index: accept POST /v1/entries, upload, expire."),
    follow: str | None = _writing(
        None,
        metavar="SOURCE",
        help="Write the index, and follow a source: folder of a RocketMQ store, or kafka://HOST:PORT/TOPIC,...",
    ),
    store_name: str | None = _writing(
        None, help="Name of the source in the index. Default: the store's path, or the cluster's id."
    ),
    max_lag: float | None = Option(
        None, min=0, metavar="SECONDS", help="Limit of the follower's lag behind its source. Above it /readyz fails."
    ),
    rocketmq_port: int | None = _tools(None, min=0, max=65535, help="Port for RocketMQ's protocol. 0: any free port."),
    rocketmq_keys: Path | None = _tools(
        None,
        metavar="FILE",
        help='JSON file with the keys of callers: {"NAME": {"secret": "...", "topics": ["PREFIX"]}}.',
    ),
    rocketmq_cluster: str | None = _tools(
        None, help="Name of the cluster for RocketMQ's tools. Default: tiered-index."
    ),
    rocketmq_broker: str | None = _tools(None, help="Name of the broker for RocketMQ's tools. Default: tiered-index."),
    rocketmq_advertise: str | None = _tools(
        None, metavar="HOST:PORT", help="Address of the broker for clients. Default: the address that they connect to."
    ),
    audit_log: Path | None = _Option(None, metavar="FILE", help="Append a JSON line for each lookup."),
    log_format: LogAs = "text",
    threads: int = _guard(16, min=1, max=1024, help="Number of lookups that run at a time."),
    waiting: int = _guard(256, min=0, help="Limit of waiting requests. Further ones get 503."),
    lookup_timeout: float = _guard(30.0, min=0.001, help="Limit of seconds per lookup."),
    lookup_requests: int = _guard(10_000, min=0, help="Limit of storage requests per lookup."),
    lookup_bytes: int = _guard(**size("1GiB"), help="Limit of bytes read per lookup."),
    lookup_cost: float = _guard(0.05, min=0, help="Limit of dollars per lookup."),
    message_bytes: int = _guard(**size("8MiB"), help="Limit of bytes of messages per answer."),
    max_body: int = _guard(**size("16MiB"), help="Limit of bytes per request body."),
    *,
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
    with server_extra():
        import uvloop

        from tiered_index.server.app import HttpService
        from tiered_index.server.calls import Caps
        from tiered_index.server.grants import access_warning
        from tiered_index.server.health import StandIn
        from tiered_index.server.listening import HttpListener, Tls, bind, in_background, is_local, own_names, serve_all
        from tiered_index.server.remoting import remoting_listener
        from tiered_index.server.served import Audit, Index, Served, messages_of, redaction_of
        from tiered_index.server.tokens import Tokens
    if not is_local(host) and tokens is None and not insecure:
        raise ConfigError(
            f"--host {host} accepts other hosts: give --tokens FILE, or --insecure to accept calls without a token"
        )
    if rocketmq_port is not None and rocketmq_keys is None and not insecure and not is_local(host):
        raise ConfigError(
            f"--host {host} accepts other hosts at --rocketmq-port, whose protocol has no tokens: give --rocketmq-keys "
            "FILE, or --insecure to accept calls without a key"
        )
    writes = write or follow is not None
    # records are read from a broker without a follower, too
    flags = [*given_flags(archiving), *(flag for flag in given_flags(kafka) if not flag.startswith("--kafka"))]
    if follow is None and (store_name is not None or max_lag is not None or flags):
        options = ", ".join(["--store-name", "--max-lag", *flags])
        raise InvalidArgument(f"{options} need --follow SOURCE")
    followed = None if follow is None or follow.startswith(SCHEME) else Path(follow)
    if follow is not None:
        kind = "Kafka" if followed is None else "a RocketMQ store"
        refuse_others(follow, kind, ("a RocketMQ store", archiving), ("Kafka", kafka))
    if rocketmq_port is not None and follow is not None and followed is None:
        raise InvalidArgument(f"--rocketmq-port is for a RocketMQ store, and {follow} is Kafka")
    named = {"cluster": rocketmq_cluster, "name": rocketmq_broker, "advertised": rocketmq_advertise}
    of_tools = {name: value for name, value in named.items() if value is not None}
    if rocketmq_port is None and (rocketmq_keys is not None or of_tools):
        options = "--rocketmq-keys, --rocketmq-cluster, --rocketmq-broker and --rocketmq-advertise"
        raise InvalidArgument(f"{options} need --rocketmq-port")
    with _later(InvalidArgument):
        for folder in filter(None, (store, followed)):
            StoreDirectory.open(folder)
    if (tls_cert is None) != (tls_key is None) or (tls_clients is not None and tls_cert is None):
        raise InvalidArgument("--tls-cert and --tls-key belong together, and --tls-clients needs both")
    tls = Tls(tls_cert, tls_key, tls_clients) if tls_cert is not None and tls_key is not None else None
    if tls is None and not is_local(host):
        session.out.note(
            f"--host {host} without --tls-cert: tokens, keys and messages travel unencrypted. Give --tls-cert and "
            "--tls-key, or let only a proxy with TLS reach this port"
        )
    for path in filter(None, (tokens, rocketmq_keys)):
        if (warning := access_warning(path)) is not None:
            session.out.note(warning)
    config = session.reader_config()
    caps = Caps(
        limits=LookupLimits(lookup_requests, lookup_bytes, lookup_timeout),
        max_cost_usd=lookup_cost,
        body_bytes=max_body,
        message_bytes=message_bytes,
    )
    stopping = threading.Event()
    with contextlib.ExitStack() as stack:
        known = Tokens(tokens) if tokens is not None else None
        audit = stack.enter_context(contextlib.closing(Audit(audit_log)))
        following: Follower | None = None
        lookups: Index
        front = StandIn()
        http = stack.enter_context(contextlib.closing(HttpListener(front, host, port, tls=tls)))
        if rocketmq_port is not None:
            tools_address = stack.enter_context(contextlib.closing(bind(host, rocketmq_port, "--rocketmq-port")))
            if tokens is not None and rocketmq_keys is None and not insecure:
                session.out.note(
                    "--rocketmq-port needs no token: every program on this host can read every topic there"
                )
        # a recovery may take long: probes get answers meanwhile
        with in_background(http.twin()), _later(NotAnIndex):
            if writes:
                space = {} if followed is None else {"offset_space": "commitlog"}
                index = stack.enter_context(IndexService.open(session.config(**space)))
                lookups = index
                if follow is not None:
                    stop = threading.Event()
                    if followed is None:
                        opened = open_kafka_follower(
                            session, index, stop, place=follow, options=kafka, cluster=store_name
                        )
                    else:
                        check_apart(index.config, followed)
                        log = StoreDirectory.open(followed, store_name)
                        opened = open_follower(session, index, log, stop, archiving=archiving)
                    following = stack.enter_context(opened).in_background()
            else:
                lookups = stack.enter_context(session.open_reader(config))
        store = store or followed
        served = Served(
            lookups,
            messages_of(lookups, store),
            caps,
            redaction_of(lookups, store, session.storages),
            audit,
            known,
            stopping=stopping,
        )
        if (broker := open_kafka_broker(kafka, follow if followed is None else None)) is not None:
            stack.callback(broker.close)
        served.records = partial(_records, lookups, broker, kafka.key or ("key",))
        if following is not None:
            served.problems = following.problems
            served.behind = partial(following.behind, max_lag)
            served.gauges = following.gauges
        service = stack.enter_context(
            HttpService(
                served, threads=threads, waiting=waiting, hosts=None if insecure else own_names(host), console=console
            )
        )
        front.app = service.app
        listeners: list[Listener] = [http]
        if rocketmq_port is not None:
            more: Any = {"host": host, "port": rocketmq_port, "bound": tools_address, "store": store, "tls": tls}
            more |= {"keys": rocketmq_keys, "threads": threads, **of_tools}
            listeners.append(remoting_listener(served, service.metrics, **more))

        def ready() -> None:
            urls = [listener.url for listener in listeners]
            session.out.note(f"serving {', '.join(urls)}; end with SIGTERM or Ctrl-C")
            if session.out.as_json:
                session.out.record({"status": "serving", "url": urls[0], "urls": urls})
                session.out.flush()

        # no later collection looks at the objects of the loaded modules
        gc.collect()
        gc.freeze()
        gc.set_threshold(_COLLECTED_AFTER)
        uvloop.run(serve_all(listeners, ready, stopping, following.has_ended if following else lambda: False))
        if following is not None:
            following.end()
            following.finish_before_end()
    session.out.answer({"status": "stopped"}, streamed=True)
    return 0


def _records(
    lookups: IndexReader | IndexService, broker: KafkaBroker | None, keys: Sequence[str], topic: str
) -> KafkaMessages | None:
    """Return the source of the records of a Kafka topic, otherwise None. `keys` are those of the follower."""
    if isinstance(lookups, IndexService):
        messages = kafka_messages({None: lookups.segment_archive}, lookups.durable_positions(), broker, topic)
        # entries in the buffer are found before the positions that name their keys are durable
        return messages if messages is None else replace(messages, keys={*messages.keys, *keys})
    return open_kafka_messages(lookups, broker, topic)
