"""Clients of librdkafka end in a thread of Python, also if garbage collection runs in one of librdkafka."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc, threading
from tiered_index.connectors.kafka.client import broker, calls

gc.disable()
broker.STEP_S = 0.5
done = threading.Event()

def ask():
    asked = broker.KafkaBroker({"bootstrap.servers": "127.0.0.1:1"})
    asked.itself = asked
    for answers in asked.ranges([("topic", 0)]):
        for answer in answers.values():
            # in a thread of the client
            answer.add_done_callback(lambda _: done.set() if gc.collect() else None)
    if closes:
        asked.close()

ask()
assert done.wait(60)
assert len(calls._admins) == 1
ask()
gc.collect()
broker.KafkaBroker({"bootstrap.servers": "127.0.0.1:1"}).admin
assert len(calls._admins) < 3
print("ended")
"""


@pytest.mark.parametrize("closes", [True, False])
def test_garbage_collection_in_a_thread_of_a_client_aborts_nothing(closes):
    run = subprocess.run(
        [sys.executable, "-c", f"closes = {closes}\n{PROGRAM}"], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout) == (0, "ended\n"), run.stderr[-2000:]
