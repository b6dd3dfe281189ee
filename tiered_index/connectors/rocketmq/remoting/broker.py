"""A read-only name server and broker: answers RocketMQ's requests from an index and archived segments.

It acts as one broker of one cluster with every topic of the index. Messages are sent as they are stored. A message that
no longer exists or is damaged is left out, and the remark counts it: it hides no other message. If all that is left is
damage, the response is an error. So it is if the storage does not answer, because the next request may find all.
Remarks have no path, object or storage; the log has them, and is throttled. Threads: any.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.base.version import __version__
from tiered_index.connectors.documents import every_document
from tiered_index.connectors.rocketmq.archive.messages import ByUniqueKey, RocketmqMessages
from tiered_index.connectors.rocketmq.log.layout import TAG_NAME, Host, decode_offset_msg_id, is_system_topic, tag_key
from tiered_index.connectors.rocketmq.log.message import Message
from tiered_index.connectors.rocketmq.log.store import queues_in
from tiered_index.connectors.rocketmq.remoting.frames import (
    MAX_FRAME_BYTES,
    UNIQUE_KEY_QUERY,
    BadRequest,
    Command,
    RequestCode,
    ResponseCode,
    checked_of,
    json_text,
    name_of,
    number_of,
    text_of,
    topic_of,
)
from tiered_index.connectors.rocketmq.remoting.pulling import Ends, Pulled, Queues, UnknownOffsets, hashes_of_tags
from tiered_index.connectors.rocketmq.remoting.queue_sources import (
    QueueCaches,
    have_queues,
    numbers_of_queues,
    queues_at_hand,
)
from tiered_index.connectors.rocketmq.remoting.throttled_log import ThrottledLog
from tiered_index.errors import (
    BudgetExceeded,
    CorruptFile,
    InvalidArgument,
    ObjectNotFound,
    PartialAnswer,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.service.index import IndexService
from tiered_index.service.log.reads import READ_PREFIX
from tiered_index.service.read.answers.budget import Limits, LookupBudget, LookupLimits, RequestStats
from tiered_index.service.read.answers.messages import Fetched, MessageSource, MessagesResult
from tiered_index.service.read.answers.rows import check_key
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.reader import IndexReader
from tiered_index.types import Explain, FileReport, IndexItem

# Most bytes of the messages of one response: a frame without its header
_ROOM_BYTES = MAX_FRAME_BYTES - (64 << 10)
# Messages that are fetched at once: the memory in addition to the response
_BATCH = 32
_MOST_MESSAGES = 1_000
# Most messages of one unique key, as from a broker
_MOST_OF_UNIQUE_KEY = 32
# Greatest age of the list of topics, and of one that lacks the requested topic
_TOPICS_S, _UNKNOWN_TOPIC_S = 30.0, 1.0
_READABLE = 4
# Counters of received and sent messages, always 0: a second, and since a day began. 4.x misspells one.
_RATES = ("putTps", "getTotalTps", "getTransferredTps", "getTransferedTps")
_TOTALS = tuple(
    f"msg{way}Total{since}" for way in ("Put", "Get") for since in ("YesterdayMorning", "TodayMorning", "TodayNow")
)
_POOLS = tuple(
    f"{pool}ThreadPoolQueue{what}" for pool in ("send", "pull", "ack") for what in ("Size", "HeadWaitTimeMills")
)
_OTHERS = ("pageCacheLockTimeMills", "timerReadBehind", "timerOffsetBehind", "timerCongestNum", "dispatchBehindBytes")
_RATIOS = ("commitLogDiskRatio", "consumeQueueDiskRatio", "timerEnqueueTps", "timerDequeueTps")
# The id of a master, which clients prefer
_BROKER_ID = "0"

# The kinds of keys that newer clients send
_INDEX_TYPE, _UNIQUE, _TAG = "indexType", "U", "T"
# The type of a pull's subscription that names tags
_TAGS = "TAG"
_DAMAGED = "the message is damaged; the server's log says why"
_NO_TAGS = "no message was found, and this index has no tags: run `ingest --index-tags`"
_NO_MESSAGE = "can not find message, maybe time range not correct"
_NO_ROOM = "a frame of 16 MiB has no room for it"
# Entries of a key that are read at once to find the end of the last page
_AHEAD = 1_000
_HOUR_MS = 3_600_000
_LAST_KEY = re.compile(r"([0-9]{1,15})@.*@([0-9]{1,19})", re.ASCII | re.DOTALL)
# A host or an address, and a port; an IPv6 address is without brackets.
_ADDRESS = re.compile(r"[A-Za-z0-9._:%-]*[A-Za-z0-9]:([0-9]{1,5})", re.ASCII)
# Bits of a pull's `sysFlag`.
_SUSPENDS, _HAS_SUBSCRIPTION = 2, 4
_NO_QUEUES = (
    "queue offsets need the broker's store (start the server with --store or --follow), or segments that were archived "
    "with --archive-queues"
)
_NO_GROUPS = (
    "this server has no consumer groups, so a push or lite-pull consumer gets nothing from it: connect the consumer to "
    "the broker, and read history by queryMessage, viewMessage or a DefaultMQPullConsumer"
)
_BUSY = "[REJECTREQUEST]system busy, start flow control for a while"
# Codes of requests that write: messages, offsets, topics, groups, configuration, users
_WRITES = frozenset(
    (
        *(10, 15, 17, 18, 25, 27, 36, 37, 41, 42, 100, 102, 103, 104, 200, 205, 207, 212, 215, 216, 217, 220, 222),
        *(225, 301, 302, 306, 310, 314, 316, 318, 320, 323, 324, 325, 327, 329, 353, 355, 370, 401, 513, 902, 903),
        *(904, 908, 1001, 1002, 1003, 1009, 1011, 1012, 1013, 2001, 2002, 2004, 3001, 3002, 3003, 3006, 3007, 3008),
        *(200050, 200051, 200053, 200056, 200151),
    )
)
_TopicFilter = Callable[[str], bool]
OnLookup = Callable[[str, str, Explain], None]
"""Called after a lookup with its kind, its status and its cost."""
_log = logging.getLogger(__name__)


@dataclass
class _Caller:
    """The caller of a request: the topics that it may see, and the answer of the index so far."""

    # None: every topic
    topics: _TopicFilter | None
    answer: MessagesResult | None = None
    # places that the caller may not see
    withheld: int = 0

    def sees(self, topic: str) -> bool:
        return self.topics is None or self.topics(topic)

    def narrowed(self, messages: RocketmqMessages) -> RocketmqMessages:
        """Return the messages that the caller may see."""
        return messages if self.topics is None else messages.seen_by(self.topics)


@dataclass(eq=False)
class _FittingMessages:
    """A `MessageSource` of the newest messages that fit into one response; older ones are missing."""

    source: MessageSource
    room: int

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return the result for each of `items`."""
        answers: list[Fetched] = []
        while len(answers) < len(items):
            batch, claimed = [], 0
            for item in items[len(answers) : len(answers) + _BATCH]:
                claimed += item.size
                if claimed > self.room:
                    break
                batch.append(item)
            if batch:
                answers += map(self._fitting, self.source.fetch(batch, topic, key))
                continue
            item = items[len(answers)]
            answers.append(_left_out(item))
            if item.size <= _ROOM_BYTES:
                # leave out all older messages, too: a request for messages older than the response then misses none
                self.room = -1
        return answers

    def _fitting(self, fetched: Fetched) -> Fetched:
        message = fetched.message
        if not isinstance(message, Message) or not fetched.carries_key:
            return fetched
        self.room -= message.size
        return fetched if self.room >= 0 else _left_out(fetched.item)


def _left_out(item: IndexItem | None) -> Fetched:
    return Fetched(item=item, state="missing", problem=_NO_ROOM)


class ReadOnlyBroker:
    """Answers requests from `index` and its archived segments, and from the store directory `store`, if given.

    `cluster` and `name` are its names. `advertised` ("host:port") is the address for clients; the default is that of
    their request. `limits` are those of a request: `max_requests`, `max_bytes` and `timeout_s` (15 s). For `root` see
    `RocketmqMessages`. `on_lookup` is called after each lookup and each refused request. Raises `InvalidArgument` if
    `advertised` is not such an address.
    """

    def __init__(
        self,
        index: IndexReader | IndexService,
        *,
        store: Path | None = None,
        root: Path | None = None,
        cluster: str = "tiered-index",
        name: str = "tiered-index",
        advertised: str | None = None,
        clock: Clock | None = None,
        on_lookup: OnLookup | None = None,
        **limits: Unpack[Limits],
    ) -> None:
        self._index = index
        self._on_lookup = on_lookup
        self._store = store
        self._root = root
        self.cluster = cluster
        self.name = name
        if advertised is not None and not ((match := _ADDRESS.fullmatch(advertised)) and 0 < int(match[1]) < 1 << 16):
            raise InvalidArgument(
                f"{advertised!r} is not an address of a broker: give HOST:PORT, as archive.example:9876 "
                "(an IPv6 address without brackets)"
            )
        self._advertised = advertised
        limits.setdefault("timeout_s", 15.0)
        self._limits = LookupLimits(**limits)
        self._clock = clock or SystemClock()
        self._topics_lock = threading.Lock()
        self._known_topics: tuple[float, frozenset[str]] | None = None
        self._counted_queues: tuple[float, dict[str, int]] | None = None
        self._queue_caches = QueueCaches()
        self.log = ThrottledLog(_log, self._clock)
        # raises if `store` is not a store
        self._messages()

    def answer_at_once(self, request: Command, local: Host) -> Command | None:
        """Return the response to a request that needs no lookup, else None. `local` is the address of the request."""
        answer = _AT_ONCE.get(request.code)
        if answer is not None:
            return answer(self, request, local)
        if request.code in _OF_QUEUES and self._store is None and not have_queues(self._archives().values()):
            text = f" request type {request.code} not supported: {_NO_QUEUES}"
            return request.answered(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, text)
        if request.code in _LOOKED_UP:
            return None
        if request.code in _WRITES:
            return request.answered(ResponseCode.NO_PERMISSION, "no permission")
        text = f" request type {request.code} not supported"
        return request.answered(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, text)

    def look_up(self, request: Command, local: Host, sees: _TopicFilter | None = None) -> Command:
        """Return the response to a request for which `answer_at_once` returns None; it reads files and the storage.

        The caller sees only the topics for which `sees` is True (None: every topic).
        """
        caller = _Caller(sees)
        response = self._looked_up(request, local, caller)
        return replace(response, withheld=caller.withheld)

    def _looked_up(self, request: Command, local: Host, caller: _Caller) -> Command:
        budget = LookupBudget(self._index.config.prices, self._limits)
        try:
            with budget.open(), self._counting(request, budget, caller):
                return _LOOKED_UP[request.code](self, request, local, caller)
        except BadRequest as error:
            return request.answered(ResponseCode.SYSTEM_ERROR, str(error))
        except ObjectNotFound:
            return busy(request)  # removed since the log was read; the next request reads the log again
        except (BudgetExceeded, StorageUnavailable) as error:
            # if time is left, the client has disconnected, which ends the budget
            if isinstance(error, StorageUnavailable) or budget.remaining_s() == 0:
                self.log.log(logging.WARNING, "request %d of RocketMQ's protocol: %s", request.code, error)
            return busy(request)
        except UnknownOffsets as error:
            self.log.log(logging.WARNING, "request %d of RocketMQ's protocol: %s", request.code, error)
            return request.answered(ResponseCode.SYSTEM_ERROR, error.problem)
        except TieredIndexError as error:
            self.log.log(logging.ERROR, "request %d of RocketMQ's protocol: %s", request.code, error)
        except Exception:
            text = "request %d of RocketMQ's protocol failed unexpectedly"
            self.log.log(logging.ERROR, text, request.code, exc_info=True)
        return request.answered(ResponseCode.SYSTEM_ERROR, "the index could not be read; its server's log says why")

    def refuse(self, request: Command, peer: str) -> Command:
        """Return the response to a request of `peer` without a valid signature; count and log it."""
        text = "a request for %s from %s is refused: it is not signed with a key of the file"
        self.log.log(logging.WARNING, text, name_of(request.code), peer)
        if self._on_lookup is not None:
            self._on_lookup(f"rocketmq:{name_of(request.code)}", "NoPermission", Explain())
        return request.answered(ResponseCode.NO_PERMISSION, "check signature failed.")

    @contextlib.contextmanager
    def _counting(self, request: Command, budget: LookupBudget, caller: _Caller) -> Iterator[None]:
        """Count the lookup of the block, also if it fails."""
        status = "failed"
        try:
            yield
            status = caller.answer.status if caller.answer is not None else "complete"
        except TieredIndexError as error:
            status = type(error).__name__
            raise
        finally:
            if self._on_lookup is not None and status != BadRequest.__name__:
                spent = RequestStats.of_usage(budget.usage)
                files = caller.answer.explain.files if caller.answer is not None else ()
                explain = Explain(requests=spent.requests, bytes=spent.bytes, cost_usd=spent.cost_usd, files=files)
                self._on_lookup(f"rocketmq:{RequestCode(request.code).name}", status, explain)

    def topics(self, wanted: str | None = None) -> frozenset[str]:
        """Return all topics, at most 30 s old; with `wanted`, perhaps only a part that has it.

        Raises the errors of lookups, and `StorageUnavailable` if files that may have other topics can't be read.
        """
        with self._topics_lock:
            now_s = self._clock.monotonic_s()
            if self._known_topics is not None and now_s - self._known_topics[0] < _TOPICS_S:
                read_s, names = self._known_topics
                if wanted is None or wanted in names or now_s - read_s < _UNKNOWN_TOPIC_S:
                    return names
            answer = self._index.topics(allow_partial=True)
            names = frozenset(summary.topic for summary in answer.topics)
            if answer.status == "complete":
                self._known_topics = now_s, names
            elif wanted not in names:
                problems = "; ".join(f"{report.file}: {report.error}" for report in answer.failed)
                raise StorageUnavailable(f"which topics there are is not known: {problems}")
            return names

    def _has(self, topic: str, caller: _Caller) -> bool:
        return caller.sees(topic) and topic in self.topics(topic)

    # what a name server answers

    def _route(self, request: Command, local: Host, caller: _Caller) -> Command:
        topic = topic_of(request)
        if not self._has(topic, caller):
            text = f"No topic route info in name server for the topic: {topic}"
            if is_system_topic(topic):
                # such as the topic of traces, which `mqadmin queryMsgTraceById` asks for
                text += ": ingest leaves out RocketMQ's own topics, unless --topics names them"
            return request.answered(ResponseCode.TOPIC_NOT_EXIST, text)
        count = self._queue_count(topic)
        queues = {
            "brokerName": self.name,
            "perm": _READABLE,
            "readQueueNums": count,
            "topicSysFlag": 0,
            "writeQueueNums": count,
        }
        route = {"brokerDatas": [self._broker_data(local)], "filterServerTable": {}, "queueDatas": [queues]}
        return request.answered(ResponseCode.SUCCESS, body=json_text(route))

    def _cluster_info(self, request: Command, local: Host) -> Command:
        info = {
            "brokerAddrTable": {self.name: self._broker_data(local)},
            "clusterAddrTable": {self.cluster: [self.name]},
        }
        return request.answered(ResponseCode.SUCCESS, body=json_text(info))

    def _broker_data(self, local: Host) -> dict[str, object]:
        return {
            # an IPv6 address without brackets: clients read the port after the last colon
            "brokerAddrs": {_BROKER_ID: self._advertised or f"{local.ip}:{local.port}"},
            "brokerName": self.name,
            "cluster": self.cluster,
            "enableActingMaster": False,
        }

    def _topic_list(self, request: Command, local: Host, caller: _Caller) -> Command:
        is_other = request.code == RequestCode.GET_TOPICS_BY_CLUSTER and text_of(request, "cluster") != self.cluster
        topics = [] if is_other else sorted(filter(caller.sees, self.topics()))
        return request.answered(ResponseCode.SUCCESS, body=json_text({"topicList": topics}))

    def _topic_configs(self, request: Command, local: Host, caller: _Caller) -> Command:
        queues = self._queues()
        table = {name: _topic_config(name, queues.get(name, 1)) for name in filter(caller.sees, self.topics())}
        body = {"dataVersion": _VERSION, "topicConfigTable": table}
        return request.answered(ResponseCode.SUCCESS, body=json_text(body))

    def _topic_config(self, request: Command, local: Host, caller: _Caller) -> Command:
        topic = topic_of(request)
        if not self._has(topic, caller):
            return request.answered(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {topic}")
        body = json_text(_topic_config(topic, self._queue_count(topic)))
        return request.answered(ResponseCode.SUCCESS, body=body)

    def _queue_count(self, topic: str) -> int:
        """Return the number of queues of a topic: the known one, or that of folders, which may have appeared since."""
        count = self._queues(topic).get(topic, 1)
        if self._store is not None:
            with contextlib.suppress(StorageUnavailable):  # the known number counts while the store is away
                count = max([count, *(queue.queue_id + 1 for queue in queues_in(self._store, topic))])
        return count

    def _queues(self, wanted: str | None = None) -> dict[str, int]:
        """Return the known number of queues of each topic, at most 30 s old, or 1 s if it lacks `wanted`."""
        now_s = self._clock.monotonic_s()
        if self._counted_queues is not None:
            read_s, counts = self._counted_queues
            is_new = wanted is not None and wanted not in counts
            if now_s - read_s < (_UNKNOWN_TOPIC_S if is_new else _TOPICS_S):
                return counts
        counts = {}
        try:
            with contextlib.suppress(StorageMisconfigured, CorruptFile):  # pulls fail, too
                counts = numbers_of_queues(self._store, self._root, self._archives().values(), self._queue_caches)
        except (StorageUnavailable, ObjectNotFound, BudgetExceeded):
            # clients read as many queues as a route has: a smaller number would hide messages
            if self._counted_queues is None:
                raise
            # each try may take the whole time of a request, so the next one is later
            counts = self._counted_queues[1]
        self._counted_queues = now_s, counts
        return counts

    def _key_value(self, request: Command, local: Host) -> Command:
        question = f"Namespace: {request.fields.get('namespace', '')} Key: {request.fields.get('key', '')}"
        return request.answered(ResponseCode.QUERY_NOT_FOUND, f"No config item, {question}")

    def _system_topics(self, request: Command, local: Host) -> Command:
        topics = {"topicList": list(dict.fromkeys((self.cluster, self.name)))}
        return request.answered(ResponseCode.SUCCESS, body=json_text(topics))

    # what a broker answers

    def _constant(self, request: Command, local: Host) -> Command:
        return request.answered(ResponseCode.SUCCESS, body=_CONSTANT[request.code])

    def _config(self, request: Command, local: Host) -> Command:
        said = {"brokerName": self.name, "brokerClusterName": self.cluster, "brokerId": _BROKER_ID}
        # escape line ends and backslashes, as in Java's properties
        lines = [f"{name}={value.translate(_ESCAPES)}\n" for name, value in sorted(said.items())]
        fields = {"version": json_text(_VERSION).decode()}
        return request.answered(ResponseCode.SUCCESS, fields=fields, body="".join(lines).encode())

    def _no_consumers(self, request: Command, local: Host) -> Command:
        # an empty list would leave push and lite-pull consumers without messages and without an error
        self.log.log(logging.WARNING, "request %d of RocketMQ's protocol: %s", request.code, _NO_GROUPS)
        return request.answered(ResponseCode.SYSTEM_ERROR, _NO_GROUPS)

    def _consumers(self, request: Command, local: Host) -> Command:
        text = f"the consumer group[{request.fields.get('consumerGroup', '')}] not online"
        return request.answered(ResponseCode.CONSUMER_NOT_ONLINE, text)

    def _query(self, request: Command, local: Host, caller: _Caller) -> Command:
        topic, key = topic_of(request), checked_of(check_key, request, "key")
        begin_ms, end_ms = number_of(request, "beginTimestamp"), number_of(request, "endTimestamp")
        wanted = min(number_of(request, "maxNum"), _MOST_MESSAGES)
        kind = request.fields.get(_INDEX_TYPE)
        unique = kind == _UNIQUE or request.fields.get(UNIQUE_KEY_QUERY) == "true"
        if kind == _TAG and not unique:
            key = tag_key(key)
        if unique:
            # tools ask from three days ago, because brokers have no older messages
            begin_ms, wanted = 0, _MOST_OF_UNIQUE_KEY
        begin_ms, end_ms = max(begin_ms, 0), min(end_ms, MAX_TIMESTAMP_MS)
        if wanted <= 0 or begin_ms > end_ms or not caller.sees(topic):
            return request.answered(ResponseCode.QUERY_NOT_FOUND, _NO_MESSAGE, fields=self._updated(None, caller))
        stored = caller.narrowed(self._messages())
        source = _FittingMessages(ByUniqueKey(stored) if unique else stored, _ROOM_BYTES)
        cursor = None
        if (last := request.fields.get("lastKey")) and not unique:
            # continue after the last message of the previous page
            end_ms, cursor = self._continued(topic, key, begin_ms, end_ms, last)
        answer = self._index.messages(topic, key, begin_ms, end_ms, wanted, cursor, source=source)
        _check_whole(answer.failed)
        caller.answer = answer
        caller.withheld += sum(answered.withheld for answered in answer.messages)
        messages = [answered.message for answered in answer.messages if isinstance(answered.message, Message)]
        if damaged := [answered for answered in answer.messages if answered.damaged]:
            text = "%s %s: %d of %d messages are damaged; the first one: %s"
            problem = damaged[0].problem
            self.log.log(logging.ERROR, text, topic, key, len(damaged), len(answer.messages), problem)
            if not messages:
                text = f"{len(damaged)} of {len(answer.messages)} messages are damaged; the server's log says why"
                return request.answered(ResponseCode.SYSTEM_ERROR, text)
        if unique and not answer.messages:
            messages, is_damaged = self._of_offset_id(topic, key, caller)
            if is_damaged and not messages:
                return request.answered(ResponseCode.SYSTEM_ERROR, _DAMAGED)
        remark = self._shortfall(topic, key, answer.messages)
        fields = self._updated(answer, caller)
        is_bare = not answer.messages and kind == _TAG and not unique and cursor is None
        if is_bare and not self._has_tags:
            return request.answered(ResponseCode.SYSTEM_ERROR, _NO_TAGS)
        if not messages:
            return request.answered(ResponseCode.QUERY_NOT_FOUND, remark or _NO_MESSAGE, fields=fields)
        if unique:
            # as from a broker: clients take the first of messages that were stored in the same millisecond
            messages.reverse()
        body = b"".join([message.encode() for message in messages])
        return request.answered(ResponseCode.SUCCESS, remark, fields=fields, body=body)

    @property
    def _has_tags(self) -> bool:
        """Whether messages are also indexed by their tags."""
        return any(TAG_NAME in document.key_names for document in every_document(self._index))

    def _shortfall(self, topic: str, key: str, answered: Sequence[Fetched]) -> str | None:
        """Return a text about messages that the response lacks, and log the reasons; None: it lacks none."""
        texts: list[str] = []
        if lacking := [fetched for fetched in answered if fetched.message is None and fetched.problem != _NO_ROOM]:
            counts = Counter("damaged" if fetched.damaged else fetched.state for fetched in lacking)
            states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
            texts.append(f"{len(lacking)} of {len(answered)} messages are not available: {states}")
            text = "%s %s: %s; the first one: %s"
            self.log.log(logging.WARNING, text, topic, key, texts[0], lacking[0].problem)
        if cut := sum(fetched.problem == _NO_ROOM for fetched in answered):
            texts.append(f"{cut} of {len(answered)} messages, the older ones, do not fit into a frame of 16 MiB")
        return "; ".join(texts) or None

    def _continued(self, topic: str, key: str, begin_ms: int, end_ms: int, last_key: str) -> tuple[int, str]:
        """Return the end time and the cursor of a lookup that continues after the last message of a page.

        `last_key` is RocketMQ 5.5's cursor: ``HOUR@TOPIC@K@KEY@UNIQUE KEY@OFFSET``, the hour in epoch milliseconds.
        Raises `BadRequest` if the key has no such message.
        """
        key_parts = _LAST_KEY.fullmatch(last_key)
        if key_parts is None:
            raise BadRequest("the custom field <lastKey> is not HOUR@TOPIC@K@KEY@UNIQUE KEY@OFFSET")
        hour_ms, offset, cursor = int(key_parts[1]), int(key_parts[2]), None
        end_ms = min(end_ms, hour_ms + _HOUR_MS - 1, MAX_TIMESTAMP_MS)
        while begin_ms <= end_ms:
            page = self._index.query(topic, key, begin_ms, end_ms, _AHEAD, cursor)
            _check_whole(page.failed)
            for item in page.items:
                if item.offset == offset:
                    return end_ms, self._index.cursor_after(topic, key, begin_ms, end_ms, item)
            cursor = page.cursor
            if cursor is None or (page.items and page.items[-1].timestamp_ms < hour_ms):
                break
        raise BadRequest("the custom field <lastKey> names no message of this key")

    def _updated(self, answer: MessagesResult | None, caller: _Caller) -> dict[str, str]:
        """Return the time and the log offset up to which the index is known to be complete, as response fields.

        A caller that may see some topics only gets offset 0, since the log's length tells of the bytes of all topics.
        """
        known: list[Mapping[str, int]] = []
        as_of_ms: int | None = None
        if answer is not None and answer.freshness:
            as_of_ms = answer.as_of_ms or 0
            known = [freshness.positions for freshness in answer.freshness]
        if isinstance(self._index, IndexService):
            known = [self._index.durable_positions()]
        # the others are times
        offsets = [at for positions in known for name, at in positions.items() if not name.startswith(READ_PREFIX)]
        return {
            "indexLastUpdatePhyoffset": str(max(offsets, default=0) if caller.topics is None else 0),
            "indexLastUpdateTimestamp": str(self._clock.now_ms() if as_of_ms is None else as_of_ms),
        }

    def _view(self, request: Command, local: Host, caller: _Caller) -> Command:
        offset = number_of(request, "offset")
        messages, is_damaged = self._at(offset, caller) if offset >= 0 else ([], False)
        # several brokers' logs may have the offset: prefer the requested address, then the requested topic
        of_local = [message for message in messages if message.store_host == local]
        if is_damaged and not of_local:
            # the damaged message may be the requested one
            return request.answered(ResponseCode.SYSTEM_ERROR, _DAMAGED)
        messages = of_local or messages
        messages = [message for message in messages if message.topic == request.fields.get("topic")] or messages
        if len(messages) == 1:
            return request.answered(ResponseCode.SUCCESS, body=messages[0].encode())
        several = f": {len(messages)} brokers stored one there" if messages else ""
        text = f"can not find message by the offset, {offset}{several}"
        return request.answered(ResponseCode.SYSTEM_ERROR, text)

    def _of_offset_id(self, topic: str, key: str, caller: _Caller) -> tuple[list[Message], bool]:
        """Return the topic's message if `key` is the id of its place, and whether the place is damaged.

        Tools send such ids as unique keys.
        """
        try:
            host, offset = decode_offset_msg_id(key)
        except InvalidArgument:
            return [], False
        held, is_damaged = self._at(offset, caller)
        return [message for message in held if message.store_host == host and message.topic == topic], is_damaged

    # queues

    def _queues_of(self, topic: str, caller: _Caller) -> Queues[Any] | None:
        """Return the queues; None if the caller may not see the topic, or if it has no queue."""
        if not self._has(topic, caller):
            return None
        queues = queues_at_hand(topic, self._store, self._root, self._archives().values(), self._queue_caches)
        return queues if queues is not None and queues.of_topic(topic) else None

    def _end_of_queue(self, request: Command, local: Host, caller: _Caller) -> Command:
        topic, queue_id = topic_of(request), number_of(request, "queueId")
        if (queues := self._queues_of(topic, caller)) is None:
            return _no_topic(request, topic)
        queue = queues.find(topic, queue_id)
        offset = 0
        # a queue without a folder is empty, as for a broker
        if queue is not None:
            ends = queues.ends(queue)
            offset = ends.begin
            if request.code == RequestCode.GET_MAX_OFFSET:
                # raises if the last entry has no message: then the end is unknown
                queues.last_store_ms(queue, ends)
                offset = ends.end
        return request.answered(ResponseCode.SUCCESS, fields={"offset": str(offset)})

    def _topic_stats(self, request: Command, local: Host, caller: _Caller) -> Command:
        topic = topic_of(request)
        if (queues := self._queues_of(topic, caller)) is None:
            return _no_topic(request, topic)
        rows = []
        known = {queue.queue_id: queue for queue in queues.of_topic(topic, whole=True)}
        # a queue without messages may have no folder
        for queue_id in sorted({*known, *range(self._queues(topic).get(topic, 0))}):
            ends, last_ms = Ends(0, 0), 0
            if (queue := known.get(queue_id)) is not None:
                ends = queues.ends(queue)
                last_ms = queues.last_store_ms(queue, ends)
            name = {"brokerName": self.name, "queueId": queue_id, "topic": topic}
            offsets = {"lastUpdateTimestamp": last_ms, "maxOffset": ends.end, "minOffset": ends.begin}
            # RocketMQ's library writes objects as the names of this table
            rows.append(json_text(name) + b":" + json_text(offsets))
        body = b'{"offsetTable":{' + b",".join(rows) + b'},"topicPutTps":0.0}'
        return request.answered(ResponseCode.SUCCESS, body=body)

    def _pull(self, request: Command, local: Host, caller: _Caller) -> Command:
        topic, queue_id = topic_of(request), number_of(request, "queueId")
        offset, most = number_of(request, "queueOffset"), number_of(request, "maxMsgNums")
        most_bytes = number_of(request, "maxMsgBytes") if "maxMsgBytes" in request.fields else _ROOM_BYTES
        if not number_of(request, "sysFlag") & _HAS_SUBSCRIPTION:
            text = "the consumer's group info not exist: a pull names its subscription itself"
            return request.answered(ResponseCode.SUBSCRIPTION_NOT_EXIST, text)
        if (kind := request.fields.get("expressionType", "").strip() or _TAGS) != _TAGS:
            text = f"The broker does not support consumer to filter message by {kind}"
            return request.answered(ResponseCode.SYSTEM_ERROR, text)
        tags = hashes_of_tags(request.fields.get("subscription", ""))
        if tags is not None and not tags:
            return request.answered(ResponseCode.SUBSCRIPTION_PARSE_FAILED, "parse the consumer's subscription failed")
        if (queues := self._queues_of(topic, caller)) is None:
            return _no_topic(request, topic)
        count = max(queues.of_topic(topic)[-1].queue_id + 1, self._queues(topic).get(topic, 0))
        if queue_id < 0 or (queue_id >= count and queues.find(topic, queue_id) is None):
            text = f"queueId[{queue_id}] is illegal, topic:[{topic}] topicConfig.readQueueNums:[{count}]"
            return request.answered(ResponseCode.INVALID_PARAMETER, text)
        return _pulled(request, queues.pull(topic, queue_id, offset, most, most_bytes, tags))

    def _archives(self) -> Mapping[str | None, SegmentArchive]:
        return self._index.segment_archives

    def _messages(self) -> RocketmqMessages:
        return RocketmqMessages(self._store, self._archives(), root=self._root)

    def _at(self, offset: int, caller: _Caller) -> tuple[list[Message], bool]:
        """Return the distinct messages at an offset of all logs that the caller may see, and whether one is damaged."""
        messages: dict[Message, None] = {}
        is_damaged = False
        own: Host | None = None
        for source in self._logs():
            fetched = caller.narrowed(source).at(offset)
            caller.withheld += fetched.withheld
            if isinstance(message := fetched.message, Message):
                # a broker that rewrote its log has only the message in the store; the archive may have the earlier one
                if source.store is not None or message.store_host != own:
                    messages[message] = None
                own = message.store_host if source.store is not None else own
            elif fetched.damaged:
                # do not show a caller of some topics that the place of another topic's message is damaged
                is_damaged |= not fetched.withheld
                self.log.log(logging.ERROR, "the message at offset %d is damaged: %s", offset, fetched.problem)
            else:
                # usually an offset at which no message begins, which clients may send
                _log.debug("no message at offset %d: %s", offset, fetched.problem)
        return list(messages), is_damaged

    def _logs(self) -> Iterator[RocketmqMessages]:
        """Yield the messages of each log: an offset belongs to one log."""
        if self._store is not None:
            yield RocketmqMessages(self._store, root=self._root)
        for archive in self._archives().values():
            for name in archive.segments().byte_stores:
                yield RocketmqMessages(None, archive, store_name=name)


# Always the same version: clients compare the versions of responses
_VERSION = {"counter": 0, "stateVersion": 0, "timestamp": 0}
# A broker's figures; tools fail if one is missing
_FIGURES = (
    {"brokerVersionDesc": f"tiered-index {__version__}", "brokerActive": "true"}
    | dict.fromkeys(_RATES, "0.0 0.0 0.0")
    | dict.fromkeys((*_TOTALS, *_POOLS, *_OTHERS), "0")
    | dict.fromkeys(_RATIOS, "0.0")
)
# Constant response bodies: the broker has no clients, groups and topics of its own
_CONSTANT: Mapping[int, bytes] = {
    RequestCode.HEART_BEAT: b"",
    RequestCode.UNREGISTER_CLIENT: b"",
    # an empty table of properties; clients take an empty body for none
    RequestCode.GET_NAMESRV_CONFIG: b"\n",
    RequestCode.GET_BROKER_RUNTIME_INFO: json_text({"table": _FIGURES}),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: json_text({"topicList": []}),
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: json_text({"groupList": []}),
    RequestCode.GET_CONSUME_STATS: json_text({"consumeTps": 0.0, "offsetTable": {}}),
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: json_text(
        {"dataVersion": _VERSION, "forbiddenTable": {}, "subscriptionGroupTable": {}}
    ),
}
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


def _check_whole(failed: tuple[FileReport, ...]) -> None:
    """Raise `PartialAnswer` for files that were not read: clients would take their response for the whole."""
    if failed:
        problems = "; ".join(f"{report.file}: {report.error}" for report in failed)
        raise PartialAnswer(f"the answer would lack entries: {problems}", failed=failed)


def _topic_config(name: str, queues: int) -> dict[str, object]:
    plain = {"attributes": {}, "order": False, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0}
    return {"topicName": name, "perm": _READABLE, "readQueueNums": queues, "writeQueueNums": queues, **plain}


def _no_topic(request: Command, topic: str) -> Command:
    return request.answered(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")


def _pulled(request: Command, pulled: Pulled) -> Command:
    fields = {
        "suggestWhichBrokerId": _BROKER_ID,
        "nextBeginOffset": str(pulled.next),
        "minOffset": str(pulled.ends.begin),
        "maxOffset": str(pulled.ends.end),
        "topicSysFlag": "0",
        "groupSysFlag": "0",
    }
    return request.answered(pulled.code, pulled.status, fields=fields, body=pulled.body)


def waits_for_messages(request: Command, response: Command) -> bool:
    """Return whether a pull asked to wait for new messages and found none."""
    return response.code == ResponseCode.PULL_NOT_FOUND and bool(number_of(request, "sysFlag") & _SUSPENDS)


def busy(request: Command) -> Command:
    """Return the response that makes clients try again later."""
    return request.answered(ResponseCode.SYSTEM_BUSY, _BUSY)


_AT_ONCE: Mapping[int, Callable[[ReadOnlyBroker, Command, Host], Command]] = {
    RequestCode.GET_BROKER_CLUSTER_INFO: ReadOnlyBroker._cluster_info,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: ReadOnlyBroker._system_topics,
    RequestCode.GET_CONSUMER_CONNECTION_LIST: ReadOnlyBroker._consumers,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: ReadOnlyBroker._no_consumers,
    RequestCode.LITE_PULL_MESSAGE: ReadOnlyBroker._no_consumers,
    RequestCode.GET_BROKER_CONFIG: ReadOnlyBroker._config,
    RequestCode.GET_KV_CONFIG: ReadOnlyBroker._key_value,
    **dict.fromkeys(_CONSTANT, ReadOnlyBroker._constant),
}
_LOOKED_UP: Mapping[int, Callable[[ReadOnlyBroker, Command, Host, _Caller], Command]] = {
    RequestCode.GET_ROUTEINFO_BY_TOPIC: ReadOnlyBroker._route,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: ReadOnlyBroker._topic_list,
    RequestCode.GET_ALL_TOPIC_CONFIG: ReadOnlyBroker._topic_configs,
    RequestCode.GET_TOPICS_BY_CLUSTER: ReadOnlyBroker._topic_list,
    RequestCode.GET_TOPIC_CONFIG: ReadOnlyBroker._topic_config,
    RequestCode.QUERY_MESSAGE: ReadOnlyBroker._query,
    RequestCode.VIEW_MESSAGE_BY_ID: ReadOnlyBroker._view,
    RequestCode.GET_MAX_OFFSET: ReadOnlyBroker._end_of_queue,
    RequestCode.GET_MIN_OFFSET: ReadOnlyBroker._end_of_queue,
    RequestCode.GET_TOPIC_STATS_INFO: ReadOnlyBroker._topic_stats,
    RequestCode.PULL_MESSAGE: ReadOnlyBroker._pull,
}
# Requests that need queue offsets, from a store or the archive
_OF_QUEUES = frozenset(
    (RequestCode.PULL_MESSAGE, RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET, RequestCode.GET_TOPIC_STATS_INFO)
)
