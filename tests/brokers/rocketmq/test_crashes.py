"""Brokers that crash, lose the unflushed end of their log, and write on."""

import json
import signal

import pytest

from tests.brokers.rocketmq.living import made_topic, serving, tiered_index, until

pytestmark = pytest.mark.xdist_group("rocketmq brokers")


def test_messages_of_a_lost_end_hide_no_others(new_broker, client, topic, tmp_path):
    """An indexed message is cut off, and its offset is then within a longer one. It is missing, and not damaged."""
    index = ("--root", tmp_path / "root", "--storage", (tmp_path / "storage").as_uri())
    broker, living = new_broker()
    made_topic(living, broker, topic, queues=1)
    for body in ("kept", "lost", "lost, too"):
        living.send(topic, {"keys": "k", "body": body.encode().hex()})
    sent = until(lambda: len(messages := living.answered("by_key", topic, "k")) == 3 and messages)
    offsets = {_text(message): message["log_offset"] for message in sent}
    tiered_index("ingest", broker.store, *index, "--json")
    broker.end(signal.SIGKILL)
    last = broker.segments[-1 - sum(int(path.name) > offsets["lost"] for path in broker.segments)]
    with last.open("r+b") as segment:
        at = offsets["lost"] - int(last.name)
        segment.seek(at)
        segment.write(bytes(last.stat().st_size - at))
    broker.start()
    # a message that is sent again may be in the log twice: send it when the broker answers
    until(lambda: [_text(message) for message in living.answered("drain", topic)] == ["kept"])
    living.send(topic, {"keys": "k", "body": (b"L" * 5_000).hex()})
    until(lambda: broker.segments and b"L" * 5_000 in last.read_bytes())
    # without the option the run ends, and the range is recorded all the same
    tiered_index("ingest", broker.store, *index, "--json", code=4)
    summary = json.loads(tiered_index("ingest", broker.store, *index, "--json", "--skip-missing"))
    assert [loss["kind"] for loss in summary["losses"]] == ["rewritten"]
    query = ("query", topic, "k", "--messages", *index, "--store", broker.store, "--json")
    answer = json.loads(tiered_index(*query))
    assert (answer["status"], answer["lost"]) == ("complete", [])
    states = sorted(fetched["state"] for fetched in answer["messages"])
    assert states.count("local") == 2
    (gone,) = [fetched for fetched in answer["messages"] if fetched["item"]["offset"] == offsets["lost, too"]]
    assert gone["state"] == "missing" and "cut off or rewritten" in gone["problem"]
    with serving(client, broker.name, *index, "--store", broker.store) as ours:
        assert {_text(message) for message in ours.by_key(topic, "k")} == {"kept", "L" * 5_000}


def _text(message):
    return bytes.fromhex(message["body"]).decode()
