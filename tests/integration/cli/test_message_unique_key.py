"""`message ID --topic T` for an id that many messages carry: it shows every message that has it as its unique key, and
reports a cut answer. A message that the broker cut off is missing if the follower's root is given.
"""

import pytest

from tests.integration.cli.command_lines import Outcome
from tests.support.damage import flip
from tests.support.store_writer import StoreWriter
from tiered_index.rocketmq.log.layout import Host, offset_msg_id

T = 1_700_000_000_000


@pytest.fixture
def message_of(run_here, tmp_path):
    """Return a function that shows a message by its unique key.

    ONE is one message's unique key, MANY that of 40 messages. Other messages have both as keys, too.
    """
    with StoreWriter(tmp_path / "store") as writer:
        writer.put("t", 0, b"the one", uniq_key="ONE", store_ms=T)
        for number in range(70):
            writer.put("t", 0, b"later", keys=["ONE"], uniq_key=f"X{number}", store_ms=T + 1_000 + number)
        for number in range(40):
            writer.put("t", 0, b"again", uniq_key="MANY", store_ms=T + 2_000 + number)
            writer.put("t", 0, b"later", keys=["MANY", "NOBODY"], uniq_key=f"Y{number}", store_ms=T + 2_000 + number)
    index = ("--root", tmp_path / "root")
    fixed = ("--storage", f"file://{tmp_path}/storage", "--slots", 97, "--items", 5000)
    assert run_here("ingest", tmp_path / "store", *index, *fixed).code == 0

    def ask(key: str, *more: object) -> Outcome:
        return run_here("message", key, "--topic", "t", *index, "--store", tmp_path / "store", *more)

    return ask


def test_a_message_behind_many_that_carry_its_id_as_a_key_is_found(message_of):
    done = message_of("ONE", "--json")
    assert done.code == 0, done.err
    assert [row["message"]["body"] for row in done.document["messages"]] == ["the one"]
    assert (done.document["status"], done.document["cursor"]) == ("complete", None)
    text = message_of("ONE")
    assert "the one" in text.out and "cursor" not in text.out
    hint = "no file that was read has topic 'T'; did you mean 't'?"
    assert message_of("ONE", "--topic", "T").out == f"no message of T with the unique key ONE\n{hint}\n"
    # a key that is no unique key is denied after all messages were read
    done = message_of("NOBODY", "--json")
    assert (done.code, done.document) == (1, {"messages": [], "status": "complete", "cursor": None})
    assert message_of("NOBODY").out == "no message of t with the unique key NOBODY\n"


def test_an_answer_that_is_cut_says_so_and_continues_by_its_cursor(message_of):
    first = message_of("MANY", "--json").document
    assert (len(first["messages"]), first["status"]) == (32, "truncated")
    second = message_of("MANY", "--json", "--cursor", first["cursor"]).document
    assert (len(second["messages"]), second["status"], second["cursor"]) == (8, "complete", None)
    shown = [row["message"] for row in (*first["messages"], *second["messages"])]
    assert {message["uniq_key"] for message in shown} == {"MANY"}
    assert len({message["physical_offset"] for message in shown}) == 40
    text = message_of("MANY", "--body", "none").out
    assert f"32 found, truncated\nmore with --cursor {first['cursor']}\n" in text


def test_messages_that_were_cut_off_are_missing_if_the_root_is_given(run_here, tmp_path):
    store, uri = tmp_path / "store", f"file://{tmp_path}/storage"

    places = ("--root", tmp_path / "root", "--storage", uri)
    ingest = ("ingest", store, *places, *["--slots", "97", "--items", "5000", "--skip-missing", "--wait"])
    writer = StoreWriter(store, segment_bytes=1 << 16)
    put = [writer.put("t", 0, b"x" * 50, uniq_key=f"U{number}", store_ms=T + number * 1000) for number in range(30)]
    writer.flush()
    assert run_here(*ingest).code == 0
    writer = StoreWriter(store, segment_bytes=1 << 16, cut=put[10].offset)
    for number in range(3):
        writer.put("t", 0, b"again" * 20, uniq_key=f"new{number}", store_ms=T + 90_000)
    writer.flush()
    assert run_here(*ingest).code == 0
    for number, state in ((9, "local"), (25, "missing")):
        msg_id = offset_msg_id(Host("127.0.0.1", 10911), put[number].offset)
        for line in (
            ("query", "t", f"U{number}", "--messages"),
            ("message", f"U{number}", "--topic", "t"),
            ("message", msg_id),
        ):
            shown = run_here(*line, "--root", tmp_path / "root", "--store", store).out
            assert (f"  {state}\n" in shown) is (state == "local"), line
            assert ("after the end of the log (cut off)" in shown) is (state == "missing"), line
    # the storage alone doesn't show it
    assert "  local\n" in run_here("query", "t", "U25", "--messages", "--storage", uri, "--store", store).out


def test_a_place_has_the_same_state_with_a_topic_as_without(run_here, tmp_path):
    store = tmp_path / "store"
    with StoreWriter(store, segment_bytes=4_096) as writer:
        put = [writer.put("t", 0, b"b" * 500, uniq_key=f"{number:032X}", store_ms=T) for number in range(20)]
    places = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/storage")
    assert run_here("ingest", store, *places, "--slots", 97, "--items", 5000).code == 0
    first, *_, last = sorted((store / "commitlog").iterdir())
    first.unlink()
    flip(last, put[-2].offset - int(last.name) + put[-2].size // 2)

    def ask(number, *topic):
        msg_id = offset_msg_id(Host("127.0.0.1", 10911), put[number].offset)
        done = run_here("message", msg_id, *topic, "--store", store, "--root", tmp_path / "root", "--json")
        return done.code, [row["state"] for row in done.document["messages"]]

    # deleted, damaged, whole
    for number, state, code in ((0, "expired", 1), (-2, "missing", 1), (-1, "local", 0)):
        assert ask(number) == ask(number, "--topic", "t") == (code, [state])
    # a message of another topic is not a match, and a unique key names no place
    assert ask(-1, "--topic", "u") == (1, [])
    unknown = "0A010203000118B4AAC2" + "00" * 6
    assert run_here("message", unknown, "--topic", "t", "--store", store, *places[:2]).code == 1
    assert run_here("message", unknown, "--store", store).code == 2
