"""Messages in answers over HTTP: excerpts of their bodies, and a filter by a text in them."""

import time

import pytest

from tests.rocketmq.archived_store import index_log
from tests.rocketmq.test_archived_queues import write_store
from tests.server.conftest import index_in, serving
from tests.server.test_guard import bearer
from tests.support.memory import traced_memory
from tiered_index.base.call import deadline_at
from tiered_index.connectors.containing import Containing
from tiered_index.errors import BudgetExceeded
from tiered_index.server.http.served import Caps
from tiered_index.server.http.tokens import add_token
from tiered_index.service.read.answers.messages import Fetched

T = 1_700_000_000_000
BODIES = [b"Paid 17 EUR", b"refused: card", b"\xff\0binary", "Grüße".encode() * 100, b"paid 18 EUR", b"PAID"]


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A service's index of one key's messages, two of them of another topic, and their store."""
    folder = tmp_path_factory.mktemp("contains")
    puts = [{"keys": ["k"], "body": body, "tags": f"T{n}"} for n, body in enumerate(BODIES)]
    puts += [{"topic": "payments", "keys": ["k"], "body": b"paid secretly"}] * 2
    messages = write_store(folder / "store", puts)
    with index_in(folder) as index:
        index_log(index, folder / "store")
        yield index, folder / "store", messages


def bodies(answer):
    return [row["message"] and row["message"]["body"] for row in answer["messages"]]


def ask(client, **more):
    got = client.get("/v1/messages", params={"topic": "orders", "key": "k", "body": "excerpt", **more})
    assert got.status_code == 200, got.text
    return got.json()


def test_only_messages_that_contain_a_text_are_given_page_by_page_with_an_excerpt(held):
    index, store, _ = held
    with serving(index, store=store) as client:
        text = BODIES[3].decode()[:200]
        assert bodies(ask(client)) == ["PAID", "paid 18 EUR", text, BODIES[2].hex(), "refused: card", "Paid 17 EUR"]
        answer = ask(client, contains="PaId")
        assert bodies(answer) == ["PAID", "paid 18 EUR", "Paid 17 EUR"]
        assert (answer["status"], answer["collisions"]) == ("complete", 3)
        first = ask(client, contains="paid", max_count=2)
        assert (bodies(first), first["status"]) == (["PAID", "paid 18 EUR"], "truncated")
        assert bodies(ask(client, contains="paid", cursor=first["cursor"])) == ["Paid 17 EUR"]
        # by tags, beyond the excerpt, by id
        assert bodies(ask(client, contains="t1")) == ["refused: card"]
        assert len(ask(client, contains="ßegrü")["messages"]) == 1
        msg_id = ask(client)["messages"][0]["message"]["msg_id"]
        assert bodies(ask(client, contains=msg_id.lower())) == ["PAID"]
        assert ask(client, contains="nowhere")["messages"] == []
        assert client.get("/v1/messages", params={"topic": "orders", "key": "k", "contains": ""}).status_code == 400


def test_a_page_that_is_full_without_a_match_has_a_cursor(held):
    index, store, messages = held
    with serving(index, store=store, caps=Caps(message_bytes=messages[0].size + 20)) as client:
        shown, cursor, pages = [], None, 0
        while pages == 0 or cursor:
            answer = ask(client, contains="17 eur", **({"cursor": cursor} if cursor else {}))
            shown, cursor, pages = shown + bodies(answer), answer["cursor"], pages + 1
        assert (shown, pages > 2) == (["Paid 17 EUR"], True)


def test_a_message_that_cannot_be_read_is_not_passed_over(held):
    index, _, _ = held
    with serving(index) as client:
        answer = ask(client, contains="paid")
        assert bodies(answer) == [None] * len(BODIES) and answer["collisions"] == 0


def test_a_text_finds_nothing_of_other_topics(held, tmp_path):
    index, store, _ = held
    tokens = tmp_path / "tokens.json"
    team = bearer(add_token(tokens, "team", "read", ["orders"]))
    with serving(index, store=store, tokens=tokens) as client:
        client.headers.update(team)
        answer = ask(client, contains="secretly")
        assert (answer["messages"], answer["collisions"]) == ([], len(BODIES))
        got = client.get("/v1/messages", params={"topic": "payments", "key": "k", "contains": "secretly"})
        assert got.status_code == 403 and "secretly" not in got.text


class Given:
    """A source of given messages."""

    def __init__(self, messages):
        self.messages = messages

    def fetch(self, items, topic, key):
        return [
            Fetched(item=item, state="local", message=message)
            for item, message in zip(items, self.messages, strict=True)
        ]


def test_the_search_of_a_large_body_takes_little_memory_and_misses_nothing(held):
    _, _, (message, *_) = held
    # the text spans two parts, at any step
    for shift in range(3):
        body = b"-" * ((256 << 10) - 4 - shift) + "Grüße".encode() + b"-" * (8 << 20)
        large = message._replace(raw_body=body)
        with traced_memory() as traced:
            (fetched,) = Containing(Given([large]), "GRÜSSE-").fetch([None], "orders", "k")
            assert fetched.carries_key and traced()[1] < 4 << 20
    (fetched,) = Containing(Given([large]), "GRÜSSE-G").fetch([None], "orders", "k")
    assert not fetched.carries_key


def test_a_hot_key_is_searched_in_pieces_that_say_how_many_messages_they_read(held, monkeypatch):
    monkeypatch.setattr("tiered_index.server.lookups._MOST_SEARCHED", 2)
    index, store, _ = held
    with serving(index, store=store) as client:
        pieces, cursor = [], None
        while not pieces or cursor:
            answer = ask(client, contains="17 eur", **({"cursor": cursor} if cursor else {}))
            pieces.append((len(answer["messages"]), answer["collisions"], answer["status"]))
            cursor = answer["cursor"]
        assert pieces == [(0, 2, "truncated"), (0, 2, "truncated"), (1, 1, "complete")]
        # without a text nothing is left out, and the bound does not hold
        assert len(ask(client)["messages"]) == len(BODIES)


def test_messages_that_the_deadline_leaves_unsearched_are_none_without_the_text(held):
    _, _, messages = held
    source = Containing(Given(messages), "nowhere")
    with deadline_at(time.monotonic() - 1):
        fetched_messages = source.fetch([None] * len(messages), "orders", "k")
    assert {(fetched.state, fetched.message, type(fetched.error)) for fetched in fetched_messages} == {
        ("missing", None, BudgetExceeded)
    }
