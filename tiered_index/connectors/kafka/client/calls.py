"""Calls of Kafka's client, librdkafka, which may never return: only a thread of the client waits for them.

A client can lock itself permanently, for example if a broker restarts with another address (librdkafka's issue 5476).
Therefore:

- Every call that takes a lock of librdkafka releases Python's lock while it waits. The methods of `confluent_kafka`
  that assign partitions do not, so `_Assigning` calls the library itself. `get_watermark_offsets(cached=True)` does not
  either, and is not used. `tests/kafka/test_calls.py` blocks the library in each call, and has the table.
- Each client has a thread, a daemon, in which its calls run. Another thread waits `LATE_S` longer for a call than the
  call may take. Then it gets `ClientStuck`, and the call goes on.
- A command runs a `Watch`, which ends the process if a call has not returned for a minute, so that a supervisor starts
  another one. Below it a timer of `faulthandler` ends a process in which no thread of Python runs any more.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeVar, cast

from tiered_index.errors import StorageUnavailable

try:
    import confluent_kafka
except ModuleNotFoundError:  # the extra is not installed
    confluent_kafka = cast("Any", None)
_client: Any = confluent_kafka

T = TypeVar("T")
# So much longer than its own time a call may take before it counts as late
LATE_S = 5.0
# The wait for a call of a client that has a late one, and for calls and answers between two checks
_AGAIN_S, _CHECK_S = 0.05, 0.2
# A call without return is a problem of the health after the first time, and ends a command after the second one
TOLD_S, ENDED_S = 10.0, 60.0
# A process in which no thread of Python runs ends after so long. A step of the watch, and its steps between two timers
_FROZEN_S, _STEP_S, _ARMED_STEPS = 300.0, 1.0, 10
# The exit code of a backend that is not available: docs/troubleshooting.md
_UNAVAILABLE = 3
_log = logging.getLogger(__name__)


class ClientStuck(StorageUnavailable):
    """A call of Kafka's client has not returned. It may return later, or never."""


class _Call:
    """A call under way, or one that waits for earlier ones. It should take `within_s`."""

    def __init__(self, name: str, within_s: float) -> None:
        self.name, self.result, self._within_s = name, Future[Any](), within_s
        # by the monotonic clock
        self._begun_s = math.inf

    def begin(self) -> Self:
        """Note that it begins now."""
        self._begun_s = time.monotonic()
        return self

    @property
    def age_s(self) -> float:
        """The seconds since it began; negative: it waits."""
        return time.monotonic() - self._begun_s

    @property
    def is_late(self) -> bool:
        """Whether it has taken longer than it may."""
        return self.age_s > self._within_s + LATE_S


_all_calls: weakref.WeakSet[ClientCalls] = weakref.WeakSet()
_all_lock = threading.Lock()


class ClientCalls:
    """The calls of one `client` of the cluster at `place`, which run one after the other in a thread. Any thread."""

    def __init__(self, client: Any, place: str) -> None:
        self.client, self.place = client, place
        self._queue: SimpleQueue[tuple[_Call, Callable[[], Any]] | None] = SimpleQueue()
        # calls and questions without an answer, in their order
        self._under_way: dict[int, _Call] = {}
        self._end = weakref.finalize(self, self._queue.put, None)
        self._end.atexit = False
        with _all_lock:
            _all_calls.add(self)
        # it refers to the queue alone, so that it ends with this object
        threading.Thread(target=_run_calls, args=(self._queue,), name="tiered-index-kafka", daemon=True).start()

    def begin(self, name: str, function: Callable[[], T], within_s: float = 0.0) -> _Call:
        """Begin a call after the earlier ones, and return it. It should take `within_s` seconds at most."""
        if self.has_ended:
            raise RuntimeError(f"{self.place}: the client is closed")
        call = _Call(name, within_s)
        self._note(call, call.result)
        self._queue.put((call, function))
        return call

    def result(self, call: _Call) -> Any:
        """Return the result of a call, or raise its error. Raises `ClientStuck` if it is late; then it goes on."""
        while True:
            problem = self.problem()
            try:
                return call.result.result(_CHECK_S if problem is None else _AGAIN_S)
            except TimeoutError:
                if problem is not None:
                    raise ClientStuck(problem) from None

    def run(self, name: str, function: Callable[[], T], within_s: float = 0.0, *, is_needed: bool = False) -> T:
        """Return the result of a call. Raises its error, and `ClientStuck`; then its result is lost.

        Behind a late call it is not begun, unless it `is_needed`.
        """
        if not is_needed and (problem := self.problem()) is not None:
            raise ClientStuck(problem)
        return cast("T", self.result(self.begin(name, function, within_s)))

    def await_answers(self, name: str, answers: Iterable[Future[Any]], within_s: float) -> None:
        """Count questions as calls under way until they are answered."""
        for answer in answers:
            self._note(_Call(name, within_s).begin(), answer)

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called."""
        return not self._end.alive

    def end(self) -> None:
        """End the thread after the calls under way. They are watched no more."""
        with _all_lock:
            _all_calls.discard(self)
        self._end()

    def problem(self, after_s: float = 0.0) -> str | None:
        """Return a text about the oldest call under way that is late, and older than `after_s`; None: there is none."""
        late = [call for call in self._open() if call.is_late and call.age_s >= after_s]
        return _problem(self.place, late[0], late[0].age_s) if late else None

    def _open(self) -> list[_Call]:
        return list(self._under_way.values())

    def _note(self, call: _Call, ends: Future[Any]) -> None:
        under_way = self._under_way
        under_way[id(call)] = call
        ends.add_done_callback(lambda _: under_way.pop(id(call), None))


def _run_calls(queue: SimpleQueue[tuple[_Call, Callable[[], Any]] | None]) -> None:
    while (begun := queue.get()) is not None:
        call, function = begun
        call.begin()
        try:
            call.result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            call.result.set_exception(error)
        # else an idle thread keeps the client, which must end in time
        del begun, call, function


def _problem(place: str, call: _Call, age_s: float) -> str:
    return (
        f"{place}: the client, librdkafka, has not returned from {call.name} for {age_s:.0f} s: it may never return "
        "(its issue 5476)"
    )


def _each_client() -> list[ClientCalls]:
    with _all_lock:
        return list(_all_calls)


def awaited(answers: Iterable[Future[Any]], what: str, within_s: float, check: Callable[[], None]) -> None:
    """Wait until questions are answered, which should take `within_s`; meanwhile call `check` several times a second.

    Raises `ClientStuck`, and the errors of `check`.
    """
    begun_s, waiting = time.monotonic(), list(answers)
    while wait(waiting, _CHECK_S).not_done:
        check()
        if time.monotonic() - begun_s > within_s + LATE_S:
            raise ClientStuck(f"{what}: the client has not answered: it may be stuck")


def stuck_clients() -> list[str]:
    """Return a text about each client of the process that has not returned from a call for `TOLD_S`. Any thread."""
    return list(filter(None, (calls.problem(TOLD_S) for calls in _each_client())))


class _Assigning:
    """Assigns partitions by the library itself, because the client's own methods keep Python's lock while they wait."""

    def __init__(self) -> None:
        library: Any = ctypes.CDLL(_client.cimpl.__file__)
        text, number, pointer = ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p
        for name, result, *arguments in (
            ("opaque", pointer, pointer),
            ("topic_partition_list_new", pointer, ctypes.c_int),
            ("topic_partition_list_add", pointer, pointer, text, number),
            ("topic_partition_list_set_offset", ctypes.c_int, pointer, text, number, ctypes.c_int64),
            ("topic_partition_list_destroy", None, pointer),
            ("assign", ctypes.c_int, pointer, pointer),
            ("incremental_assign", pointer, pointer, pointer),
            ("incremental_unassign", pointer, pointer, pointer),
            ("error_code", ctypes.c_int, pointer),
            ("error_string", text, pointer),
            ("error_destroy", None, pointer),
        ):
            function = getattr(library, f"rd_kafka_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, f"_{name}", function)

    def handle(self, client: Any) -> int | None:
        """Return the library's handle of a client; None: it is closed, or of a version that has it elsewhere."""
        # the first field of the object
        at = ctypes.c_void_p.from_address(id(client) + object.__basicsize__).value
        return at if at and self._opaque(at) == id(client) else None

    def __call__(self, name: str, handle: int, partitions: Iterable[Any]) -> None:
        """Call `assign`, `incremental_assign` or `incremental_unassign`. Raises `KafkaException`."""
        listed = self._topic_partition_list_new(0)
        try:
            for partition in partitions:
                place = partition.topic.encode(), partition.partition
                self._topic_partition_list_add(listed, *place)
                self._topic_partition_list_set_offset(listed, *place, partition.offset)
            if name == "assign":
                code, reason = self._assign(handle, listed), None
            elif error := getattr(self, f"_{name}")(handle, listed):
                code, reason = self._error_code(error), self._error_string(error).decode(errors="replace")
                self._error_destroy(error)
            else:
                code, reason = 0, None
        finally:
            self._topic_partition_list_destroy(listed)
        if code:
            raise _client.KafkaException(_client.KafkaError(code, *filter(None, [reason])))

    _opaque: Any
    _topic_partition_list_new: Any
    _topic_partition_list_add: Any
    _topic_partition_list_set_offset: Any
    _topic_partition_list_destroy: Any
    _assign: Any
    _error_code: Any
    _error_string: Any
    _error_destroy: Any


_assigning: list[_Assigning | None] = []


def _assign(client: Any, name: str, partitions: Iterable[Any]) -> None:
    if not _assigning:
        try:
            _assigning.append(_Assigning())
        except (OSError, AttributeError):  # the library is not the client's own
            _assigning.append(None)
    library = _assigning[0]
    if library is not None and (handle := library.handle(client)) is not None:
        library(name, handle, partitions)
    else:
        getattr(client, name)(list(partitions))


class Consumer:
    """A consumer of `confluent_kafka`, whose calls run in a thread of its own. One thread at a time.

    A call that is late raises `ClientStuck`. Messages that it returns later are those of the next call.
    """

    def __init__(self, client: Any, place: str) -> None:
        self._client, self._calls = client, ClientCalls(client, place)
        self._consuming: _Call | None = None

    def consume(self, count: int, timeout_s: float) -> list[Any]:
        """Return up to `count` messages. Raises `KafkaException`, `ClientStuck`."""
        if self._consuming is None:
            function = partial(self._client.consume, count, timeout_s)
            self._consuming = self._calls.begin("consume", function, timeout_s)
        call = self._consuming
        try:
            messages: list[Any] = self._calls.result(call)
        except BaseException:
            # an interrupt leaves messages to the next call
            if call.result.done() and call.result.exception() is not None:
                self._consuming = None
            raise
        self._consuming = None
        return messages

    def poll(self, timeout_s: float) -> Any:
        """Call the callbacks. Raises as `consume`."""
        return self._calls.run("poll", partial(self._client.poll, timeout_s), timeout_s)

    def list_topics(self, timeout: float) -> Any:
        """Return the topics and brokers of the cluster. Raises as `consume`."""
        return self._calls.run("list_topics", partial(self._client.list_topics, timeout=timeout), timeout)

    def assign(self, partitions: Iterable[Any]) -> None:
        """Read these partitions only. It counts for later calls, also if it is late. Raises `KafkaException`."""
        self._assign("assign", partitions)

    def incremental_assign(self, partitions: Iterable[Any]) -> None:
        """Read these partitions, too. As `assign`."""
        self._assign("incremental_assign", partitions)

    def incremental_unassign(self, partitions: Iterable[Any]) -> None:
        """Read these partitions no more. As `assign`."""
        self._assign("incremental_unassign", partitions)

    def unassign(self) -> None:
        """Read nothing. As `assign`."""
        self._assign("assign", [])

    def close(self) -> None:
        """Leave the cluster. A client that does not is left to its thread. Does nothing if it is closed."""
        if self._calls.has_ended:
            return
        try:
            self._calls.run("close", self._client.close, is_needed=True)
        except ClientStuck as error:
            _log.warning("%s", error)
            _keep_for_ever(self._client)
        self._calls.end()

    def _assign(self, name: str, partitions: Iterable[Any]) -> None:
        # the calls run in their order
        with contextlib.suppress(ClientStuck):
            self._calls.run(name, partial(_assign, self._client, name, partitions), is_needed=True)


class Admin:
    """A client of `confluent_kafka` for questions, whose calls run in a thread of its own. Any thread."""

    def __init__(self, client: Any, place: str) -> None:
        self._client, self._calls = client, ClientCalls(client, place)

    def list_topics(self, topic: str | None = None, *, timeout: float) -> Any:
        """Return the topics and brokers of the cluster. Raises `KafkaException`, `ClientStuck`."""
        topics = () if topic is None else (topic,)
        return self._calls.run("list_topics", partial(self._client.list_topics, *topics, timeout=timeout), timeout)

    def poll(self, timeout_s: float) -> Any:
        """Call the callbacks. Raises as `list_topics`."""
        return self._calls.run("poll", partial(self._client.poll, timeout_s), timeout_s)

    def ask(self, name: str, *arguments: Any, request_timeout: float, **more: Any) -> Mapping[Any, Future[Any]]:
        """Return the answers to a question of the client. Raises as `list_topics`."""
        question = partial(getattr(self._client, name), *arguments, request_timeout=request_timeout, **more)
        answers: Mapping[Any, Future[Any]] = self._calls.run(name, question)
        self._calls.await_answers(name, answers.values(), request_timeout)
        return answers


_admins: list[Any] = []
_admins_lock = threading.Lock()


def open_admin(client: Any, place: str) -> Admin:
    """Return `client` for questions. It ends in a thread of its own: in a later call, once nothing else refers to it.

    Garbage collection may run in a thread of librdkafka. If it ended the client there, the process would abort.
    """
    with _admins_lock:
        # the list and the call refer to each
        unused = [at for at in range(len(_admins)) if sys.getrefcount(_admins[at]) == 2]
        ended = [_admins.pop(at) for at in reversed(unused)]
        _admins.append(client)
    if ended:
        threading.Thread(target=ended.clear, name="tiered-index-kafka-end", daemon=True).start()
    return Admin(client, place)


def _keep_for_ever(client: Any) -> None:
    """Let nothing end a client: the end of the process would wait for it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


def _leave() -> None:
    """End the clients for questions that nothing uses, for some seconds at most. The process ends the others."""
    for calls in _each_client():
        _keep_for_ever(calls.client)
    ending = threading.Thread(target=_admins.clear, daemon=True)
    with contextlib.suppress(RuntimeError):
        ending.start()
        ending.join(LATE_S)


atexit.register(_leave)


class Watch:
    """Ends the process if a client of Kafka has not returned from a call for a minute. A context manager.

    It counts its own steps, so that a process that was stopped for a while goes on.
    """

    def __init__(self, tell: Callable[[str], None], end: Callable[[int], Any] = os._exit) -> None:
        self._tell, self._end = tell, end
        self._ages_s: dict[_Call, float] = {}
        self._steps = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiered-index-kafka-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ended.wait(_STEP_S):
                self.run_once()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def problems(self) -> list[str]:
        """Return `stuck_clients`."""
        return stuck_clients()

    def run_once(self) -> None:
        """Count a step of each call under way, and end the process if one has had too many."""
        if self._steps % _ARMED_STEPS == 0:
            # the file by its number: sys.stderr may have none
            faulthandler.dump_traceback_later(_FROZEN_S, exit=True, file=2)
        self._steps += 1
        late = {call: calls.place for calls in _each_client() for call in calls._open() if call.is_late}
        self._ages_s = {call: self._ages_s.get(call, LATE_S) + _STEP_S for call in late}
        for call, place in late.items():
            if self._ages_s[call] >= ENDED_S:
                self._tell(f"{_problem(place, call, self._ages_s[call])}: the process ends; start it again")
                self._end(_UNAVAILABLE)
                return
