"""Clients of Kafka clusters, and their addresses and settings. Messages never repeat a setting's value."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    InvalidArgument,
    SetupUnavailable,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
    install_hint,
)
from tiered_index.kafka.record import KafkaRecord, TimestampType

try:
    import confluent_kafka
    import confluent_kafka.admin
except ModuleNotFoundError:  # the extra is not installed
    confluent_kafka = cast("Any", None)
kafka: Any = confluent_kafka

T = TypeVar("T")
Place = tuple[str, int]
"""Topic and number of a partition."""
SCHEME = "kafka://"
TIMEOUT_S = 30.0
# of a request that is sent again later
STEP_S = 5.0
_PAUSE_S = 0.2
_log = logging.getLogger(__name__)
_LINE_S, _LINES = 60.0, 1_000
# Durations and counts that differ in each line about the same trouble
_VARYING = re.compile(r"\([^()]*\d[^()]*\)")
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
_REFUSED = re.compile(
    "_AUTHENTICATION|_SSL|SASL_AUTHENTICATION_FAILED|UNSUPPORTED_SASL_MECHANISM|.*_AUTHORIZATION_FAILED"
)
# Errors of a partition whose topic does not exist (any more)
MISSED = ("_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID", "INCONSISTENT_TOPIC_ID")
_DAMAGED = ("_BAD_MSG", "_BAD_COMPRESSION", "INVALID_MSG")


class _Spared(logging.Filter):
    """Passes a text once a minute, and then says how often it was left out since. Any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        # of each text: when it was passed, and how often it was left out since
        self._passed: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is passed."""
        now_s, line = time.monotonic(), record.getMessage()
        text = _VARYING.sub("", line)
        with self._lock:
            passed_s, left_out = self._passed.pop(text, (now_s - _LINE_S, 0))
            if now_s - passed_s < _LINE_S:
                self._passed[text] = passed_s, left_out + 1
                return False
            self._passed[text] = now_s, 0
            while len(self._passed) > _LINES:
                del self._passed[next(iter(self._passed))]
        if left_out:
            record.msg, record.args = f"{line} ({left_out:,} more such lines were left out)", ()
        return True


# the client repeats lines about a broker that is away
_log.addFilter(_Spared())


@dataclass(frozen=True)
class KafkaAddress:
    """``kafka://HOST:PORT,.../TOPIC,...``: a cluster, and names or patterns of topics."""

    servers: str
    topics: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> KafkaAddress:
        """Return the address in `text`. Raises `InvalidArgument`."""
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise InvalidArgument("write the address as kafka://HOST:PORT,.../TOPIC,...; pass logins by --kafka")
        return cls(found[1], tuple(filter(None, (found[2] or "").split(","))))


def read_settings(path: Path) -> dict[str, str]:
    """Return the settings of a file of lines NAME=VALUE. Raises `SetupUnavailable`, `InvalidArgument`."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupUnavailable(f"{path} can't be read: {type(error).__name__}") from error
    settings = {}
    for number, line in enumerate(lines, 1):
        name, mark, value = line.partition("=")
        if line.strip() and not line.lstrip().startswith("#"):
            if not mark:
                raise InvalidArgument(f"{path}, line {number}: write a setting as NAME=VALUE")
            settings[name.strip()] = value.strip()
    return settings


# for consumers of single pieces: a fetch that waits for new records must not delay other requests
PROMPT = {"log_level": "0", "fetch.wait.max.ms": "10"}


def open_consumer(servers: str, settings: Mapping[str, str], **more: Any) -> Any:
    """Return a consumer of a cluster with the user's `settings` of the client; `more` are the caller's own.

    Raises `ConfigError` for invalid settings, `InvalidArgument` for settings that the source must set itself.
    """
    if kafka is None:
        raise ConfigError(f"kafka:// needs the extra 'kafka' (confluent_kafka is missing): {install_hint('kafka')}")
    if taken := sorted({*_OURS, *more} & settings.keys()):
        raise InvalidArgument(f"leave --kafka {taken[0]} out: the index sets it")
    try:
        conf = {**_DEFAULTS, "bootstrap.servers": servers, **settings, **_OURS, **more}
        return kafka.Consumer(conf, logger=_log)
    except (kafka.KafkaException, TypeError, ValueError) as error:
        reason = error.args[0].str() if isinstance(error, kafka.KafkaException) else str(error)
        for value in sorted(filter(None, settings.values()), key=len, reverse=True):
            reason = reason.replace(value, "...")
        raise ConfigError(f"--kafka: {reason}") from None


def open_admin(servers: str, settings: Mapping[str, str]) -> Any:
    """Return a client for questions. It logs nothing: call `open_consumer` first, which checks the settings."""
    return kafka.admin.AdminClient({**settings, "bootstrap.servers": servers, "log_level": 0})


def ask_ids(admin: Any, cluster: Any, topics: Iterable[str]) -> dict[str, Future[Any]]:
    """Ask for the ids of topics; `id_in` reads an answer. `cluster` is the metadata: without a controller nothing is
    asked.
    """
    names = list(topics)
    if not names or cluster.controller_id not in cluster.brokers:
        return {}
    answers: dict[str, Future[Any]] = admin.describe_topics(kafka.TopicCollection(names), request_timeout=STEP_S)
    return answers


def id_in(answer: Future[Any]) -> str:
    """Return a topic's id in hexadecimal digits; empty: the topic is deleted, or the cluster has no ids.

    Raises `KafkaException`.
    """
    try:
        found = answer.result().topic_id
    except kafka.KafkaException as error:
        if error.args[0].name() not in ("UNKNOWN_TOPIC_OR_PART", "_UNSUPPORTED_FEATURE"):
            raise
        return ""
    words = found.get_most_significant_bits(), found.get_least_significant_bits()
    # a broker without ids answers 0
    return "".join(f"{word % (1 << 64):016x}" for word in words) if any(words) else ""


class Ranges:
    """Asks for the ranges of partitions' logs, all at once. One broker that is away delays all answers to the timeout.

    With `committed` a log ends before its first open transaction.
    """

    def __init__(self, admin: Any, places: Iterable[Place], *, committed: bool = True) -> None:
        places = list(places)
        level = kafka.IsolationLevel.READ_COMMITTED if committed else kafka.IsolationLevel.READ_UNCOMMITTED
        self._ends: list[dict[Any, Future[Any]]] = []
        for end in (kafka.admin.OffsetSpec.earliest(), kafka.admin.OffsetSpec.latest()):
            asked_of = {kafka.TopicPartition(*place): end for place in places}
            options = {"isolation_level": level, "request_timeout": STEP_S}
            self._ends.append(admin.list_offsets(asked_of, **options) if places else {})

    @property
    def answers(self) -> list[Future[Any]]:
        """The answers, to wait for."""
        return [answer for answers in self._ends for answer in answers.values()]

    def of(self, place: Place) -> tuple[int, int]:
        """Return the first offset of a partition, and the offset after its last record. Raises as `error_of`."""

        def offsets() -> tuple[int, int]:
            begin, end = (int(answers[kafka.TopicPartition(*place)].result().offset) for answers in self._ends)
            if min(begin, end) < 0:  # the client's answer for a leader that did not answer in time
                raise StorageUnavailable(f"{what}: its broker does not answer")
            return begin, end

        return asked(what := "{}/{}".format(*place), offsets)


def asked(what: str, call: Callable[[], T], patience_s: float = 0.0, stopped: threading.Event | None = None) -> T:
    """Return `call()`, a request to the cluster, which is repeated for so long if that may help, unless `stopped`.

    Raises as `error_of`; `what` begins the message.
    """
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except (kafka.KafkaException, StorageUnavailable) as error:
            found = error if isinstance(error, StorageUnavailable) else error_of(error.args[0], what)
            is_over = time.monotonic() > until_s or (stopped is not None and stopped.is_set())
            if not isinstance(found, StorageUnavailable) or is_over:
                raise found from (None if found is error else error)
        time.sleep(_PAUSE_S)


def range_of(consumer: Any, topic: str, partition: int, timeout_s: float = TIMEOUT_S) -> tuple[int, int]:
    """Return the first offset of a partition, and the offset after its last record. Raises as `error_of`, at the latest
    after about twice `timeout_s`.

    librdkafka's call for both takes the last one for the first if only the request for the first one fails.
    """

    def offset_of(which: int) -> int:
        (found,) = consumer.offsets_for_times([kafka.TopicPartition(topic, partition, which)], timeout=timeout_s)
        if found.error is not None:
            raise kafka.KafkaException(found.error)
        return int(found.offset)

    return asked(
        f"{topic}/{partition}", lambda: (offset_of(kafka.OFFSET_BEGINNING), offset_of(kafka.OFFSET_END)), timeout_s
    )


def is_passing(error: Any) -> bool:
    """Return whether the client itself repeats its request after an error."""
    found = error_of(error, "")
    return isinstance(found, StorageUnavailable) and error.name() not in (*MISSED, "_AUTO_OFFSET_RESET")


def error_of(error: Any, what: str) -> TieredIndexError:
    """Return this package's error for an error of the client; `what` begins the message."""
    text, name = f"{what}: {error.str()}", error.name()
    if _REFUSED.fullmatch(name):
        is_acl = name.endswith("_AUTHORIZATION_FAILED")
        return StorageMisconfigured(f"{text}: allow the client's login to READ it" if is_acl else text)
    return CorruptFile(what, error.str()) if error.name() in _DAMAGED else StorageUnavailable(text)


def headers_of(message: Any) -> list[tuple[str, bytes | None]]:
    """Return the headers of a message of the client. The client can't return them if a name is not UTF-8: then none."""
    try:
        return message.headers() or []
    except SystemError:
        _log.warning(
            "%s/%s/%s: its headers are left out: a name is not UTF-8",
            message.topic(),
            message.partition(),
            message.offset(),
        )
        message.set_headers([])  # else the next call returns a damaged list
        return []


def record_of(message: Any) -> KafkaRecord:
    """Return the record of a message of the client."""
    kind, time_ms = message.timestamp()
    if time_ms < 0:
        kind = TimestampType.NONE
    return KafkaRecord(
        message.topic(),
        message.partition(),
        message.offset(),
        message.key(),
        message.value(),
        tuple(headers_of(message)),
        None if kind == TimestampType.NONE else time_ms,
        TimestampType(kind),
    )
