"""Starts and ends RocketMQ's name server and broker from their released jars, and a JVM with its clients and tools.

`make test-brokers` fetches the jars. Stores, logs and processes of a test session lie in one folder of its own; every
process ends with the object that started it.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.brokers.java import JavaProcess, java_command
from tests.support.ports import free_ports, is_free
from tests.support.processes import TOP, without_settings

JAVA_FOLDER = Path(__file__).parent / "java"
FOREVER_MS = 2**63 - 1
# Java 17 hides classes that RocketMQ opens
_OPENED = (
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    *(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in ("java.nio", "sun.nio.ch", "java.lang", "java.util")),
)
# bounds of what hangs: on a busy machine a start or a timer takes many times as long
_START_S, _END_S, _ANSWER_S, _WAIT_S = 180.0, 60.0, 180.0, 120.0
# A broker's configuration: small files, so that a few messages fill them, and no wait before it deletes them
_BROKER = {
    "brokerClusterName": "DefaultCluster",
    "brokerId": 0,
    "brokerIP1": "127.0.0.1",
    "brokerIP2": "127.0.0.1",
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 6000,
    "mappedFileSizeTimerLog": 1 << 20,
    "maxHashSlotNum": 5000,
    "maxIndexNum": 20000,
    "maxMessageSize": 1 << 19,
    "brokerRole": "ASYNC_MASTER",
    "flushDiskType": "ASYNC_FLUSH",
    "autoCreateTopicEnable": "true",
    "timerPrecisionMs": 100,
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 1000,
    "cleanResourceInterval": 200,
    # a name server may forget a broker that starts again, until that registers again
    "registerNameServerPeriod": 10_000,
    "deleteCommitLogFilesInterval": 1,
    "diskMaxUsedSpaceRatio": 95,
    # on a busy machine a message may wait long
    "waitTimeMillsInSendQueue": 30_000,
}


class RocketmqError(Exception):
    """An error of RocketMQ's client: its class, the broker's code (None: no answer of a broker), and its text."""

    def __init__(self, error: str, code: int | None, text: str) -> None:
        super().__init__(f"{error} {code}: {text}")
        self.error, self.code, self.text = error, code, text


def _java(class_path: str, folder: Path, program: str, *arguments: str, heap_mb: int) -> list[str]:
    """Return the command of a program whose configuration and logs are in a folder."""
    homes = (f"-Duser.home={folder}", f"-Drocketmq.home.dir={folder}")
    # a consumer looks for the queues of its retry topic every 20 seconds otherwise
    soon = ("-Drocketmq.client.rebalance.waitInterval=1000",)
    memory = (f"-Xmx{heap_mb}m", "-Xms64m", "-XX:MaxDirectMemorySize=256m")
    return java_command(class_path, program, *arguments, options=(*_OPENED, *memory, *homes, *soon))


def _started(command: list[str], folder: Path) -> JavaProcess:
    process = JavaProcess(command, folder / "printed.txt")
    try:
        process.wait_for("boot success", _START_S)
    except BaseException:
        process.kill()
        raise
    return process


class NameServer:
    """A name server."""

    def __init__(self, class_path: str, folder: Path) -> None:
        (port,) = free_ports(1)
        folder.mkdir(parents=True)
        (conf := folder / "namesrv.conf").write_text(f"listenPort={port}\n")
        self.address = f"127.0.0.1:{port}"
        program = "org.apache.rocketmq.namesrv.NamesrvStartup"
        self._process = _started(_java(class_path, folder, program, "-c", str(conf), heap_mb=128), folder)

    def end(self) -> None:
        """End it."""
        self._process.kill()


class Broker:
    """A broker of `namesrv` and its store. `settings` are further lines of its configuration."""

    def __init__(self, class_path: str, folder: Path, name: str, namesrv: str, **settings: object) -> None:
        self.name, self.namesrv, self.store, self._folder = name, namesrv, folder / "store", folder
        self._class_path = class_path
        self._process: JavaProcess | None = None
        # it listens for slaves, too, and two ports below
        port, slaves_port = next(ports for ports in iter(lambda: free_ports(2), None) if is_free(ports[0] - 2))
        self.address = f"127.0.0.1:{port}"
        self._settings = {**_BROKER, "brokerName": name, "listenPort": port, "haListenPort": slaves_port, **settings}
        self._settings.setdefault("storePathRootDir", self.store)
        self.start()

    def start(self, **settings: object) -> None:
        """Start it, or start it again on its store, with changed settings."""
        self._settings |= settings
        self._folder.mkdir(parents=True, exist_ok=True)
        conf = self._folder / "broker.conf"
        conf.write_text("".join(f"{key}={value}\n" for key, value in self._settings.items()))
        program = "org.apache.rocketmq.broker.BrokerStartup"
        command = _java(self._class_path, self._folder, program, "-n", self.namesrv, "-c", str(conf), heap_mb=384)
        self._process = _started(command, self._folder)

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it by a signal; SIGKILL is a crash."""
        if self._process is not None:
            self._process.stop(how)
            self._process = None

    @property
    def segments(self) -> list[Path]:
        """The files of its commit log, the oldest first."""
        return sorted(path for path in (self.store / "commitlog").iterdir() if path.name.isdecimal())


class JavaClient:
    """A JVM with producers, consumers and tools. Each method is one call of `RocketmqSession.java`."""

    def __init__(self, class_path: str, folder: Path) -> None:
        classes = folder / "classes"
        classes.mkdir(parents=True)
        sources = [str(path) for path in sorted(JAVA_FOLDER.glob("*.java"))]
        options = ("-nowarn", "-Xlint:none", "-XDsuppressNotes", "-d", str(classes))
        subprocess.run(("javac", *options, "-cp", class_path, *sources), check=True)
        self.log_folder = folder / "logs" / "rocketmqlogs"
        self._errors = (folder / "errors.txt").open("wb")
        self._process = subprocess.Popen(
            _java(f"{classes}:{class_path}", folder, "RocketmqSession", heap_mb=256),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=without_settings(),
        )

    def ask(self, what: str, **fields: object) -> Any:
        """Return the result of a request. Raises `RocketmqError`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **fields}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the JVM ended: {Path(self._errors.name).read_text()[-2000:]}"
        answer = json.loads(line)
        if "error" in answer:
            raise RocketmqError(answer["error"], answer.get("code"), answer["text"])
        return answer["result"]

    def mqadmin(self, namesrv: str, *arguments: str) -> str:
        """Return what RocketMQ's command line prints."""
        return str(self.ask("mqadmin", arguments=[*arguments, "-n", namesrv]))

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


class Asked:
    """The lookups of RocketMQ's tools at one name server: the broker's own, or our server's."""

    def __init__(self, client: JavaClient, namesrv: str, broker: str) -> None:
        self._client, self.namesrv, self._broker = client, namesrv, broker

    def send(self, topic: str, *messages: Mapping[str, object], **how: object) -> list[dict[str, Any]]:
        """Send messages, and return the place of each."""
        return list(self._client.ask("send", namesrv=self.namesrv, topic=topic, messages=messages, **how))

    def by_key(
        self, topic: str, key: str, most: int = 64, begin: int = 0, end: int = FOREVER_MS
    ) -> list[dict[str, Any]]:
        """Return the messages of a key, none where the client says that there is no message, or no such topic yet."""
        fields = {"topic": topic, "key": key, "most": most, "begin": begin, "end": end}
        try:
            return list(self._client.ask("by_key", namesrv=self.namesrv, **fields))
        except RocketmqError as error:
            if error.error == "MQClientException" and re.search("no message|not matched route info", error.text):
                return []
            raise

    def by_id(self, topic: str, msg_id: str) -> dict[str, Any]:
        """Return the message with an offset id or a unique key."""
        return dict(self._client.ask("by_id", namesrv=self.namesrv, topic=topic, id=msg_id))

    def pull(self, topic: str, queue: int, offset: int, most: int = 32, tags: str = "*") -> dict[str, Any]:
        """Return a pull's status, offsets and messages."""
        fields = {"topic": topic, "queue": queue, "offset": offset, "most": most, "tags": tags, "broker": self._broker}
        return dict(self._client.ask("pull", namesrv=self.namesrv, **fields))

    def drain(self, topic: str) -> list[dict[str, Any]]:
        """Return every message of every queue, by pulls."""
        return list(self._client.ask("drain", namesrv=self.namesrv, topic=topic))

    def ends(self, topic: str) -> dict[str, list[int]]:
        """Return the least and the greatest offset of each queue."""
        return dict(self._client.ask("ends", namesrv=self.namesrv, topic=topic))

    def answered(self, what: str, *arguments: Any) -> Any:
        """Return the answer of another method, and nothing if it fails: a broker that starts is not known at once."""
        try:
            return getattr(self, what)(*arguments)
        except RocketmqError:
            return []

    def mqadmin(self, *arguments: str) -> str:
        """Return what RocketMQ's command line prints."""
        return self._client.mqadmin(self.namesrv, *arguments)

    def ask(self, what: str, **fields: object) -> Any:
        """Return the answer to another request of `RocketmqSession.java`."""
        return self._client.ask(what, namesrv=self.namesrv, **fields)


def tiered_index(*arguments: object, code: int = 0) -> str:
    """Run a command, and return what it prints; it must end with `code`."""
    command = (sys.executable, "-m", "tiered_index.cli", *map(str, arguments))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, cwd=TOP, env=without_settings())
    assert ended.returncode == code, f"{command} ended with {ended.returncode}: {ended.stdout} {ended.stderr}"
    return ended.stdout


@contextlib.contextmanager
def serving(client: JavaClient, broker: str, *arguments: object) -> Iterator[Asked]:
    """Run ``serve`` with a port for RocketMQ's tools in the block, under the name of a broker."""
    command = [sys.executable, "-m", "tiered_index.cli", "serve", "--json", "--port", "0", "--rocketmq-port", "0"]
    command += ["--rocketmq-broker", broker, "--rocketmq-cluster", "DefaultCluster", *map(str, arguments)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, text=True, cwd=TOP, env=without_settings(), stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        try:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                errors.seek(0)
                raise AssertionError(f"{command} ended with {process.wait()}: {errors.read()}")
            (port,) = re.findall(r"rocketmq://127\.0\.0\.1:([0-9]+)", line)
            yield Asked(client, f"127.0.0.1:{port}", broker)
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            finally:
                process.kill()


def until(what: Any, seconds: float = _WAIT_S) -> Any:
    """Call `what` until it returns a true value, and return that. Fails when the time is over."""
    begun_s = time.monotonic()
    while not (result := what()):
        assert time.monotonic() - begun_s < seconds, f"{what} stays {result!r}"
        time.sleep(0.05)
    return result


def made_topic(living: Asked, broker: Broker, topic: str, *more: str, queues: int = 3) -> None:
    """Make a topic at one broker, and wait until producers can send to it.

    A topic that is made by sending may come to another broker of the session.
    """
    update = ("updateTopic", "-b", broker.address, "-t", topic, "-r", str(queues), "-w", str(queues), *more)

    def is_made() -> bool:
        # the tool gives a request up after five seconds, and only prints why
        living.mqadmin(*update)
        return '"queueDatas":[{' in re.sub(r"\s", "", living.mqadmin("topicRoute", "-t", topic))

    until(is_made)


def place(message: Mapping[str, Any]) -> tuple[int, str]:
    """Return the place of a message: an order in which answers can be compared."""
    return message["log_offset"], message["id"]


def assert_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Fail unless our messages equal a broker's, in the same order; name the fields that differ."""
    assert [place(message) for message in ours] == [place(message) for message in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert [(name, our[name], their[name]) for name in their if our[name] != their[name]] == []


def same_by_key(living: Asked, ours: Asked, topic: str, key: str, count: int) -> list[dict[str, Any]]:
    """Wait until a broker has `count` messages of a key; return them. Fails unless our server has the same.

    Both index a message some time after it was sent.
    """
    messages = until(
        lambda: len(wanted := living.answered("by_key", topic, key)) >= count and sorted(wanted, key=place)
    )
    assert len(messages) == count
    until(lambda: len(ours.answered("by_key", topic, key)) >= count)
    assert_same(sorted(ours.by_key(topic, key), key=place), messages)
    return list(messages)


def same_by_pulls(living: Asked, ours: Asked, topic: str, count: int) -> list[dict[str, Any]]:
    """Wait until a broker has `count` messages in a topic's queues; return them. Fails unless our server has the same.

    Some stores fill queues after the index, and both some time after a message was sent.
    """
    messages = until(lambda: len(pulled := living.answered("drain", topic)) >= count and pulled)
    assert len(messages) == count
    until(lambda: len(ours.answered("drain", topic)) >= count)
    assert_same(ours.drain(topic), messages)
    return list(messages)


def let_delete(client: JavaClient, broker: Broker, count: int) -> None:
    """Let a broker delete its `count` oldest segments: they look as if they were written long ago."""
    oldest = broker.segments[:count]
    assert len(oldest) == count < len(broker.segments), "the last segment stays"
    for path in oldest:
        os.utime(path, (0, 0))
    client.mqadmin(broker.namesrv, "deleteExpiredCommitLog", "-b", broker.address)
    # brokers begin to delete a minute after their start
    until(lambda: not any(path.exists() for path in oldest), 180.0)
