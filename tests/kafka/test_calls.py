"""Calls of a client that never return: no other thread waits for them, and a command ends and says why."""

import ast
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.kafka.followed import source_of
from tests.support.blocked_library import can_block
from tests.support.hanging import beside, until
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka.client import calls
from tiered_index.connectors.kafka.client.calls import ENDED_S, ClientCalls, ClientStuck, Consumer, Watch, stuck_clients

FOLDER = Path(__file__).parents[2]
# each call of the client that takes a lock of the library, and the library's functions that it waits in
TABLE = {
    "consume": ["consume_batch_queue"],
    "poll": ["consumer_poll"],
    "list_topics": ["metadata"],
    "assign": ["assign"],
    "unassign": ["assign"],
    "incremental_assign": ["incremental_assign"],
    "incremental_unassign": ["incremental_unassign"],
    "close": ["consumer_close", "destroy"],
    "admin.poll": ["poll"],
    "admin.list_topics": ["metadata"],
    "list_offsets": ["ListOffsets"],
    "describe_topics": ["DescribeTopics"],
    "describe_configs": ["DescribeConfigs"],
    "alter_consumer_group_offsets": ["AlterConsumerGroupOffsets"],
}
# the client is new, and its locks are its own
OPENED = {"Consumer", "AdminClient"}
# facts about what a call returned: they take no lock
FACTS = {
    *("ConsumerGroupTopicPartitions", "KafkaError", "KafkaException", "Message", "TopicCollection", "TopicPartition"),
    *("ConfigResource", "OffsetSpec", "IsolationLevel", "KafkaError._PARTITION_EOF", "KafkaError._AUTO_OFFSET_RESET"),
}

PROGRAM = """
import ctypes, sys, threading
import confluent_kafka as kafka
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec
from tests.support.blocked_library import block
from tiered_index.connectors.kafka.client import calls

name, function = sys.argv[1:]
calls.LATE_S = 0.2
client = kafka.Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0})
asker = AdminClient({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
consumer, admin = calls.Consumer(client, "kafka://here"), calls.open_admin(asker, "kafka://here")
place = kafka.TopicPartition("t", 0, 0)
questions = {
    "list_offsets": {place: OffsetSpec.latest()},
    "describe_topics": kafka.TopicCollection(["t"]),
    "describe_configs": [ConfigResource(ConfigResource.Type.TOPIC, "t")],
    "alter_consumer_group_offsets": [kafka.ConsumerGroupTopicPartitions("g", [place])],
}
acts = {
    "consume": lambda: consumer.consume(1, 0.1),
    "poll": lambda: consumer.poll(0.1),
    "list_topics": lambda: consumer.list_topics(timeout=0.1),
    "assign": lambda: consumer.assign([place]),
    "unassign": lambda: consumer.unassign(),
    "incremental_assign": lambda: consumer.incremental_assign([place]),
    "incremental_unassign": lambda: consumer.incremental_unassign([place]),
    "close": lambda: consumer.close(),
    "admin.poll": lambda: admin.poll(0.0),
    "admin.list_topics": lambda: admin.list_topics(timeout=0.1),
}
acts |= {each: lambda each=each: admin.ask(each, questions[each], request_timeout=1.0) for each in questions}
library = ctypes.CDLL(kafka.cimpl.__file__)
block(library, f"rd_kafka_{function}")
# the thread of the client waits in the library, and this one runs on
try:
    acts[name]()
except calls.ClientStuck as error:
    print(error)
problems = [client.problem() for client in calls._each_client()]
print([problem for problem in problems if problem is not None])
"""


@pytest.mark.skipif(not can_block(), reason="needs Linux on x86_64 or aarch64")
@pytest.mark.parametrize(("name", "function"), [(name, each) for name, several in TABLE.items() for each in several])
def test_no_call_keeps_pythons_lock_while_the_library_is_blocked(name, function):
    """Also the end of the process does not wait."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, function], cwd=FOLDER, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr[-2000:]
    if name != "close":  # a client that was closed is watched no more
        called = "assign" if name == "unassign" else name.removeprefix("admin.")
        assert f"the client, librdkafka, has not returned from {called}" in run.stdout.splitlines()[-1]
    else:
        assert "has not returned from close" in run.stderr


def used(tree):
    """The attributes of the client's module that code names, as `kafka.KafkaError` and `kafka.admin.OffsetSpec`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            module = ast.unparse(node.value)
            if module in ("kafka", "kafka.admin", "_client") and node.attr not in ("admin", "cimpl"):
                yield node.attr


def test_every_call_of_the_client_is_in_the_table():
    """Others than those of `calls` have no client: they have a `Consumer` or an `Admin`."""
    modules = {path: ast.parse(path.read_text()) for path in (FOLDER / "tiered_index/connectors/kafka").rglob("*.py")}
    opened = FACTS | OPENED
    for path, tree in modules.items():
        assert set(used(tree)) <= opened, path
    methods = {
        node.attr
        for node in ast.walk(modules[FOLDER / "tiered_index/connectors/kafka/client/calls.py"])
        if is_of_client(node)
    }
    questions = {
        node.args[0].value
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "ask" and node.args
    }
    assert methods | questions == {name.removeprefix("admin.") for name in TABLE} - {
        *("assign", "unassign", "incremental_assign", "incremental_unassign")
    }


def is_of_client(node):
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self._client"


class Blocked:
    """A client whose calls wait for `go`."""

    def __init__(self):
        self.go, self.count, self.assigned = threading.Event(), 0, []

    def consume(self, count, timeout_s):
        self.count += 1
        number = self.count
        assert self.go.wait(120)
        return [f"message of call {number}"] * count

    def incremental_assign(self, partitions):
        self.assigned += partitions

    def close(self):
        assert self.go.wait(120)


@pytest.fixture
def blocked(monkeypatch):
    monkeypatch.setattr(calls, "LATE_S", 0.05)
    monkeypatch.setattr(calls, "TOLD_S", 0.0)
    monkeypatch.setattr(calls, "_assigning", [None])
    client = Blocked()
    yield client, Consumer(client, "kafka://there")
    client.go.set()
    until(lambda: not any("kafka://there" in problem for problem in stuck_clients()))


def test_messages_of_a_late_call_are_those_of_the_next_one_and_calls_keep_their_order(blocked):
    client, consumer = blocked
    with pytest.raises(ClientStuck, match=r"kafka://there: the client, librdkafka, has not returned from consume for"):
        consumer.consume(2, 0.0)
    consumer.incremental_assign(["p"])
    assert client.assigned == [] and any("kafka://there" in problem for problem in stuck_clients())
    client.go.set()
    until(lambda: client.assigned == ["p"])
    for number in (1, 2):
        assert consumer.consume(2, 0.0) == [f"message of call {number}"] * 2
    assert not any("kafka://there" in problem for problem in stuck_clients())


def test_a_call_that_waits_for_earlier_ones_is_not_late(monkeypatch):
    """A question of one thread waits for the slow ones of others, each of which takes no longer than it may."""
    monkeypatch.setattr(calls, "LATE_S", 0.0)
    client = ClientCalls(None, "kafka://slow")
    go = threading.Event()
    earlier = [client.begin("list_topics", lambda: go.wait(120), 120.0) for _ in range(3)]
    asking = beside(lambda: client.run("describe_topics", lambda: "answered", 60.0))
    until(lambda: len(client._open()) == 4)
    assert all(call.age_s < 0 for call in client._open()[1:]) and client.problem() is None
    go.set()
    assert asking() == "answered" and all(client.result(call) for call in earlier)
    client.end()


def test_a_watch_ends_the_process_after_a_minute_of_its_own_steps(blocked):
    _, consumer = blocked
    told, ended = [], []
    watch = Watch(told.append, ended.append)
    with pytest.raises(ClientStuck):
        consumer.consume(1, 0.0)
    steps = 0
    while not ended:
        watch.run_once()
        steps += 1
    calls.faulthandler.cancel_dump_traceback_later()
    assert ended == [3] and ENDED_S - 10 < steps <= ENDED_S
    (why,) = told
    assert "from consume for 60 s" in why and why.endswith("the process ends; start it again")


def test_a_watch_does_not_end_a_process_whose_calls_return(blocked):
    client, consumer = blocked
    ended = []
    watch = Watch(lambda _: None, ended.append)
    for _ in range(3):
        client.go.clear()
        with pytest.raises(ClientStuck):
            consumer.consume(1, 0.0)
        for _ in range(int(ENDED_S) - 10):
            watch.run_once()
        client.go.set()
        until(lambda: consumer.consume(1, 0.0))
        watch.run_once()
    calls.faulthandler.cancel_dump_traceback_later()
    assert not ended


FROZEN = """
import ctypes, threading
from tiered_index.connectors.kafka.client import calls

calls._FROZEN_S = 0.5
watch = calls.Watch(print)
watch.run_once()
# a call that keeps Python's lock
ctypes.PyDLL(None).pause()
"""


def test_a_process_in_which_no_thread_of_python_runs_any_more_ends():
    run = subprocess.run([sys.executable, "-c", FROZEN], cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and "Timeout" in run.stderr and 'File "<string>", line 9' in run.stderr


def test_a_follower_whose_client_is_stuck_tells_why_and_stops_at_once(
    index, servers, producing, topic, monkeypatch, tmp_path
):
    """It goes on, without a loss, if the client does."""
    monkeypatch.setattr(calls, "LATE_S", 0.05)
    monkeypatch.setattr(calls, "TOLD_S", 0.0)
    producing.send(topic, [{"key": f"k{n}", "partition": 0} for n in range(20)])
    source = source_of(index, servers, topic, follow=True)
    client, go = source._consumer._client, threading.Event()

    class Stuck:
        def consume(self, count, timeout_s):
            messages = client.consume(count, timeout_s)
            assert go.wait(120)
            return messages

        def __getattr__(self, name):
            return getattr(client, name)

    source._consumer._client = Stuck()
    with Follower(index, source, note=lambda _: None) as follower:
        follower.in_background()
        until(lambda: any("librdkafka, has not returned from consume" in text for text in follower.problems()))
        looks = []
        follower.status = looks.append
        until(lambda: looks)  # the status lines go on
        go.set()
        until(lambda: follower.messages == 20)
        until(lambda: follower.problems() == [])
        go.clear()
        until(lambda: follower.problems())
        follower.end()
    go.set()


SERVED = """
import ctypes, os, sys, threading
import confluent_kafka
from tests.support.blocked_library import block
from tiered_index.connectors.kafka.client import calls

library = ctypes.CDLL(confluent_kafka.cimpl.__file__)
calls.LATE_S, calls.TOLD_S, calls.ENDED_S, calls._STEP_S = 0.2, 0.5, float(os.environ["ENDED_S"]), 0.05

def block_when_told():
    sys.stdin.readline()
    block(library, "rd_kafka_consume_batch_queue")

threading.Thread(target=block_when_told, daemon=True).start()
from tiered_index.cli.__main__ import run
run()
"""


@pytest.fixture
def commanded(servers, producing, topic, tmp_path, monkeypatch):
    """Start a command on a topic, in a process whose library is blocked by a line of its stdin."""
    producing.send(topic, [{"key": "k", "partition": 0}])
    running = []

    def start(*arguments, ended_s):
        monkeypatch.setenv("ENDED_S", str(ended_s))
        where = ("--root", tmp_path / "root", "--storage", (tmp_path / "storage").as_uri())
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", SERVED, *map(str, (*arguments, *where))],
                cwd=FOLDER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return running[0]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def lines_until(process, met):
    for line in process.stdout:
        if met(json.loads(line)):
            return
    raise AssertionError(process.stderr.read())


@pytest.mark.skipif(not can_block(), reason="needs Linux on x86_64 or aarch64")
@pytest.mark.parametrize("is_told_to_end", [True, False])
def test_a_command_whose_client_is_stuck_ends_at_sigterm_or_by_itself(commanded, servers, topic, is_told_to_end):
    place = f"kafka://{servers}/{topic}"
    process = commanded("ingest", place, "--follow", "--archive", "--json", ended_s=600 if is_told_to_end else 3)
    lines_until(process, lambda line: line.get("messages") == 1)
    process.stdin.write("block\n")
    process.stdin.flush()
    lines_until(process, lambda line: any("has not returned from" in problem for problem in line.get("problems", ())))
    if is_told_to_end:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, process.stderr.read()
    else:
        assert process.wait(120) == 3
        assert "the process ends; start it again" in process.stderr.read()


@pytest.mark.skipif(not can_block(), reason="needs Linux on x86_64 or aarch64")
def test_a_service_whose_client_is_stuck_answers_names_it_in_its_health_and_ends_at_sigterm(
    commanded, servers, producing, topic
):
    process = commanded("serve", "--port", 0, "--json", "--follow", f"kafka://{servers}/{topic}", ended_s=600)
    url = json.loads(process.stdout.readline())["url"]
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:

        def found():
            return client.get("/v1/query", params={"topic": topic, "key": "k"}).json()["items"]

        until(found)
        process.stdin.write("block\n")
        process.stdin.flush()
        until(lambda: "has not returned from consume" in str(client.get("/v1/health").json()["problems"]))
        assert found() and client.get("/livez").status_code == 200
        assert "tiered_index_follow_lag_records" in client.get("/metrics").text
        # a client of another thread, for one record, is stuck as well
        assert client.get(f"/v1/messages/kafka:{topic}/0/0").status_code == 502
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, process.stderr.read()
