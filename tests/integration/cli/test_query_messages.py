"""`query --messages`, `message ID` and `verify` on a store that was ingested, archived, and partly deleted by its
broker.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rocketmq import golden_store
from tests.rocketmq.archived_store import delete_segments, scan
from tests.rocketmq.messages import full, joined, log, write_log
from tests.server.conftest import on_a_port
from tests.support.damage import flip
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader
from tiered_index.base.encoding import json_line, show_bytes
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import TRANSACTION_PREPARED, Host, offset_msg_id
from tiered_index.connectors.rocketmq.log.message import Message

T = 1_700_000_000_000
BEGIN_OF_LAST = 81_920
TOPIC, KEY = "TopicOrder", "order-0"


@dataclass(frozen=True)
class Archived:
    """A golden store, its index, and all its messages."""

    folder: Path
    messages: list[Message]

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def uri(self) -> str:
        return f"file://{self.folder}/storage"

    def objects(self) -> list[Path]:
        return sorted(path for path in (self.folder / "storage" / "segments%").rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def archived(run_here, tmp_path_factory):
    folder = tmp_path_factory.mktemp("archived")
    store = golden_store.unpack(folder / "store")
    messages = list(CommitLogReader(store / "commitlog").messages())
    places = ("--root", folder / "root", "--storage", f"file://{folder}/storage")
    options = ("--slots", 97, "--items", 5000, "--archive-segments", "--wait", "--json")
    done = run_here("ingest", store, *places, *options)
    assert done.code == 0, done.err
    assert done.document["archived_segments"] == 5
    delete_segments(store, BEGIN_OF_LAST)
    return Archived(folder, messages)


def test_messages_come_with_everything(run_here, archived):
    options = ("--messages", "--store", archived.store, "--body", "hex", "--json")
    done = run_here("query", TOPIC, KEY, "--storage", archived.uri, *options)
    assert done.code == 0, done.err
    document = done.document
    wanted = scan(archived.messages, TOPIC, KEY)
    assert len(wanted) > 1
    assert (document["status"], document["collisions"], document["failed"]) == ("complete", 0, [])
    assert [m["message"]["msg_id"] for m in document["messages"]] == [m.offset_msg_id for m in wanted]
    assert [m["message"]["body"] for m in document["messages"]] == [m.body().hex() for m in wanted]
    assert [m["message"]["properties"] for m in document["messages"]] == [m.properties for m in wanted]
    assert {m["state"] for m in document["messages"]} <= {"archived", "local"}
    assert document["explain"]["message_requests"] >= 1
    text = run_here("files", "--storage", archived.uri).out
    assert ": 5 segments, 80.0 KiB, offsets 0 to 81,919\n" in text


def test_values_alone_are_those_of_the_messages(run_here, archived):
    """Bytes that are no text are their digits, as a JSON string: such digits may be a number in JSON."""
    arguments = ("query", TOPIC, KEY, "--messages", "--store", archived.store, "--storage", archived.uri, "--rows")
    pages = run_here(*arguments, "--all", "--max", 1)
    wanted = [show_bytes(message.body(), "text") for message in scan(archived.messages, TOPIC, KEY)]
    lines = [json_line(each["body"]) if each["body_format"] == "text" else f'"{each["body"]}"' for each in wanted]
    assert (pages.code, pages.out.splitlines()) == (0, lines) and f"{len(lines)} found" in pages.err
    limited = run_here(*arguments, "--max-requests", 1, "--allow-partial")
    assert limited.code == 6 and "partial" in limited.err and "not read: " in limited.err
    (keys := archived.folder / "keys.csv").write_text(f"topic,key\n{TOPIC},nobody\n{TOPIC},{KEY}\n")
    of_keys = run_here("query", "--keys", keys, *arguments[3:])
    assert (of_keys.code, of_keys.out.splitlines()) == (0, lines), of_keys.err


def test_pages_as_lines_and_for_people(run_here, archived):
    arguments = ("query", TOPIC, KEY, "--storage", archived.uri, "--messages", "--all", "--max", 1, "--body", "none")
    done = run_here(*arguments, "--json")
    assert done.code == 0, done.err
    *lines, last = done.records
    wanted = scan(archived.messages, TOPIC, KEY)
    assert [line["item"]["offset"] for line in lines] == [m.physical_offset for m in wanted]
    assert all("body" not in line["message"] for line in lines if line["message"])
    cold = [message for message in wanted if message.physical_offset < BEGIN_OF_LAST]
    assert (last["status"], last["count"], last["states"]["archived"]) == ("complete", len(wanted), len(cold))
    text = run_here(*arguments, "--explain").out
    assert all(message.offset_msg_id in text for message in cold)
    assert f"{len(wanted):,} found" in text and "requests for messages" in text
    page = run_here("query", TOPIC, KEY, "--storage", archived.uri, "--messages", "--max", 1)
    assert "1 found" in page.out and "more with --cursor" in page.out


def test_limits_are_of_index_and_messages_together(run_here, archived):
    arguments = ("query", TOPIC, KEY, "--storage", archived.uri, "--messages", "--all")
    explain = run_here(*arguments, "--json").records[-1]["explain"]
    total = explain["requests"]
    assert total > explain["message_requests"] > 0
    assert run_here(*arguments, "--max-requests", total, "--max-bytes", explain["bytes"], "--timeout", 1000).code == 0
    for flags in (("--max-requests", total - 1), ("--max-bytes", explain["bytes"] - 1)):
        done = run_here(*arguments, *flags, "--json")
        last = done.records[-1]
        assert (done.code, last["status"], last["error"]) == (6, "partial", done.error), flags
        assert last["failed"] and last["error"]["type"] == "BudgetExceeded"
        partial = run_here(*arguments, *flags, "--json", "--allow-partial")
        assert (partial.code, partial.err, "error" in partial.records[-1]) == (6, "", False)
    # no file is known then, so no partial answer exists
    late = run_here(*arguments, "--timeout", 1e-9, "--json", "--allow-partial")
    assert late.code == 6 and f"while opening {archived.uri}" in late.error["message"]
    text = run_here(*arguments, "--max-requests", total - 1, "--explain")
    assert text.code == 6 and ", partial\n" in text.out and f"in all {total - 1} requests" in text.out
    assert "not read: segments/" in text.err


def test_a_message_by_its_offset_in_a_queue(run_here, archived):
    def ask(queue_id, offset, *more, topic=TOPIC):
        place = ("--topic", topic, "--queue-id", queue_id, "--offset", offset, "--store", archived.store)
        done = run_here("message", *place, "--json", "--body", "hex", *more)
        (row,) = done.document["messages"]
        return done.code, row

    for wanted in (m for m in archived.messages if m.is_visible and m.physical_offset % 5 == 0):
        code, row = ask(wanted.queue_id, wanted.queue_offset, "--storage", archived.uri, topic=wanted.topic)
        is_local = wanted.physical_offset >= BEGIN_OF_LAST
        assert (code, row["state"]) == (0, "local" if is_local else "archived")
        assert row["message"]["msg_id"] == wanted.offset_msg_id
    behind = sum((m.topic, m.queue_id, m.is_visible) == (TOPIC, 0, True) for m in archived.messages)
    for queue_id, offset, problem in (
        (0, behind, f"queue 0 of {TOPIC} ends before offset {behind}"),
        (77, 0, f"{archived.store} has no queue 77 of {TOPIC}"),
    ):
        code, nothing = ask(queue_id, offset)
        assert (code, nothing["state"], nothing["message"], nothing["problem"]) == (1, "missing", None, problem)
    code, expired = ask(0, 0)
    assert (code, expired["state"], expired["message"]) == (1, "expired", None)


def test_topics_tags_and_prepared_messages_are_options_of_ingest(run_here, tmp_path):
    with StoreWriter(tmp_path / "store") as store:
        for n, topic in enumerate(["orders", "order-test", "payments", "TBW102", "rmq_sys_trace"] * 4):
            store.put(topic, 0, keys=f"k{n}", tags="paid" if n % 2 else "new")
        store.put("orders", 0, keys="half", sys_flag=TRANSACTION_PREPARED)
        store.put("RMQ_SYS_TRANS_HALF_TOPIC", 0, keys="half")

    def ingest(name, *options):
        where = ("--root", tmp_path / name, "--storage", f"file://{tmp_path}/{name}-cold")
        done = run_here("ingest", tmp_path / "store", *where, "--slots", 97, "--items", 500, *options)
        assert done.code == 0
        return where, done

    def keys_found(where, topic, key, *options):
        line = ("query", topic, key, *where[:2], "--messages", "--store", tmp_path / "store", "--json", *options)
        return [row["message"]["keys"] for row in run_here(*line).document["messages"]]

    own, done = ingest("own")
    assert not done.err and re.search("left out +9 of other topics, or RocketMQ's own", done.out)
    assert keys_found(own, "payments", "k2") == [["k2"]]
    assert keys_found(own, "TBW102", "k3") == keys_found(own, "orders", "half") == []
    chosen, done = ingest("chosen", "--topics", "order*", "--topics", "TBW102", "--exclude-topics", "order-*", "--json")
    assert (done.document["entries"], done.document["left_out"], done.document["hidden"]) == (8, 13, 1)
    assert (keys_found(chosen, "TBW102", "k3"), keys_found(chosen, "order-test", "k1")) == ([["k3"]], [])
    more, _ = ingest("more", "--index-tags", "--index-prepared", "--wait")
    assert sorted(keys_found(more, "orders", "paid", "--tag")) == [["k15"], ["k5"]]
    assert keys_found(more, "orders", "half") == keys_found(more, "RMQ_SYS_TRANS_HALF_TOPIC", "half") == [["half"]]
    for place in (own[:2], own[2:]):
        refused = run_here("query", "orders", "paid", "--tag", *place)
        assert (refused.code, "no tags: run `ingest --index-tags`" in refused.err) == (2, True)
    for place in (more[:2], more[2:]):
        nothing = run_here("query", "orders", "none", "--tag", *place)
        assert (nothing.code, "0 found, complete" in nothing.out) == (0, True)
    changed = ingest("more", "--topics", "order*")[1].err
    assert "indexes --topics order*; earlier runs indexed --index-tags --index-prepared: --restart reads" in changed
    (tmp_path / "file.ndjson").write_text("")
    for option in (("--topics", "a"), ("--exclude-topics", "a"), ("--index-tags",), ("--index-prepared",)):
        refused = run_here("ingest", tmp_path / "file.ndjson", *own, *option)
        assert (refused.code, option[0] in refused.err) == (2, True)


def test_a_service_may_have_no_tags(run_here, tmp_path):
    """It tells so also before anything is published. Of an unknown topic it can't tell."""
    with StoreWriter(tmp_path / "store") as store:
        store.put("orders", 0, keys="k1", tags="paid")
    places = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/cold")
    for uri, root, more in (
        (None, tmp_path / "root", ()),
        (None, tmp_path / "root", ("--wait",)),
        (f"file://{tmp_path}/cold", None, ()),
    ):
        assert run_here("ingest", tmp_path / "store", *places, "--slots", 97, "--items", 500, *more).code == 0
        with IndexReader.open(uri, root=root, environment=False) as reader, on_a_port(reader) as client:
            done = run_here("query", "orders", "paid", "--tag", "--url", client.base_url)
            assert (done.code, "has no tags: run `ingest --index-tags`" in done.err) == (2, True)
            other = run_here("query", "none", "paid", "--tag", "--url", client.base_url)
            assert (other.code, "an index has tags only with `ingest --index-tags`" in other.err) == (0, True)


def test_people_see_a_page_of_a_large_value(run_here, tmp_path):
    """The rest is counted in bytes. --raw prints it, and --json always has it."""
    bodies = {"long": "é" * 5_000, "lines": "x\n" * 80, "blob": bytes(3_000)}
    with StoreWriter(tmp_path / "store") as store:
        for name, value in bodies.items():
            body = value.encode() if isinstance(value, str) else value
            store.put("orders", 0, body, keys=name, properties={"note": "p" * 4_001})
    where = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/cold")
    assert run_here("ingest", tmp_path / "store", *where, "--slots", 97, "--items", 500).code == 0

    def shown(name, *options):
        place = ("--queue-id", 0, "--offset", list(bodies).index(name))
        return run_here("message", "--topic", "orders", *place, "--store", tmp_path / "store", *options).out

    wanted = {
        "long": "é" * 4_000 + "... and 2,000 more bytes: --raw writes all",
        "lines": "\n".join(["x"] + ["    x"] * 49) + "... and 61 more bytes: --raw writes all",
        "blob": "00" * 2_000 + "... and 1,000 more bytes: --raw writes all",
    }
    for name, page in wanted.items():
        cut = shown(name)
        assert f") {page}\n" in cut and "p" * 4_000 + "... and 1 more byte: --raw writes all" in cut
        whole = shown(name, "--raw")
        text = value.hex() if isinstance(value := bodies[name], bytes) else value.replace("\n", "\n    ")
        assert f") {text}\n" in whole and "--raw" not in whole
        assert json.loads(shown(name, "--json"))["messages"][0]["message"]["body_bytes"] > 0


def test_an_index_of_a_file_has_no_words_of_a_store(run_here, tmp_path):
    """Its entries have places, and no messages: the answer says so, and names no log, segment or broker."""
    source = tmp_path / "orders.ndjson"
    source.write_text(
        '{"topic": "orders", "key": "order-7", "timestamp_ms": 1700000000000, "queue_id": 0, "offset": 40, "size": 9}\n'
    )
    places = ("--root", tmp_path / "root", "--storage", (tmp_path / "objects").as_uri())
    assert run_here("ingest", source, *places).code == 0
    for command in (("query", "orders", "order-7", "--messages"), ("message", "order-7", "--topic", "orders")):
        done = run_here(*command, *places)
        assert "queue 0  offset 40  missing: the index has the place of the message, but no copy of it" in done.out
        assert not re.search("commit log|segment|store|broker", done.out + done.err), done.out
    done = run_here("message", "--topic", "orders", "--queue-id", 0, "--offset", 40, *places)
    assert (done.code, "only topics of RocketMQ have queues" in done.err) == (2, True), done.err


def test_a_message_by_its_id_within_limits(run_here, archived):
    first = archived.messages[0]
    by_place = ("message", first.offset_msg_id, "--storage", archived.uri)
    by_key = ("message", first.uniq_key, "--topic", first.topic, "--storage", archived.uri)
    for line in (by_place, by_key):
        assert run_here(*line, "--max-requests", 20, "--timeout", 1000).code == 0
        for flags in (("--max-requests", 0), ("--max-bytes", 10), ("--timeout", 1e-9)):
            done = run_here(*line, *flags, "--json")
            told = (done.code, done.document["status"], done.document["error"])
            assert told == (6, "partial", done.error) and done.error["type"] == "BudgetExceeded", (line, flags)
            assert all(row["message"] is None for row in done.document["messages"])


@pytest.fixture(scope="module")
def brokers(run_here, tmp_path_factory):
    """The prefix of two brokers' indexes, whose archived logs differ only in the bodies; no store is left."""
    folder, size = tmp_path_factory.mktemp("brokers"), 16_384
    for name in "ab":
        messages = log(60, topic="TopicOrder", body=f"by {name}".encode())
        write_log(folder / name / "commitlog", size, {0: full(messages, size), size: joined(log(1, size, first=900))})
        places = ("--root", folder / f"root-{name}", "--storage", f"file://{folder}/cluster/{name}")
        more = ("--slots", 97, "--items", 5000, "--archive-segments", "--wait", "--json")
        done = run_here("ingest", folder / name, *places, *more)
        assert (done.code, done.document["archived_segments"]) == (0, 1), done
        shutil.rmtree(folder / name)
    return f"file://{folder}/cluster"


def test_messages_of_several_brokers_are_one_answer(run_here, brokers):
    uris = [f"{brokers}/a", f"{brokers}/b"]
    command = ("query", TOPIC, "order-7", "--messages", "--storage", brokers)
    whole = run_here(*command, "--json")
    assert whole.code == 0, whole
    shown = [(row["item"]["source"], row["state"], row["message"]["body"]) for row in whole.document["messages"]]
    assert sorted(shown) == [(uris[0], "archived", "by a"), (uris[1], "archived", "by b")]
    assert (whole.document["status"], whole.document["failed"]) == ("complete", [])
    text = run_here(*command, "--explain").out
    assert re.findall(r"^  source +(\S+)$", text, re.MULTILINE) == [source for source, *_ in shown]
    assert "2 found (2 archived), complete" in text


def test_a_unique_key_that_many_messages_carry_as_a_key_is_found_page_by_page(run_here, tmp_path):
    """ONE is one message's unique key, MANY that of 40 messages. Other messages have both as keys, too."""
    with StoreWriter(tmp_path / "store") as writer:
        writer.put("t", 0, b"the one", uniq_key="ONE", store_ms=T)
        for number in range(70):
            writer.put("t", 0, b"later", keys=["ONE"], uniq_key=f"X{number}", store_ms=T + 1_000 + number)
        for number in range(40):
            writer.put("t", 0, b"again", uniq_key="MANY", store_ms=T + 2_000 + number)
            writer.put("t", 0, b"later", keys=["MANY", "NOBODY"], uniq_key=f"Y{number}", store_ms=T + 2_000 + number)
    places = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/storage")
    assert run_here("ingest", tmp_path / "store", *places, "--slots", 97, "--items", 5000).code == 0

    def ask(key, *more):
        return run_here("message", key, "--topic", "t", *places[:2], "--store", tmp_path / "store", *more)

    done = ask("ONE", "--json")
    assert done.code == 0, done.err
    assert [row["message"]["body"] for row in done.document["messages"]] == ["the one"]
    assert (done.document["status"], done.document["cursor"]) == ("complete", None)
    text = ask("ONE").out
    assert "the one" in text and "cursor" not in text
    hint = "no file that was read has topic 'T'; did you mean 't'?"
    assert ask("ONE", "--topic", "T").out == f"no message of T with the unique key ONE\n{hint}\n"
    # a key that is no unique key is denied after all messages were read
    done = ask("NOBODY", "--json")
    assert (done.code, done.document) == (1, {"messages": [], "status": "complete", "cursor": None})
    assert ask("NOBODY").out == "no message of t with the unique key NOBODY\n"
    # a cut answer says so
    first = ask("MANY", "--json").document
    second = ask("MANY", "--json", "--cursor", first["cursor"]).document
    assert [(len(page["messages"]), page["status"]) for page in (first, second)] == [(32, "truncated"), (8, "complete")]
    shown = [row["message"] for row in (*first["messages"], *second["messages"])]
    assert {message["uniq_key"] for message in shown} == {"MANY"}
    assert len({message["physical_offset"] for message in shown}) == 40
    assert f"32 found, truncated\nmore with --cursor {first['cursor']}\n" in ask("MANY", "--body", "none").out


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
