"""Runs a service until a signal: checks its options, answers probes, opens the index, and serves it.

`Serving` has a method for each step, in the order in which `run` takes them. Threads: the main thread; listeners run in
one of their own.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered_index.cli.ending import Ending
from tiered_index.cli.operate.commands import AddressOptions, BoundOptions, ToolsOptions, WritingOptions
from tiered_index.cli.options import given_flags, refuse_others
from tiered_index.cli.others import groups_of, options_of
from tiered_index.cli.places import FollowedSource, opened_places
from tiered_index.cli.session import Session
from tiered_index.cli.write.follow import opened_follower
from tiered_index.config import IndexConfig
from tiered_index.connectors.contract import SourceRun, checked
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka.spec import KafkaOptions
from tiered_index.connectors.read_again import MessageSources
from tiered_index.connectors.registry import CONNECTORS, ConnectorSpec
from tiered_index.connectors.rocketmq.spec import ArchiveOptions, RocketmqOptions, StoreOptions
from tiered_index.errors import ConfigError, InvalidArgument, NotAnIndex, SetupUnavailable, TieredIndexError
from tiered_index.server.app import HttpService
from tiered_index.server.health import StandIn
from tiered_index.server.http.listening import HttpListener, Tls, bind, is_local, loop_in_thread, own_names
from tiered_index.server.http.served import Audit, Caps, Index, Served, redaction_of
from tiered_index.server.http.tokens import Tokens, access_warning
from tiered_index.service.index import IndexService
from tiered_index.service.read.answers.budget import LookupLimits
from tiered_index.service.root import allow_many_files

if TYPE_CHECKING:
    from tiered_index.connectors.rocketmq.remoting.server import RemotingServer

# Threshold of the garbage collector (objects created less objects freed): an answer to a large batch has thousands
_COLLECTED_AFTER = 50_000
_LOOK_S = 0.1


@contextlib.contextmanager
def _later(kind: type[TieredIndexError]) -> Iterator[None]:
    """Raise `SetupUnavailable` for an error of a `kind` in the block: a later start may succeed.

    A disk may not be mounted yet, or the index not be created.
    """
    try:
        yield
    except kind as error:
        raise SetupUnavailable(str(error)) from error


def _folder_at(spec: ConnectorSpec, address: str) -> Path | None:
    """Return the folder at an address of messages; None: it names none."""
    return None if spec.folder is None else spec.folder(address)


@dataclass(frozen=True)
class Serving:
    """One run of `serve` with its options."""

    session: Session
    address: AddressOptions
    store: str | None
    writing: WritingOptions
    tools: ToolsOptions
    audit_log: Path | None
    bounds: BoundOptions
    archiving: ArchiveOptions
    kafka: KafkaOptions
    others: Any = None

    @cached_property
    def _spec(self) -> ConnectorSpec | None:
        """The connector of the source; None: nothing is followed."""
        if (source := self.writing.follow) is None:
            return None
        # files can't be followed here: a path may be that of a store whose disk is not mounted yet
        spec = CONNECTORS.of_messages(source)
        for problem in CONNECTORS.problems:
            self.session.out.note(problem)
        return spec

    @property
    def _folder(self) -> Path | None:
        """The folder of the store that has the messages; None: they are elsewhere."""
        return None if self.store is None else _folder_at(CONNECTORS.of_messages(self.store), self.store)

    @cached_property
    def _source(self) -> FollowedSource | None:
        """The source that is followed, with its options."""
        if (source := self.writing.follow) is None or (spec := self._spec) is None:
            return None
        # a service does not check bodies, as readers of messages do
        of_store = RocketmqOptions(of_store=StoreOptions(check_bodies=False), archiving=self.archiving)
        return FollowedSource(spec, options_of(spec, [of_store, self.kafka], self.others), source)

    @property
    def _followed(self) -> Path | None:
        """The folder of the store that is followed; None: none is."""
        spec, source = self._spec, self.writing.follow
        return None if spec is None or source is None else _folder_at(spec, source)

    @cached_property
    def _tls(self) -> Tls | None:
        certificate, key = self.address.tls_cert, self.address.tls_key
        return Tls(certificate, key, self.address.tls_clients) if certificate is not None and key is not None else None

    def run(self) -> None:
        """Serve until a signal or the follower's end. Raises errors of the options, files, addresses and index."""
        self._check_callers()
        self._check_source()
        self._check_tools()
        self._check_files()
        self._warn()
        config = self.session.reader_config()
        if config.raise_file_limit:
            # a connection needs one, too
            allow_many_files()
        with ExitStack() as stack:
            tokens = Tokens(self.address.tokens) if self.address.tokens is not None else None
            audit = Audit(self.audit_log)
            front = StandIn()
            tools_socket = self._tools_socket(stack)
            portal = stack.enter_context(loop_in_thread())
            listening = stack.enter_context(ExitStack())
            http = HttpListener(front, self.address.host, self.address.port, tls=self._tls)
            # a recovery may take long: probes get answers meanwhile
            listening.enter_context(portal.wrap_async_context_manager(http))
            with _later(NotAnIndex):
                lookups = self._opened(config)
                stack.enter_context(lookups)
                follower = self._follower(stack, lookups)
            served = self._served(stack, lookups, audit, tokens, follower)
            service = stack.enter_context(self._service(served))
            urls = [http.url]
            if tools_socket is not None:
                tools = self._tools_listener(served, service, tools_socket)
                listening.enter_context(portal.wrap_async_context_manager(tools))
                urls.append(tools.url)
            front.app = service.app
            with Ending() as ending:
                self._tell_ready(urls)
                self._wait(ending, http, follower)
            served.stopping.set()
            listening.close()
            if follower is not None:
                follower.end()
                follower.finish_before_end()

    def _check_callers(self) -> None:
        """Refuse to serve other hosts without tokens and keys."""
        host, tools = self.address.host, self.tools
        if is_local(host) or self.address.insecure:
            return
        if self.address.tokens is None:
            raise ConfigError(
                f"--host {host} accepts other hosts: give --tokens FILE, or --insecure to accept calls without a token"
            )
        if tools.rocketmq_port is not None and tools.rocketmq_keys is None:
            raise ConfigError(
                f"--host {host} accepts other hosts at --rocketmq-port, whose protocol has no tokens: give "
                "--rocketmq-keys FILE, or --insecure to accept calls without a key"
            )

    def _check_source(self) -> None:
        """Refuse options that need a source, or another kind of source."""
        source, writing = self.writing.follow, self.writing
        if source is not None and self._spec is not None:
            ours = ("a RocketMQ store", self.archiving), ("Kafka", self.kafka)
            refuse_others(source, self._spec.title, *ours, *groups_of(self.others))
            return
        # records are read from a broker without a follower, too
        of_kafka = [flag for flag in given_flags(self.kafka) if not flag.startswith("--kafka")]
        of_source = {"--store-name": writing.store_name, "--max-lag": writing.max_lag}
        named = [flag for flag, value in of_source.items() if value is not None]
        of_others = [flag for _, group in groups_of(self.others) for flag in given_flags(group)]
        if flags := [*named, *given_flags(self.archiving), *of_kafka, *of_others]:
            raise InvalidArgument(f"{', '.join(flags)} {'need' if len(flags) > 1 else 'needs'} --follow SOURCE")

    def _check_tools(self) -> None:
        """Refuse options of RocketMQ's protocol without its port, or beside Kafka."""
        source, port = self.writing.follow, self.tools.rocketmq_port
        if port is not None and self._spec is not None and self._followed is None:
            raise InvalidArgument(f"--rocketmq-port is for a RocketMQ store, and {source} is {self._spec.title}")
        if port is None and (self.tools.rocketmq_keys is not None or self.tools.named):
            options = "--rocketmq-keys, --rocketmq-cluster, --rocketmq-broker and --rocketmq-advertise"
            raise InvalidArgument(f"{options} need --rocketmq-port")

    def _check_files(self) -> None:
        """Refuse folders that are no stores, and TLS files that lack another."""
        with _later(InvalidArgument):
            for source in filter(None, (self.store, self.writing.follow)):
                if (spec := CONNECTORS.of_messages(source)).folder is not None:
                    CONNECTORS.connector(spec.name).place(None, source)
        address = self.address
        if (address.tls_cert is None) != (address.tls_key is None) or (address.tls_clients and not address.tls_cert):
            raise InvalidArgument("--tls-cert and --tls-key belong together, and --tls-clients needs both")

    def _warn(self) -> None:
        """Note what others could read."""
        host = self.address.host
        if self._tls is None and not is_local(host):
            self.session.out.note(
                f"--host {host} without --tls-cert: tokens, keys and messages travel unencrypted. Give --tls-cert and "
                "--tls-key, or let only a proxy with TLS reach this port"
            )
        for path in filter(None, (self.address.tokens, self.tools.rocketmq_keys)):
            if (warning := access_warning(path)) is not None:
                self.session.out.note(warning)

    def _tools_socket(self, stack: ExitStack) -> Any:
        """Return the bound socket of RocketMQ's protocol, or None."""
        if (port := self.tools.rocketmq_port) is None:
            return None
        bound = stack.enter_context(closing(bind(self.address.host, port, "--rocketmq-port")))
        if self.address.tokens is not None and self.tools.rocketmq_keys is None and not self.address.insecure:
            self.session.out.note(
                "--rocketmq-port needs no token: every program on this host can read every topic there"
            )
        return bound

    def _opened(self, config: IndexConfig) -> Index:
        """Return the index, as its writer or as a reader."""
        if not self.writing.write and self.writing.follow is None:
            return self.session.open_reader(config)
        space: dict[str, Any] = {}
        if self._spec is not None and self._spec.offset_space is not None:
            space = {"offset_space": self._spec.offset_space}
        return IndexService.open(self.session.config(**space))

    def _follower(self, stack: ExitStack, lookups: Index) -> Follower | None:
        """Return the follower of the source, which runs in a thread, or None."""
        stop = threading.Event()
        if (followed := self._source) is None or not isinstance(lookups, IndexService):
            return None
        spec, options, source = followed
        connector, note = CONNECTORS.connector(spec.name), self.session.out.note
        name = self.writing.store_name
        run = SourceRun(addresses=(source,), options=options, name=name, stopped=stop.is_set, note=note)
        run = stack.enter_context(checked(connector, run, lookups.config))
        follower, _ = opened_follower(connector, run, lookups, stop)
        return stack.enter_context(follower).in_background()

    def _served(
        self, stack: ExitStack, lookups: Index, audit: Audit, tokens: Tokens | None, follower: Follower | None
    ) -> Served:
        """Return the parts of the service."""
        bounds, folder = self.bounds, self._folder or self._followed
        caps = Caps(
            limits=LookupLimits(bounds.lookup_requests, bounds.lookup_bytes, bounds.lookup_timeout),
            max_cost_usd=bounds.lookup_cost,
            body_bytes=bounds.max_body,
            message_bytes=bounds.message_bytes,
        )
        redaction = redaction_of(lookups, folder, self.session.storages)
        places = opened_places(self.store, self.kafka, followed=self._source)
        sources = stack.enter_context(closing(MessageSources(lookups, lookups.config, places)))
        served = Served(lookups, sources, caps, redaction, audit, tokens)
        looks: list[Callable[[], list[str]]] = []
        for name in (name for name, place in places.items() if place is not None):
            if (watch := getattr(CONNECTORS.connector(name), "watch", None)) is not None:
                looks.append(stack.enter_context(watch(partial(self.session.out.error, "StorageUnavailable"))))

        def problems() -> list[str]:
            of_follower = [] if follower is None else follower.problems()
            # a source may tell what the watch of its connector tells
            of_connectors = (text for look in looks for text in look())
            return [*of_follower, *(text for text in of_connectors if not any(text in other for other in of_follower))]

        served.problems = problems
        if follower is not None:
            served.behind = partial(follower.behind, self.writing.max_lag)
            served.gauges = follower.gauges
        return served

    def _service(self, served: Served) -> HttpService:
        hosts = None if self.address.insecure else own_names(self.address.host)
        bounds, console = self.bounds, self.address.console
        return HttpService(served, threads=bounds.threads, waiting=bounds.waiting, hosts=hosts, console=console)

    def _tools_listener(self, served: Served, service: HttpService, bound: Any) -> RemotingServer:
        """Return the listener of RocketMQ's protocol."""
        # imported here: others need nothing of RocketMQ
        from tiered_index.server.remoting import remoting_listener

        return remoting_listener(
            served,
            service.metrics,
            bound=bound,
            store=self._folder or self._followed,
            keys=self.tools.rocketmq_keys,
            tls=self._tls,
            threads=self.bounds.threads,
            **self.tools.named,
        )

    def _tell_ready(self, urls: list[str]) -> None:
        out = self.session.out
        # no later collection looks at the objects of the loaded modules
        gc.collect()
        gc.freeze()
        gc.set_threshold(_COLLECTED_AFTER)
        out.note(f"serving {', '.join(urls)}; end with SIGTERM or Ctrl-C")
        if out.as_json:
            out.record({"status": "serving", "url": urls[0], "urls": urls})
            out.flush()

    def _wait(self, ending: Ending, http: HttpListener, follower: Follower | None) -> None:
        """Return once a signal arrives, the listener has ended, or the follower has."""
        while not (ending.event.wait(_LOOK_S) or http.has_ended.is_set()):
            if follower is not None and follower.has_ended():
                return
