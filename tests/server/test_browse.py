"""`GET /v1/browse`: a topic's messages around a moment, from a store or archived segments, for permitted tokens."""

import json

import pytest

from tests.rocketmq.archived_store import index_log
from tests.rocketmq.test_archived_queues import archive, write_store
from tests.server.conftest import index_in, serving
from tests.server.test_guard import bearer
from tiered_index import IndexReader, erase
from tiered_index.base.retention import Horizon
from tiered_index.connectors.rocketmq.remoting.browsing import Browser
from tiered_index.connectors.rocketmq.remoting.pulling import StoreQueues
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.server.http.served import Caps
from tiered_index.server.http.tokens import add_token
from tiered_index.service.log.expired import Expired

T = 1_700_000_000_000
COUNT = 60


def puts():
    """Messages of three queues of `orders`, one per second, with some of `payments` between them."""
    for n in range(COUNT):
        if n % 5 == 4:
            yield {"topic": "payments", "queue_id": 0, "body": b"secret %d" % n, "store_ms": T + n * 1000}
        else:
            yield {"topic": "orders", "queue_id": n % 3, "body": b"order %d" % n, "store_ms": T + n * 1000}


@pytest.fixture(scope="module", params=["store", "archive", "store and archive"])
def held(request, tmp_path_factory):
    """A client of a service with the messages, those of `orders` in the log's order, and the token of a team."""
    folder = tmp_path_factory.mktemp("browse")
    messages = write_store(folder / "store", puts())
    tokens = folder / "tokens.json"
    team = bearer(add_token(tokens, "team", "read", ["orders"]))
    every = bearer(add_token(tokens, "every", "read", None))
    with index_in(folder, offset_space="commitlog") as index:
        index_log(index, folder / "store")
        index.run_lifecycle()
        if request.param != "store":
            assert archive(index, folder / "store") > 1
        if request.param == "store and archive":
            # as a broker deletes after some days
            sorted((folder / "store" / "commitlog").iterdir())[0].unlink()
        store = None if request.param == "archive" else folder / "store"
        with serving(index, tokens=tokens, store=store, audit=folder / "audit") as client:
            client.headers.update(every)
            yield client, [message for message in messages if message.topic == "orders"], team, folder / "audit"


def browse(client, headers=None, **params):
    got = client.get("/v1/browse", params={"topic": "orders", **params}, headers=headers)
    assert got.status_code == 200, got.text
    return got.json()


def places(answer):
    return [(row["queue_id"], row["queue_offset"]) for row in answer["messages"]]


def test_messages_around_a_moment_and_on_from_there_are_those_of_the_log(held):
    client, messages, *_ = held
    log = [(message.queue_id, message.queue_offset) for message in messages]
    at_ms = messages[24].store_ms
    middle = browse(client, at_ms=at_ms, max_count=10)
    assert middle["status"] == "complete" and places(middle) == log[19:29]
    assert [row["message"]["body"] for row in middle["messages"]] == [
        message.body().decode() for message in messages[19:29]
    ]
    shown, before, behind = places(middle), middle, middle
    while before["earlier"]:
        before = browse(client, cursor=before["earlier"], max_count=7)
        shown = places(before) + shown
    while behind["later"]:
        behind = browse(client, cursor=behind["later"], max_count=7)
        shown += places(behind)
    assert shown == log
    counts = [sum(message.queue_id == queue for message in messages) for queue in range(3)]
    assert middle["queues"] == [{"queue_id": n, "begin": 0, "end": count} for n, count in enumerate(counts)]
    # one queue; before the first message, and after the last one
    assert places(browse(client, at_ms=at_ms, queue_id=1, max_count=100)) == [place for place in log if place[0] == 1]
    first, last = browse(client, at_ms=0, max_count=3), browse(client, at_ms="2100-01-01", max_count=4)
    assert (places(first), first["earlier"]) == (log[:3], None)
    assert (places(last), last["later"]) == (log[-2:], None)


def test_a_token_of_some_topics_browses_these_alone(held):
    client, messages, team, audit = held
    every = browse(client, headers=team, at_ms=T, max_count=100)
    assert len(every["messages"]) == len(messages) and "explain" not in every
    assert "secret" not in json.dumps(every) and "payments" not in json.dumps(every)
    params = {"topic": "payments", "at_ms": T}
    cursor = browse(client, topic="payments", at_ms=T, max_count=2)["later"]
    refusals = set()
    for more in ({}, {"queue_id": 0}, {"queue_id": 7}):
        for place in ({"at_ms": T}, {"cursor": cursor}):
            got = client.get("/v1/browse", params={"topic": "payments", **place, **more}, headers=team)
            refusals.add((got.status_code, got.json()["detail"]))
    # a topic that exists, and one that doesn't
    assert refusals == {(403, "the token is not for topic 'payments'")}
    assert client.get("/v1/browse", params=params | {"topic": "none"}, headers=team).status_code == 403
    # another topic's cursor leads only to places of the own topic's queues
    assert {row["message"]["topic"] for row in browse(client, headers=team, cursor=cursor)["messages"]} == {"orders"}
    for topic in ("../payments", "orders/../payments", "orders/0"):
        got = client.get("/v1/browse", params=params | {"topic": topic}, headers=team)
        assert got.status_code in (403, 404), topic
    records = [json.loads(line) for line in audit.read_text().splitlines()]
    audit_record = next(record for record in records if record.get("lookup") == "browse" and record["caller"] == "team")
    assert (audit_record["topic"], audit_record["count"]) == ("orders", len(messages))
    assert any(record["status"] == 403 and "payments" in record["asked"] for record in records)


@pytest.mark.parametrize(
    ("params", "status", "said"),
    [
        ({}, 400, "give at_ms or cursor"),
        ({"at_ms": T, "cursor": "later:0=1"}, 400, "give at_ms or cursor"),
        ({"cursor": "later:9=1"}, 400, "has other queues"),
        ({"cursor": "later:0=1,"}, 400, "does not belong to this request"),
        ({"cursor": "sideways:0=1"}, 400, "does not belong to this request"),
        ({"at_ms": T, "max_count": 101}, 400, "max_count"),
        ({"at_ms": T, "queue_id": 9}, 404, "has no queue 9 here"),
        ({"at_ms": T, "topic": "none"}, 404, "has no queue here"),
        ({"at_ms": T, "explain": "true"}, 400, "is not a parameter"),
    ],
)
def test_a_wrong_request_is_reported(held, params, status, said):
    got = held[0].get("/v1/browse", params={"topic": "orders", **params})
    assert (got.status_code, said in got.json()["detail"]) == (status, True), got.text


def test_a_page_is_bounded_by_its_bytes_and_loses_nothing(tmp_path):
    messages = write_store(tmp_path / "store", ({"body": b"%04d" % n * 100} for n in range(9)))
    with index_in(tmp_path) as index, serving(index, store=tmp_path / "store", caps=Caps(message_bytes=1500)) as client:
        shown, place = [], {"at_ms": 0}
        while place:
            answer = browse(client, **place)
            assert 1 <= len(answer["messages"]) <= 3
            shown += places(answer)
            place = {"cursor": answer["later"]} if answer["later"] else {}
        assert shown == [(message.queue_id, message.queue_offset) for message in messages]


def test_erased_messages_are_never_shown(tmp_path):
    write_store(tmp_path / "store", ({"keys": [f"k-{n // 3}"], "body": b"%d" % n} for n in range(9)))
    storage = (tmp_path / "storage").as_uri()
    with index_in(tmp_path, offset_space="commitlog") as index:
        index_log(index, tmp_path / "store")
        index.seal()
        index.run_lifecycle()
        assert archive(index, tmp_path / "store")
    with IndexReader.open(storage) as reader, serving(reader) as far:
        assert len(browse(far, at_ms=T)["messages"]) == 9
        erase(storage, "orders", keys="k-1", yes=True, now=True, grace_s=0)
        assert [row["message"]["body"] for row in browse(far, at_ms=T)["messages"]] == list("012678")
    with index_in(tmp_path, offset_space="commitlog") as index:
        index.run_lifecycle()
        with serving(index, store=tmp_path / "store") as near:
            answer = browse(near, at_ms=T, max_count=4)
            shown = places(answer)
            while answer["later"]:
                answer = browse(near, cursor=answer["later"], max_count=1)
                shown += places(answer)
            assert [offset for _, offset in shown] == [0, 1, 2, 6, 7, 8]


def test_a_damaged_message_is_named_and_hides_no_other(tmp_path):
    write_store(tmp_path / "store", ({"body": b"%d" % n * 20} for n in range(6)))
    tokens = tmp_path / "tokens.json"
    team = bearer(add_token(tokens, "team", "read", ["orders"]))
    every = bearer(add_token(tokens, "every", "read", None))
    segment = tmp_path / "store" / "commitlog" / f"{0:020d}"
    segment.write_bytes(segment.read_bytes().replace(b"3" * 20, b"3" * 19 + b"X"))
    with index_in(tmp_path) as index, serving(index, store=tmp_path / "store", tokens=tokens) as client:
        for headers, problem in ((every, "CRC"), (team, "this message can't be read")):
            answer = browse(client, headers=headers, cursor="later:0=0")
            # moments near it are found, too
            for n in range(6):
                around = browse(client, headers=headers, at_ms=T + n * 1000, max_count=2)
                assert {offset for _, offset in places(around)} & {n, 3}
            assert [offset for _, offset in places(answer)] == [0, 1, 2, 3, 4, 5]
            damaged = answer["messages"][3]
            assert damaged["message"] is None and problem in damaged["problem"], damaged
            assert answer["status"] == "partial" and str(tmp_path) not in json.dumps(answer)


def test_a_lookup_that_takes_too_long_is_ended(held):
    client, *_ = held
    params = {"topic": "orders", "at_ms": T, "timeout_s": 1e-9}
    got = client.get("/v1/browse", params=params)
    assert (got.status_code, got.json()["error"]) == (422, "BudgetExceeded")


def test_a_topic_of_very_many_queues_wants_one_to_be_chosen(tmp_path):
    write_store(tmp_path / "store", ({"queue_id": n} for n in range(65)))
    with index_in(tmp_path) as index, serving(index, store=tmp_path / "store") as client:
        got = client.get("/v1/browse", params={"topic": "orders", "at_ms": T})
        assert (got.status_code, "choose one by queue_id" in got.text) == (400, True)
        assert places(browse(client, at_ms=T, queue_id=64)) == [(64, 0)]


def test_a_page_has_the_room_of_messages_that_are_gone(tmp_path):
    messages = write_store(tmp_path / "store", ({"body": b"%04d" % n * 100} for n in range(30)))
    left = 3 * messages[-1].size

    def claim(size, is_read_anyway):
        nonlocal left
        left -= size
        return left >= 0

    expired = Expired((Horizon(messages[20].store_ms // 1000 * 1000),))
    page = Browser(StoreQueues(tmp_path / "store", None), expired, claim).page("orders", None, None, "later:0=0", 10)
    assert len(page) == 3 and left < 0


def test_a_topic_of_a_connector_that_is_not_installed_names_the_package(tmp_path):
    document = TopicDocument.of("absent", 1, package="absent-connector")
    entry = {"topic": ["orders"], "queue_id": [0], "key": ["k"], "offset": [0], "size": [1], "timestamp_ms": [T]}
    with index_in(tmp_path) as index, serving(index) as client:
        index.put_source_batch(entry, "absent", 1, document=lambda topic: document)
        got = client.get("/v1/browse", params={"topic": "orders", "at_ms": T})
        assert got.status_code == 404 and "install the package absent-connector" in got.json()["detail"]
        (message,) = client.get("/v1/messages", params={"topic": "orders", "key": "k"}).json()["messages"]
        assert (message["state"], "absent-connector" in message["problem"]) == ("missing", True)
        (topic,) = client.get("/v1/topics").json()["topics"]
        assert (topic["topic"], topic["connector"]) == ("orders", "absent")
