"""Files of tokens and of RocketMQ's keys are read strictly: what opens everything is never a misspelt member."""

import json

import pytest

from tests.server.conftest import index_in, serving
from tests.server.test_guard import bearer
from tests.server.test_writing import LINES, lines, message
from tiered_index.errors import ConfigError
from tiered_index.server.http.tokens import Tokens, access_warning, add_token
from tiered_index.server.remoting import read_keys

ROW = {"name": "team", "sha256": "0" * 64, "role": "read"}
# the wrong members of a grant, and the text of the error about them
WRONG = [
    ('"topic": ["a"]', "the member 'topic' is unknown; did you mean 'topics'?"),
    ('"Topics": ["a"]', "the member 'Topics' is unknown; did you mean 'topics'?"),
    ('"prefixes": ["a"]', "the member 'prefixes' is unknown; the members are "),
    ('"topics": [""]', "the member 'topics' has an empty prefix, which"),
    ('"topics": ["a", ""]', "the member 'topics' has an empty prefix, which"),
    ('"topics": ["a"], "topics": null', "the member 'topics' is given twice"),
    *((f'"topics": {topics}', "is not a file of ") for topics in ("5", "true", '"a"', '{"a": 1}', "[5]")),
]


@pytest.mark.parametrize(("members", "said"), WRONG)
def test_a_misspelt_member_opens_nothing(tmp_path, members, said):
    tokens, keys = tmp_path / "tokens.json", tmp_path / "keys.json"
    tokens.write_text(f"[\n{json.dumps(ROW)[:-1]},\n{members}}}]")
    keys.write_text(f'{{\n"team": {{"secret": "s3cret",\n{members}}}}}')
    for path, read in ((tokens, Tokens), (keys, read_keys)):
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert said in str(caught.value) and "s3cret" not in str(caught.value)


def test_a_file_that_others_can_write_grants_nothing(tmp_path):
    path = tmp_path / "tokens.json"
    add_token(path, "team", "read", None)
    assert access_warning(path) is None
    for mode, text in ((0o644, "every user of this host can read it"), (0o660, "its group can write it")):
        path.chmod(mode)
        assert text in access_warning(path)
        assert Tokens(path).problem() is None
    path.chmod(0o602)
    with pytest.raises(ConfigError, match="every user of this host can write"):
        Tokens(path)
    keys = tmp_path / "keys.json"
    keys.write_text('{"a": {"secret": "x"}}')
    keys.chmod(0o666)
    with pytest.raises(ConfigError, match="every user of this host can write"):
        read_keys(keys)


def test_a_limited_writer_makes_a_bounded_number_of_topics(tmp_path):
    path = tmp_path / "tokens.json"
    tokens = add_token(path, "some", "write", ["orders"], 3), add_token(path, "every", "write", None)
    some, every = map(bearer, tokens)
    with index_in(tmp_path) as index, serving(index, tokens=path) as client:

        def post(headers, *topics):
            body = lines(*(message(n, topic=topic) for n, topic in enumerate(topics)))
            return client.post("/v1/entries", content=body, headers=LINES | headers)

        assert post(some, "orders", "orders-a").status_code == 200
        refused = post(some, "orders-a", "orders-b", "orders-c")
        assert refused.status_code == 403
        assert "may put entries of 3 topics, and has put some of 2" in refused.json()["detail"]
        assert [post(some, topic).status_code for topic in ("orders-b", "orders", "orders-c")] == [200, 200, 403]
        assert post(every, *(f"t-{n}" for n in range(20))).status_code == 200
    assert json.loads(path.read_text())[0]["max_topics"] == 3
    rows = json.loads(path.read_text())
    del rows[0]["max_topics"]
    path.write_text(json.dumps(rows))
    assert [Tokens(path).find(token).max_topics for token in tokens] == [10_000, None]


def test_responses_of_the_api_are_not_stored_or_guessed(tmp_path):
    with index_in(tmp_path) as index, serving(index) as client:
        for path in ("/v1/topics", "/v1/query?topic=t&key=k", "/v1/query", "/nothing", "/livez", "/metrics"):
            headers = client.get(path).headers
            assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store"), path
        page = client.get("/console/").headers
        assert (page["x-content-type-options"], page["cache-control"]) == ("nosniff", "no-cache")


def test_two_tokens_are_a_bad_request(tmp_path):
    path = tmp_path / "tokens.json"
    token = add_token(path, "team", "read", None)
    with index_in(tmp_path) as index, serving(index, tokens=path) as client:
        both = [("authorization", "Bearer ti_wrong"), ("authorization", f"Bearer {token}")]
        for headers in (both, both[::-1]):
            answer = client.get("/v1/topics", headers=headers)
            assert (answer.status_code, answer.json()["detail"]) == (
                400,
                "the header Authorization is given more than once",
            )


def test_a_key_may_have_any_name(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text('{"topic": {"secret": "x", "topics": []}, "": {"secret": "y"}}')
    keys = read_keys(path)
    assert not keys["topic"].sees("") and keys[""].sees("any")
