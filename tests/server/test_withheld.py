"""A token of some topics sees no places of other topics' messages in a common log, by any request."""

import json

import pytest

from tests.server.conftest import serving
from tests.server.test_guard import bearer
from tests.support.storage_faults import FaultStorage
from tests.support.store_writer import StoreWriter
from tiered_index import IndexService
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import Host, offset_msg_id
from tiered_index.format.segments.archived import PIECE_BYTES
from tiered_index.server import lookups
from tiered_index.server.http.tokens import add_token
from tiered_index.storage.memory import MemoryStorage

T = 1_762_000_000_000
BROKER = Host("127.0.0.1", 10911)
SEGMENT_BYTES = 128 << 10
SMALL, LARGE = 100, 40_000  # more than the first read of a message of unknown size


@pytest.fixture(params=["local", "archived"])
def held(request, tmp_path, monkeypatch):
    """Two topics in one log, and a client whose token sees one of them. Delays of answers are only recorded."""
    waits: list[float] = []
    monkeypatch.setattr(lookups, "pause_s", lambda passed_s: waits.append(passed_s) or 0.0)
    store, storage = tmp_path / "store", FaultStorage(MemoryStorage())
    with StoreWriter(store, segment_bytes=SEGMENT_BYTES) as writer:
        for number, (topic, size) in enumerate(
            (("orders", SMALL), ("payments", SMALL), ("payments", LARGE), ("orders", LARGE), ("payments", LARGE)) * 2
        ):
            writer.put(topic, 0, b"secret-%d " % number * (size // 10), keys=[f"k{number}"], store_ms=T + number)
        writer.flush()
    messages = list(CommitLogReader(store / "commitlog").messages())
    token = add_token(tmp_path / "tokens.json", "team", "write", ["orders"])
    settings = {"slots": 97, "items": 1000, "background": False, "offset_space": "commitlog"}
    with IndexService.open(root=tmp_path / "root", storage_backend=storage, **settings) as index:
        archived = request.param == "archived"
        if archived:
            index.run_lifecycle()
            assert SegmentArchiver(index, "s", store / "commitlog").run_once()
            messages = [message for message in messages if message.physical_offset < SEGMENT_BYTES]
        audit = tmp_path / "audit.ndjson"
        with serving(index, tokens=tmp_path / "tokens.json", store=None if archived else store, audit=audit) as client:
            client.headers.update(bearer(token))
            yield client, messages, storage, audit, waits


def places_of(messages):
    """Return places without a visible message: inside messages, at other topics' messages, after the end."""
    own, small, large = messages[0], messages[1], messages[2]
    assert (own.topic, small.topic, large.topic) == ("orders", "payments", "payments")
    within = [own.physical_offset + 4, small.physical_offset + 4, large.physical_offset + 20_000]
    return [small.physical_offset, large.physical_offset, *within]


def test_places_of_which_nothing_may_be_seen_answer_alike(held):
    client, messages, storage, audit, waits = held
    seen = set()
    # from here on the service knows the archived segment's table
    client.get(f"/v1/messages/{offset_msg_id(BROKER, places_of(messages)[0])}", params={"topic": "orders"})
    waits.clear()
    for offset in places_of(messages):
        for more in ({"topic": "orders"}, {}, {"topic": "orders", "max_bytes": 160_000, "max_requests": 4}):
            before = storage.calls("get_range")
            got = client.get(f"/v1/messages/{offset_msg_id(BROKER, offset)}", params=more)
            problem = got.json()
            problem["detail"] = problem["detail"].replace(offset_msg_id(BROKER, offset), "ID")
            del problem["request_id"]
            seen.add((got.status_code, json.dumps(problem), storage.calls("get_range") - before, len(waits)))
            assert got.status_code == 404 and problem["detail"] == "no message ID"
            waits.clear()
    assert len(seen) == 1, seen
    behind = client.get(f"/v1/messages/{offset_msg_id(BROKER, 10**9)}", params={"topic": "orders"})
    assert (behind.status_code, len(waits)) == (404, 2)
    records = [json.loads(line) for line in audit.read_text().splitlines()]
    callers = {(record["caller"], record["lookup"], record["status"], record["withheld"]) for record in records}
    assert callers == {("team", "message", "Refused", 1)}
    assert records[0]["topic"] == "orders" and records[0]["id"] == offset_msg_id(BROKER, places_of(messages)[0])
    waits.clear()
    for message in messages:
        if message.topic == "orders":
            got = client.get(f"/v1/messages/{message.offset_msg_id}", params={"topic": "orders"})
            assert got.json()["messages"][0]["message"]["body"] == message.body().decode()
    assert not waits


def test_posted_entries_are_no_window(held):
    client, messages, _, audit, waits = held
    own, small, large = messages[:3]
    windows = []
    for number, offset in enumerate([*places_of(messages), small.physical_offset, large.physical_offset]):
        size = {5: small.size, 6: large.size}.get(number, 200)
        windows.append((f"w{number}", offset, size))
    windows.append(("k0", own.physical_offset, own.size))
    same = {"topic": "orders", "queue_id": 0, "timestamp_ms": T}
    entries = [json.dumps(same | {"keys": [key], "offset": at, "size": size}) for key, at, size in windows]
    kind = {"content-type": "application/x-ndjson"}
    posted = client.post("/v1/entries", content="\n".join(entries), headers=kind)
    assert posted.status_code == 200
    seen = set()
    # from here on the service knows the archived segment's table and, after the first missing message, the log's end
    client.get(f"/v1/messages/{own.offset_msg_id}", params={"topic": "orders"})
    client.get("/v1/messages", params={"topic": "orders", "key": "w0"})
    waits.clear()
    for key, at, size in windows[:-1]:
        got = client.get("/v1/messages", params={"topic": "orders", "key": key, "explain": True})
        answer = got.json()
        (row,) = answer.pop("messages")
        del row["item"]
        explain = answer.pop("explain")
        # the service reads whole pieces, by the size in the entry
        pieces = -(-(at + size) // PIECE_BYTES) - at // PIECE_BYTES
        read = explain["message_bytes"] and explain["message_bytes"] - pieces * PIECE_BYTES
        cost = explain["message_requests"], read, explain["requests"]
        seen.add(json.dumps([got.status_code, row, cost, answer["collisions"], answer["status"]]))
        assert (row["state"], row["message"], row["read_from"], len(waits)) == ("missing", None, None, 2)
        waits.clear()
    assert len(seen) == 1, seen
    assert [json.loads(line)["withheld"] for line in audit.read_text().splitlines() if "withheld" in line] == [1] * 8
    rows = client.get("/v1/messages", params={"topic": "orders", "key": "k0"}).json()["messages"]
    assert [row["message"]["body"] for row in rows] == [own.body().decode()]
    assert not waits


def test_the_time_of_an_answer_that_withholds_something_is_a_step():
    for passed_s, whole_s in ((0.0, 0.2), (0.19, 0.2), (0.21, 0.4), (0.5, 0.8), (3.0, 3.2)):
        assert passed_s + lookups.pause_s(passed_s) == pytest.approx(whole_s)
