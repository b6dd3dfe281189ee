"""Clients of Kafka clusters, and their addresses and settings. Messages never repeat a setting's value."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, cast

from tiered_index.base.call import check_deadline
from tiered_index.connectors.kafka.client.calls import Admin, ClientStuck, Consumer, awaited, open_admin
from tiered_index.connectors.kafka.record import KafkaRecord, TimestampType
from tiered_index.connectors.repeated_lines import OnceAMinute
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    InvalidArgument,
    SetupUnavailable,
    StorageError,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
    install_hint,
)

try:
    import confluent_kafka
    import confluent_kafka.admin
except ModuleNotFoundError:  # the extra is not installed
    confluent_kafka = cast("Any", None)
kafka: Any = confluent_kafka

T = TypeVar("T")
Place = tuple[str, int]
"""Topic and number of a partition."""
TIMEOUT_S = 30.0
# of a request that is sent again later
STEP_S = 5.0
_PAUSE_S = _WAIT_S = 0.2
# Time between two questions whether the brokers of a cluster can be reached, and the longest wait for an answer
_CHECK_S = 2.0
# most messages that are held at a time, as in a source, and most records that are few
MOST_MESSAGES, _FEW = 500, 1_000
# else each record of an answer waits for a broker that is away
_AWAY_S = 5.0
_log = logging.getLogger(__name__)
_ADDRESS = re.compile(r"kafka://([^/@\s]+)(?:/([^/\s]*))?")
# Settings that the source depends on: it alone chooses positions
_OURS = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
}
_DEFAULTS = {
    "client.id": "tiered-index",
    "group.id": "tiered-index",
    "isolation.level": "read_committed",
    "check.crcs": True,
    # of all partitions; a client that reads nothing fetches no more than this
    "queued.max.messages.kbytes": 65536,
}
# Settings of Java's clients: what librdkafka has in their place, if anything
_OF_JAVA = {
    "sasl.jaas.config": "sasl.username=... and sasl.password=...",
    "sasl.login.callback.handler.class": "sasl.oauthbearer.method=oidc and sasl.oauthbearer.client.id=...",
    "ssl.truststore.location": "ssl.ca.location=FILE.pem, with the certificates of the truststore as PEM,",
    "ssl.truststore.certificates": "ssl.ca.pem=...",
    "ssl.keystore.key": "ssl.key.pem=...",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem=...",
    "fetch.max.wait.ms": "fetch.wait.max.ms=...",
    **dict.fromkeys(
        (
            *("ssl.truststore.password", "ssl.truststore.type", "ssl.keystore.type", "ssl.protocol"),
            *("key.deserializer", "value.deserializer", "key.serializer", "value.serializer"),
            *("max.poll.records", "default.api.timeout.ms", "interceptor.classes", "metric.reporters"),
            *("sasl.client.callback.handler.class", "sasl.login.class", "schema.registry.url"),
        )
    ),
}
_REFUSED = re.compile(
    "_AUTHENTICATION|_SSL|SASL_AUTHENTICATION_FAILED|UNSUPPORTED_SASL_MECHANISM|.*_AUTHORIZATION_FAILED"
)
# Errors of a partition whose topic does not exist (any more)
MISSED = ("_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID", "INCONSISTENT_TOPIC_ID")
# An address that the cluster advertised, after the bootstrap server answered, and why it can't be reached
_ADVERTISED = re.compile(r"(?:\w+://)?(\S+)/[0-9]+: (.*?)(?: \(after .*)?")
_BOOTSTRAP = re.compile(r"\S+/bootstrap: (.*?)(?: \(after .*)?")
_LINES_HELD = 100
_ERROR = methodcaller("error")
# Errors of a broker that could not be reached
_UNREACHED = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE")
_DAMAGED = ("_BAD_MSG", "_BAD_COMPRESSION", "INVALID_MSG")


# the client repeats lines about a broker that is away
_log.addFilter(OnceAMinute())


class HeldLog:
    """The log of a client: its lines are held until `pass_on`, because an error of its begin states their reason."""

    def __init__(self) -> None:
        self._lines: deque[tuple[Any, ...]] | None = deque(maxlen=_LINES_HELD)

    def log(self, *line: Any) -> None:
        """Take a line of the client, as `logging.Logger.log` does."""
        if self._lines is None:
            _log.log(*line)
        else:
            self._lines.append(line)

    def pass_on(self) -> None:
        """Write the lines that were held, and from now on each line at once."""
        held, self._lines = self._lines, None
        for line in held or ():
            _log.log(*line)


@dataclass(eq=False)
class SetupErrors:
    """The errors of a client that has no answer of its cluster yet; it is the client's `error_cb`.

    `settings` are the client's. `reason`: why no bootstrap server answers, in the client's words.
    """

    place: str
    settings: Mapping[str, str] = field(repr=False)
    reason: str | None = None
    refused: TieredIndexError | None = None
    _advertised: dict[str, str] = field(default_factory=dict)
    _checked_s: float = float("-inf")

    def __call__(self, error: Any) -> None:
        """Note an error of the client."""
        name, text = error.name(), error.str()
        if _REFUSED.fullmatch(name):
            self.refused = error_of(error, self.place)
        elif advertised := _ADVERTISED.fullmatch(text):
            self._advertised[advertised[1]] = advertised[2]
        elif bootstrap := _BOOTSTRAP.fullmatch(text):
            self.reason = bootstrap[1]

    def check(self) -> None:
        """Raise `StorageMisconfigured` if the brokers refuse the client, or advertise addresses that it can't reach."""
        if self.refused is not None:
            raise self.refused
        if not self._advertised or self.reason is not None or time.monotonic() - self._checked_s < _CHECK_S:
            return
        self._checked_s = time.monotonic()
        # otherwise a broker may just have gone
        if (brokers := self._brokers()) and not _reaches_any(brokers):
            address, reason = next(iter(self._advertised.items()))
            raise StorageMisconfigured(
                f"{self.place} answers, and its cluster advertises {address}, which can't be reached from here: "
                f"{reason}: correct the broker's advertised.listeners, or the network"
            )

    def _brokers(self) -> list[Any]:
        """Ask a bootstrap server for the brokers; none: it does not answer.

        A new client asks, because one that knows the brokers may ask those.
        """
        client = open_consumer({**self.settings, "log_level": "0"}, HeldLog())
        try:
            return list(client.list_topics(timeout=_CHECK_S).brokers.values())
        except kafka.KafkaException:
            return []
        finally:
            client.close()


def _reaches_any(brokers: Sequence[Any]) -> bool:
    """Return whether the address of any broker accepts connections, asked side by side: firewalls drop requests."""
    with ThreadPoolExecutor(min(len(brokers), 16), "tiered-index-reach") as pool:
        return any(pool.map(_can_be_reached, brokers))


def _can_be_reached(broker: Any) -> bool:
    try:
        socket.create_connection((broker.host, broker.port), timeout=_CHECK_S).close()
    except (OSError, ValueError, OverflowError):
        # no such name, or no port
        return False
    return True


@dataclass(frozen=True)
class KafkaAddress:
    """``kafka://HOST:PORT,.../TOPIC,...``: a cluster, and names or patterns of topics."""

    servers: str
    topics: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> KafkaAddress:
        """Return the address in `text`. Raises `InvalidArgument`."""
        parts = _ADDRESS.fullmatch(text)
        if parts is None:
            raise InvalidArgument("write the address as kafka://HOST:PORT,.../TOPIC,...; pass logins by --kafka")
        return cls(parts[1], tuple(filter(None, (parts[2] or "").split(","))))


def read_settings(path: Path) -> dict[str, str]:
    """Return the settings of a file of lines NAME=VALUE. Raises `SetupUnavailable`, `InvalidArgument`."""
    try:
        # with a byte order mark, as some editors write it
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupUnavailable(f"{path} can't be read: {type(error).__name__}") from error
    settings = {}
    for number, line in enumerate(lines, 1):
        name, mark, value = line.partition("=")
        if line.strip() and not line.lstrip().startswith("#"):
            if not mark:
                raise InvalidArgument(f"{path}, line {number}: write a setting as NAME=VALUE")
            check_setting(name.strip(), f"{path}, line {number}")
            settings[name.strip()] = value.strip()
    return settings


def check_setting(name: str, where: str) -> None:
    """Raise `InvalidArgument` for a setting of Java's clients, with the one that this client has in its place."""
    if name in _OF_JAVA:
        instead = _OF_JAVA[name]
        todo = f"write {instead} in its place" if instead is not None else "leave it out"
        raise InvalidArgument(f"{where}: {name} is a setting of Java's clients, and this one is librdkafka: {todo}")


def open_consumer(settings: Mapping[str, str], log: Any = _log, **more: Any) -> Consumer:
    """Return a consumer with the user's `settings` of the client, and the cluster's address; `more` are the caller's.
    Its lines go to `log`.

    Raises `ConfigError` for invalid settings, `InvalidArgument` for settings that the source must set itself.
    """
    if kafka is None:
        raise ConfigError(f"kafka:// needs the extra 'kafka' (confluent_kafka is missing): {install_hint('kafka')}")
    if taken := sorted({*_OURS, *more} & settings.keys()):
        raise InvalidArgument(f"leave --kafka {taken[0]} out: the index sets it")
    try:
        client = kafka.Consumer({**_DEFAULTS, **settings, **_OURS, **more}, logger=log)
    except (kafka.KafkaException, TypeError, ValueError) as error:
        reason = error.args[0].str() if isinstance(error, kafka.KafkaException) else str(error)
        for value in sorted(filter(None, settings.values()), key=len, reverse=True):
            reason = reason.replace(value, "...")
        raise ConfigError(f"a setting of --kafka or --kafka-config: {reason}") from None
    return Consumer(client, f"kafka://{settings.get('bootstrap.servers')}")


def ask_ids(admin: Admin, cluster: Any, topics: Iterable[str]) -> Mapping[str, Future[Any]]:
    """Ask for the ids of topics; `id_in` reads an answer. `cluster` is the metadata: without a controller nothing is
    asked.
    """
    names = list(topics)
    if not names or cluster.controller_id not in cluster.brokers:
        return {}
    return admin.ask("describe_topics", kafka.TopicCollection(names), request_timeout=STEP_S)


def id_in(answer: Future[Any], topic: str) -> str:
    """Return a topic's id in hexadecimal digits; empty: the topic is deleted.

    Raises `ConfigError` for a cluster before Kafka 2.8, whose topics have no ids, and `KafkaException`.
    """
    try:
        topic_id = answer.result().topic_id
    except kafka.KafkaException as error:
        if error.args[0].name() == "_UNSUPPORTED_FEATURE":
            raise _too_old(topic) from error
        if error.args[0].name() != "UNKNOWN_TOPIC_OR_PART":
            raise
        return ""
    words = topic_id.get_most_significant_bits(), topic_id.get_least_significant_bits()
    # a broker without ids answers 0
    if not any(words):
        raise _too_old(topic)
    return "".join(f"{word % (1 << 64):016x}" for word in words)


def _too_old(topic: str) -> ConfigError:
    return ConfigError(
        f"the cluster has no id of topic {topic}: Kafka before 2.8 is not supported: upgrade its brokers to 2.8 or "
        "later, and their inter.broker.protocol.version, too"
    )


class TopicRetention(NamedTuple):
    """The age and the bytes of a partition's records from which on the broker deletes them; None: it keeps all.

    With tiered storage, those from which on they are only in the remote storage, if that is sooner.
    """

    age_ms: int | None
    size_bytes: int | None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the retention by the settings of a topic, as the client returns them."""

        def least(*names: str) -> int | None:
            # -1: no bound; -2 for local ones: as the other one
            numbers = [int(settings[name].value) for name in names if name in settings and settings[name].value]
            return min((number for number in numbers if number >= 0), default=None)

        return cls(least("retention.ms", "local.retention.ms"), least("retention.bytes", "local.retention.bytes"))

    def is_shorter(self, before: TopicRetention) -> bool:
        """Return whether a bound is less than it was."""
        bounds = zip(self, before, strict=True)
        return any(now is not None and (then is None or now < then) for now, then in bounds)


Ranges = list[Mapping[Any, Future[Any]]]
"""The answers about the begins, the ends and the high watermarks of partitions' logs."""


class LogRange(NamedTuple):
    """The offsets of a partition's log: of its first record, after the last one that can be read, and after the last.

    `end` is less than `high` behind an open transaction: it is the last stable offset.
    """

    begin: int
    end: int
    high: int


def answers_of(ranges: Ranges) -> list[Future[Any]]:
    """Return the answers, to wait for."""
    return [answer for answers in ranges for answer in answers.values()]


def range_in(ranges: Ranges, place: Place) -> LogRange:
    """Return the range of a partition's log. Raises as `error_of`."""

    def offsets() -> LogRange:
        begin, end, *more = (int(answers[kafka.TopicPartition(*place)].result().offset) for answers in ranges)
        if min(begin, end, *more) < 0:  # the client's answer for a leader that did not answer in time
            raise StorageUnavailable(f"{what}: its broker does not answer")
        return LogRange(begin, end, max(end, *more))

    return asked(what := "{}/{}".format(*place), offsets)


def _records_before(until: int, messages: list[Any], where: str) -> tuple[list[Any], bool]:
    """Return the client's messages that are records before offset `until`, and whether no others come before it.

    Raises as `error_of`.
    """
    # errors and ends are rare, and a loop over all messages is slow. A `KafkaError` is true, and
    # raises `SystemError` if it is compared with None
    is_whole = not any(map(_ERROR, messages))
    if is_whole and messages and messages[-1].offset() < until:
        return messages, False
    batch = []
    for message in messages:
        error = message.error()
        if error is None and message.offset() < until:
            batch.append(message)
        elif error is None or (error.code() == kafka.KafkaError._PARTITION_EOF and message.offset() >= until):
            return batch, True
        elif not is_of_group(message) and not is_passing(error):
            raise error_of(error, where)
    return batch, False


def asked(what: str, call: Callable[[], T], patience_s: float = 0.0, stopped: threading.Event | None = None) -> T:
    """Return `call()`, a request to the cluster, which is repeated for so long if that may help, unless `stopped`.

    Raises as `error_of`; `what` begins the message.
    """
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except (kafka.KafkaException, StorageUnavailable) as error:
            problem = error if isinstance(error, StorageUnavailable) else error_of(error.args[0], what)
            is_over = time.monotonic() > until_s or (stopped is not None and stopped.is_set())
            # a client that is stuck would only be asked in vain
            is_over = is_over or isinstance(error, ClientStuck)
            if not isinstance(problem, StorageUnavailable) or is_over:
                raise problem from (None if problem is error else error)
        time.sleep(_PAUSE_S)


def first_metadata(consumer: Any, setup: SetupErrors) -> Any:
    """Return the list of all topics for a client that has no answer yet, and whose `error_cb` is `setup`.

    It asks with short patience first, so that an error of the set-up is known in a second. Raises as `asked` and
    `SetupErrors.check`.
    """
    timeouts_s = itertools.chain((0.5, 1.0, 2.0), itertools.repeat(STEP_S))

    def ask() -> Any:
        try:
            return consumer.list_topics(timeout=min(next(timeouts_s), TIMEOUT_S))
        except kafka.KafkaException:
            consumer.poll(0.0)  # calls `setup`
            setup.check()
            raise

    try:
        return asked(setup.place, ask, TIMEOUT_S)
    except StorageUnavailable as error:
        if setup.reason is None:
            raise
        hint = "check the address, the network and security.protocol"
        raise StorageUnavailable(f"{setup.place}: {setup.reason}: {hint}") from error


def is_passing(error: Any) -> bool:
    """Return whether the client itself repeats its request after an error."""
    problem = error_of(error, "")
    return isinstance(problem, StorageUnavailable) and error.name() not in (*MISSED, "_AUTO_OFFSET_RESET")


def is_of_group(message: Any) -> bool:
    """Return whether a message of the client, which has an error, is about the client's group: it has no topic.

    The client asks for the group's coordinator, although nothing here uses the group. Its login needs no access to it.
    """
    return message.topic() is None and not message.error().fatal()


class Deleted(Exception):
    """The broker no longer has the offset."""


class NoTopic(Exception):
    """The cluster has no such topic, or the topic no such partition."""


class ReadStopped(StorageUnavailable):
    """The caller was asked to end."""


def _check_time(what: str, stopped: threading.Event | None) -> None:
    check_deadline(f"reading {what}")
    if stopped is not None and stopped.is_set():
        raise ReadStopped(f"{what}: stopped while a broker was asked")


@dataclass(eq=False)
class KafkaBroker:
    """Reads parts of the logs of a cluster, by the settings of its client with ``bootstrap.servers``. Any thread: each
    has a consumer of its own while it reads.
    """

    settings: Mapping[str, str] = field(repr=False)

    def __post_init__(self) -> None:
        self.place = f"kafka://{self.settings['bootstrap.servers']}"
        # consumers for few records at a time, and for many
        self._idle: dict[bool, deque[Consumer]] = {False: deque(), True: deque()}
        self._closed = False
        self._errors = SetupErrors(self.place, self.settings)
        # until when a partition is not asked again, and why
        self._away: dict[Place, tuple[float, Exception]] = {}

    @cached_property
    def admin(self) -> Admin:
        """The client for questions, which logs nothing."""
        self._idle[False].append(self._consumer())  # it checks the settings
        client = kafka.admin.AdminClient({**self.settings, "log_level": 0, "error_cb": self._errors})
        return open_admin(client, self.place)

    def _consumer(self, *, many: bool = False) -> Consumer:
        with contextlib.suppress(IndexError):
            return self._idle[many].pop()
        # no wait for new records must delay other requests
        settings = {"fetch.queue.backoff.ms": "1", "fetch.wait.max.ms": "10", "log_level": "0"}
        if not many:
            settings["queued.min.messages"] = "1"
        return open_consumer({**settings, **self.settings})

    def ranges(self, places: Iterable[Place]) -> Ranges:
        """Ask for the ranges of partitions' logs, all at once. With `read_committed` a log ends before its first open
        transaction. One broker that is away delays all answers to the timeout.
        """
        parts = [kafka.TopicPartition(*place) for place in places]
        committed, uncommitted = kafka.IsolationLevel.READ_COMMITTED, kafka.IsolationLevel.READ_UNCOMMITTED
        earliest, latest = kafka.admin.OffsetSpec.earliest(), kafka.admin.OffsetSpec.latest()
        questions = [(earliest, committed), (latest, committed), (latest, uncommitted)]
        if self.settings.get("isolation.level") == "read_uncommitted":
            questions = [(earliest, uncommitted), (latest, uncommitted), (latest, uncommitted)]
        return [
            self.admin.ask("list_offsets", dict.fromkeys(parts, spec), isolation_level=level, request_timeout=STEP_S)
            if parts
            else {}
            for spec, level in questions
        ]

    def range(self, place: Place, stopped: threading.Event | None = None, *, explained: bool = False) -> LogRange:
        """Return the range of a partition's log. Raises as `asked`.

        `explained`: if the cluster can't tell, it is asked for the reason. Then also raises as `check_topic`.
        """

        def check() -> None:
            _check_time(where, stopped)
            self.check_setup()

        def ask() -> LogRange:
            ranges = self.ranges([place])
            awaited(answers_of(ranges), where, STEP_S, check)
            try:
                return range_in(ranges, place)
            except StorageUnavailable:
                if explained:
                    self.check_topic(place, stopped)
                raise

        return asked(where := "{}/{}".format(*place), ask, TIMEOUT_S, stopped)

    def retentions(
        self, topics: Iterable[str], stopped: threading.Event | None = None
    ) -> dict[str, TopicRetention | str]:
        """Return the retention of each topic, or why it is not known. Raises `ReadStopped`."""
        resources = [kafka.admin.ConfigResource(kafka.admin.ConfigResource.Type.TOPIC, topic) for topic in topics]
        answers = self.admin.ask("describe_configs", resources, request_timeout=STEP_S) if resources else {}
        what = "the settings of topics"
        awaited(answers.values(), what, STEP_S, partial(_check_time, what, stopped))
        retentions: dict[str, TopicRetention | str] = {}
        for resource, answer in answers.items():
            try:
                retentions[resource.name] = TopicRetention.of(answer.result())
            except kafka.KafkaException as error:
                allowed = (
                    ": allow the client's login DESCRIBE_CONFIGS" if _REFUSED.fullmatch(error.args[0].name()) else ""
                )
                retentions[resource.name] = f"{error.args[0].str()}{allowed}"
        return retentions

    def check_setup(self) -> None:
        """Raise `StorageMisconfigured` if an error of the client for questions says that the set-up is wrong."""
        self.admin.poll(0.0)
        self._errors.check()

    def renew(self, topics: Iterable[str]) -> None:
        """Ask for the leaders of topics again, because the client for questions keeps a leader that is away."""
        for topic in topics:
            with contextlib.suppress(kafka.KafkaException, ClientStuck):
                self.admin.list_topics(topic, timeout=STEP_S)

    def topic_id(self, topic: str, stopped: threading.Event | None = None) -> str:
        """Return a topic's id as `id_in` does; empty also while the cluster has no controller. Raises as `asked`."""

        def ask() -> str:
            # of all topics: a broker may create a topic that it is asked for by name
            answers = ask_ids(self.admin, self.admin.list_topics(timeout=STEP_S), [topic])
            awaited(answers.values(), topic, STEP_S, partial(_check_time, topic, stopped))
            return id_in(answers[topic], topic) if answers else ""

        return asked(topic, ask, TIMEOUT_S, stopped)

    def check_topic(self, place: Place, stopped: threading.Event | None = None) -> None:
        """Raise `NoTopic` if the cluster has no such partition, `StorageMisconfigured` if the login may not see it.

        A list of all topics leaves out those that the login may not see. A question by name tells the two apart.
        """
        (topic, partition), names = place, kafka.TopicCollection([place[0]])
        answer = self.admin.ask("describe_topics", names, request_timeout=STEP_S)[topic]
        awaited([answer], topic, STEP_S, partial(_check_time, topic, stopped))
        try:
            numbers = {partition_info.id for partition_info in answer.result().partitions}
        except kafka.KafkaException as error:
            if error.args[0].name() in MISSED:
                raise NoTopic(f"the cluster has no topic {topic}") from None
            if isinstance(problem := error_of(error.args[0], topic), StorageMisconfigured):
                raise problem from error
            return
        if partition not in numbers:
            raise NoTopic(f"the topic {topic} has no partition {partition}")

    def records(
        self, place: Place, begin: int, until: int, stopped: threading.Event | None = None
    ) -> Generator[KafkaRecord, None, None]:
        """Yield the records of a partition from offset `begin` to `until`, which its log has. Raises as `error_of`."""
        with contextlib.closing(self.messages(place, begin, until, stopped)) as batches:
            for batch in batches:
                yield from map(record_of, batch)

    def messages(
        self, place: Place, begin: int, until: int, stopped: threading.Event | None = None
    ) -> Generator[list[Any], None, None]:
        """Yield messages of the client, some at a time, as `records` yields records: see `RecordLists`."""
        where, heard_s = "{}/{}".format(*place), time.monotonic()
        many = until - begin > _FEW
        consumer, is_well = self._consumer(many=many), True
        try:
            consumer.assign([kafka.TopicPartition(*place, begin)])
            while begin < until:
                _check_time(where, stopped)
                messages = asked(where, partial(consumer.consume, min(until - begin, MOST_MESSAGES), _WAIT_S))
                batch, is_end = _records_before(until, messages, where)
                if batch:
                    begin = max(begin, batch[-1].offset() + 1)
                    yield batch
                if is_end:
                    return
                if messages:
                    heard_s = time.monotonic()
                elif time.monotonic() - heard_s > TIMEOUT_S:
                    raise StorageUnavailable(f"{where}: the broker did not answer within {TIMEOUT_S:g} seconds")
        except StorageError:
            is_well = False  # a client may stay silent after its broker was killed, while a new one reads
            raise
        finally:
            self._give_back(consumer, many=many, is_well=is_well)

    def _give_back(self, consumer: Consumer, *, many: bool, is_well: bool) -> None:
        """Keep a consumer for the next reader; close it if it or this object is of no more use."""
        try:
            consumer.unassign()  # else it reads on
        except BaseException:
            consumer.close()
            raise
        if self._closed or not is_well:
            consumer.close()
        else:
            self._idle[many].append(consumer)

    def record(self, topic: str, partition: int, offset: int) -> KafkaRecord | None:
        """Return the record at a place; None: the log has none there. Raises `Deleted`, `NoTopic`, and as `asked`.

        A record behind the last stable offset raises `StorageUnavailable`.

        If a partition can't be read, calls for the partition in the next seconds raise the same error at once.
        """
        place, where = (topic, partition), f"{topic}/{partition}"
        until_s, known = self._away.get(place, (0.0, Deleted()))
        if time.monotonic() < until_s:
            raise type(known)(str(known))
        try:
            begin, end, high = self.range(place, explained=True)
            if offset < begin:
                raise Deleted(f"the log of {where} begins at offset {begin:,}")
            if end <= offset < high:
                held = f"offset {offset:,} is after the last stable offset, {end:,}, of an open transaction"
                raise StorageUnavailable(f"{where}: {held}: --kafka isolation.level=read_uncommitted reads it")
            with contextlib.closing(self.records(place, offset, min(offset + 1, end))) as records:
                return next(records, None)
        except (StorageUnavailable, StorageMisconfigured, NoTopic) as error:
            check_deadline(f"reading {where}")  # with more time it might have answered
            self._away[place] = time.monotonic() + _AWAY_S, error
            raise

    def close(self) -> None:
        """Leave the cluster. A client that reads now leaves it after its records."""
        self._closed = True
        idle = [consumers.pop() for consumers in self._idle.values() for _ in range(len(consumers))]
        if idle:
            # side by side: one that is stuck takes some seconds
            with ThreadPoolExecutor(len(idle), "tiered-index-close") as pool:
                list(pool.map(methodcaller("close"), idle))


def error_of(error: Any, what: str) -> TieredIndexError:
    """Return this package's error for an error of the client; `what` begins the message."""
    text, name = f"{what}: {error.str()}", error.name()
    if _REFUSED.fullmatch(name):
        is_acl = name.endswith("_AUTHORIZATION_FAILED")
        return StorageMisconfigured(f"{text}: allow the client's login to READ it" if is_acl else text)
    if name in _DAMAGED:
        return CorruptFile(what, error.str())
    return StorageUnavailable(f"{text}: check the address and the network" if name in _UNREACHED else text)


def headers_of(message: Any) -> list[tuple[str, bytes | None]]:
    """Return the headers of a message of the client. If a name is not UTF-8, log its place, and return none."""
    try:
        return message.headers() or []
    except SystemError:
        place = f"{message.topic()}/{message.partition()}/{message.offset()}"
        _log.warning("%s: its headers are left out: a name is not UTF-8", place)
        message.set_headers([])  # else the next call returns a damaged list
        return []


def record_of(message: Any) -> KafkaRecord:
    """Return the record of a message of the client."""
    kind, time_ms = message.timestamp()
    if time_ms < 0 or kind == 0:
        kind, time_ms = 0, None
    place = message.topic(), message.partition(), message.offset()
    headers = tuple(headers_of(message))
    return KafkaRecord(*place, message.key(), message.value(), headers, time_ms, TimestampType(kind))
