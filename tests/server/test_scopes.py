"""Attacks on the scope of a token: no request of any operation gets an entry, a name or a size of a hidden topic."""

import itertools
import json

import pytest

from tests.server.conftest import index_in, serving
from tests.server.test_guard import bearer
from tiered_index.server.app import OPERATIONS
from tiered_index.server.http import wire
from tiered_index.server.http.tokens import add_token

T = 1_762_000_000_000
SEEN, HIDDEN, KEY = "orders", "ledger-7", "k"
OFFSET, SIZE = 0x0123_4567_89AB, 0x0BAD_F00D
# the forms in which answers could have an entry: text, and the columns of Arrow
SECRETS = [str(OFFSET).encode(), str(SIZE).encode(), OFFSET.to_bytes(8, "little"), SIZE.to_bytes(4, "little")]
# spellings that could pass a check of prefixes and still name the hidden topic
TOPICS = [
    SEEN,
    HIDDEN,
    f"{SEEN}/../{HIDDEN}",
    f"{SEEN}\0{HIDDEN}",
    f"{SEEN},{HIDDEN}",
    f" {HIDDEN}",
    HIDDEN.upper(),
    "*",
    "0x",
]
TOPICS += [f"0x{HIDDEN.encode().hex()}", f"{SEEN}\n{HIDDEN}", f"{HIDDEN}#{KEY}"]
KEYS = [KEY, f"{HIDDEN}#{KEY}", f"{KEY}#{HIDDEN}"]


@pytest.fixture
def attacked(tmp_path):
    """The clients of an administrator and of a token for one topic, of an index with an entry of both."""
    path = tmp_path / "tokens"
    tokens = [add_token(path, "admin", "admin", None), add_token(path, "team", "admin", [SEEN])]
    with index_in(tmp_path) as index:
        for number in range(3):
            index.put(SEEN, 0, KEY, number, 10, T + 1000 * number)
            index.put(HIDDEN, 0, KEY, OFFSET, SIZE, T + 1000 * number)
            index.put(HIDDEN, 1, KEY, OFFSET + 1 + number, SIZE, T + 1000 * number)
        index.seal()
        index.run_lifecycle()
        with serving(index, tokens=path) as client:
            yield client, *map(bearer, tokens)


def attacks(client, admin):
    """Yield requests: method, path, and further arguments."""
    page = {"topic": HIDDEN, "key": KEY, "max_count": 1}
    cursor = client.get("/v1/query", params=page, headers=admin).json()["cursor"]
    file_id = client.get("/v1/files", headers=admin).json()["files"][0]["file_id"]
    forms = [wire.JSON, wire.NDJSON, wire.ARROW]
    values = {
        "topic": TOPICS,
        "key": KEYS,
        "cursor": [None, cursor],
        "explain": ["true"],
        "allow_partial": ["true"],
        "by": ["topic", "topic,day,state", "state", "day"],
        "at_ms": [T],
        "body": ["text"],
        "source": [None, f"admin:{HIDDEN}", f"kafka:{HIDDEN}"],
        "position": [1],
    }
    paths = [file_id, HIDDEN, f"kafka:{HIDDEN}/0/0", "7F00000100002A9F" + f"{OFFSET:016X}", "..%2F..%2Fv1%2Ffiles"]
    for operation in OPERATIONS:
        method, path = operation.place.split()
        members = operation.query.__struct_fields__ if operation.query is not None else ()
        names = [name for name in members if name in values]
        for chosen in itertools.product(*(values[name] for name in names)):
            params = {name: value for name, value in zip(names, chosen, strict=True) if value is not None}
            for at, form in itertools.product(
                paths if "{id}" in path else [""], forms if operation.forms else forms[:1]
            ):
                more = {"all": "true"} if "all" in members and form != wire.JSON else {}
                yield method, path.replace("{id}", at), {"params": params | more, "headers": {"accept": form}}
    lookups = [
        {"topic": topic, "key": key, "cursor": position}
        for topic in TOPICS
        for key in KEYS
        for position in (None, cursor)
    ]
    for form in forms:
        for mixed in ([lookup] for lookup in lookups):
            body = {"lookups": [{"topic": SEEN, "key": KEY}, *mixed], "allow_spent": True, "explain": True}
            yield "POST", "/v1/query:batch", {"json": body, "headers": {"accept": form}}
    # the same member twice, and a query beside a body
    twice = f'{{"lookups": [{{"topic": "{SEEN}", "topic": "{HIDDEN}", "key": "{KEY}"}}]}}'
    yield "POST", "/v1/query:batch", {"content": twice, "headers": {"content-type": wire.JSON}}
    yield "GET", f"/v1/query?topic={SEEN}&topic={HIDDEN}&key={KEY}", {}
    for topic in TOPICS:
        line = {"topic": topic, "queue_id": 0, "keys": [KEY], "offset": 7, "size": 1, "timestamp_ms": T}
        more = {"content": json.dumps(line), "headers": {"content-type": wire.NDJSON}}
        yield "POST", "/v1/entries", more


def test_no_attack_on_the_scope_of_a_token_gets_through(attacked):
    client, admin, team = attacked
    whole = client.get("/v1/query", params={"topic": HIDDEN, "key": KEY}, headers=admin).content
    assert any(secret in whole for secret in SECRETS)
    made, got_through = 0, []
    for method, path, more in attacks(client, admin):
        headers = more.pop("headers", {}) | team
        got = client.request(method, path, headers=headers, **more)
        made += 1
        # an answer may repeat the names that its request gave
        names_it = HIDDEN in path or HIDDEN.lower() in str(more).lower()
        if any(secret in got.content for secret in SECRETS) or (HIDDEN.encode() in got.content and not names_it):
            got_through.append((method, path, more, got.content[:200]))
        assert got.status_code < 500, (method, path, more, got.text)
    assert not got_through and made > 500
    # nothing was put into the hidden topic
    after = client.get("/v1/query", params={"topic": HIDDEN, "key": KEY}, headers=admin).json()
    assert {item["offset"] for item in after["items"]} == {OFFSET + number for number in range(4)}
