"""A message belongs to the topic of its entry, or is not shown: two tokens of two prefixes, and each kind of source.

A forged entry has the topic of one token, and the place of a message of the other. No queue of a source takes it from
outside. If it is in the index all the same, no answer has the message, or the name of its file.
"""

import contextlib
import csv
import gzip
import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.cli.command_lines import run_here
from tests.rocketmq.followed import SteppedDispatcher
from tests.server.conftest import serving
from tests.server.test_guard import bearer
from tests.server.test_writing import LINES, lines
from tests.support.archived_records import encode_records
from tests.support.batches import batch, columns_of
from tests.support.store_writer import StoreWriter
from tiered_index import IndexService
from tiered_index.connectors.documents import document_of
from tiered_index.connectors.kafka.columns import SCHEMA, SIZE
from tiered_index.connectors.read_again import MessageSources
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver
from tiered_index.connectors.rocketmq.log.layout import Host
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.connectors.rocketmq.remoting.broker import ReadOnlyBroker
from tiered_index.connectors.rocketmq.remoting.frames import Command, RequestCode
from tiered_index.errors import OwnedBySource
from tiered_index.format.names import TOPICS_QUEUE
from tiered_index.server.http.tokens import add_token
from tiered_index.spark.lookup.keys import LOOKUP
from tiered_index.spark.lookup.messages import message_batches

BEGIN_MS = 1_700_000_000_000
MINE, THEIRS, KEY, SECRET = "a.x", "b.orders", "k", "SECRET"
# only the hidden topic has rows in this file
HIDDEN_FILE = "their-folder"


def row(number, topic):
    """Return a row; one of the hidden topic holds a row of the other one, which begins within it."""
    inner = {"topic": MINE, "id": KEY, "at": BEGIN_MS // 1000 + number, "text": SECRET, "inner": None}
    text, within = (SECRET, inner) if topic == THEIRS else ("mine", None)
    return {"topic": topic, "id": KEY, "at": BEGIN_MS // 1000 + number, "text": f"{text}-{number}", "inner": within}


def csv_of(rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, ["topic", "id", "at", "text"], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet_of(rows):
    written = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), written, row_group_size=3)
    return written.getvalue()


def ndjson_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


FORMS = {"ndjson": ndjson_of, "csv": csv_of, "parquet": parquet_of, "gzip": lambda rows: gzip.compress(ndjson_of(rows))}
FORMS |= {"archived rows": ndjson_of}


def index_files(folder, where, form):
    mixed = [row(number, (MINE, THEIRS)[number % 2]) for number in range(10)]
    for name, rows in (("both", mixed), (HIDDEN_FILE, [row(number, THEIRS) for number in range(10, 20)])):
        (folder / "logs" / name).mkdir(parents=True)
        (folder / "logs" / name / "0.log").write_bytes(FORMS[form](rows))
    fields = ("--topic", "field:topic", "--key", "id", "--time", "at")
    archive = ("--archive",) if form == "archived rows" else ()
    options = ("--root", where["root"], "--storage", where["storage"], "--json")
    done = run_here("ingest", folder / "logs", *fields, *archive, *options)
    assert (done.code, done.document["rows"]) == (0, 20), done.err


def archive_records(index):
    """Archive the records of a partition of each topic. One of the store's files has records of the other topic."""
    document = document_of("kafka", {"cluster": "c", "keys": ["key"]})
    for topic, of_rows, begin, text in (
        (MINE, MINE, 0, "mine"),
        (THEIRS, THEIRS, 0, SECRET),
        (MINE, THEIRS, 10, SECRET),
    ):
        rows = [
            {"key": KEY.encode(), "value": f"{text}-{n}".encode(), "offset": n, "timestamp": BEGIN_MS + n * 1000}
            | {"timestampType": 0, "headers": None, SIZE: len(f"{KEY}{text}-{n}")}
            for n in range(begin, begin + 10)
        ]
        table = pa.Table.from_pylist(rows, SCHEMA.append(pa.field(SIZE, pa.int64())))
        assert index.archive_columns(f"kafka:c/{topic}/0", begin, 10, encode_records((of_rows, 0), table, ("key",)))
        entries = [(topic, 0, KEY, r["offset"], r[SIZE], r["timestamp"]) for r in rows if topic == of_rows]
        index.put_source_batch(columns_of(entries), f"kafka:c/{topic}/0", begin + 10, document=lambda _: document)
    index.flush()


def follow_log(folder, index, *, archived):
    with StoreWriter(folder / "store", segment_bytes=1 << 14) as writer:
        for number in range(40):
            topic, text = ((MINE, "mine"), (THEIRS, SECRET))[number % 2]
            body = f"{text}-{number}".encode() * 50
            writer.put(topic, 0, body, keys=[KEY], store_ms=BEGIN_MS + number * 1000)
        writer.flush()
    SteppedDispatcher(index, StoreDirectory.open(folder / "store"), now_s=lambda: 0.0).run_once()
    if archived:
        index.flush()
        index.run_lifecycle()
        assert SegmentArchiver(index, "s", folder / "store" / "commitlog").run_once()


@contextlib.contextmanager
def opened(folder, source):
    """Yield an index with messages of both topics, a client of its service, and the headers of both tokens."""
    where = {"root": folder / "root", "storage": f"file://{folder}/objects"}
    if source in FORMS:
        index_files(folder, where, source)
    more = {"offset_space": "commitlog"} if "log" in source else {}
    headers = {name: bearer(add_token(folder / "tokens", name, "write", [f"{name}."])) for name in "ab"}
    with IndexService.open(**where, background=False, **more) as index:
        if source == "records":
            archive_records(index)
        if "log" in source:
            follow_log(folder, index, archived="archived" in source)
        store = folder / "store" if source == "local log" else None
        with serving(index, tokens=folder / "tokens", store=store) as client:
            theirs = index.query(THEIRS, KEY, max_count=1000).items
            assert len(theirs) >= 10
            tokens = {"mine": headers["a"], "other": headers["b"]}
            yield SimpleNamespace(index=index, client=client, theirs=theirs, has_store=store is not None, **tokens)


def joined_on_spark(held, folder, items):
    """Return the rows of entries of the first topic with their messages, as a task of a lookup on Spark joins them."""
    rows = pa.Table.from_pylist([item.to_dict() | {LOOKUP: {"topic": MINE, "key": KEY}} for item in items])
    places = {"rocketmq": folder / "store"} if held.has_store else {}
    with contextlib.closing(MessageSources(held.index, held.index.config, places)) as sources:
        of_batches = message_batches(rows.to_batches(), sources.of, allow_partial=False)
        return [row for batch in of_batches for row in batch.to_pylist()]


def test_a_forged_entry_shows_no_message_by_the_protocol_of_rocketmq_or_to_spark(tmp_path):
    with opened(tmp_path, "local log") as held:
        (item, *_) = held.theirs
        at = {"begin_ms": item.timestamp_ms, "end_ms": item.timestamp_ms}
        entry = (MINE, item.queue_id, KEY, item.offset, item.size, item.timestamp_ms)
        held.index.put_batch(columns_of([entry]))
        (forged,) = held.index.query(MINE, KEY, **at).items
        broker, here = ReadOnlyBroker(held.index, store=tmp_path / "store"), Host("127.0.0.1", 9876)
        fields = {"topic": MINE, "key": KEY, "maxNum": "99", "endTimestamp": str(item.timestamp_ms)}
        fields["beginTimestamp"] = fields["endTimestamp"]
        for sees in (None, lambda topic: topic.startswith("a.")):
            answer = broker.look_up(Command(code=RequestCode.QUERY_MESSAGE, fields=fields), here, sees)
            assert (answer.code, answer.body) == (22, b"")
        (read_row,) = joined_on_spark(held, tmp_path, [forged])
        assert (read_row["message_state"], read_row["message_body"]) == ("other_key", None)


OWNED = [*FORMS, "records"]
SOURCES = [*OWNED, "local log", "archived log"]


def messages(held, **params):
    """Return the answer with messages of the first topic, for its token."""
    got = held.client.get("/v1/messages", params={"topic": MINE, "key": KEY} | params, headers=held.mine)
    assert got.status_code == 200, got.text
    assert SECRET not in got.text and HIDDEN_FILE not in got.text and THEIRS not in got.text, got.text
    return got.json()


@pytest.mark.parametrize("source", SOURCES)
def test_a_forged_entry_shows_no_message_of_another_topic(tmp_path, source):
    with opened(tmp_path, source) as held:
        shown = [message["message"] for message in messages(held, max_count=1000)["messages"]]
        own = [message["body"] for message in shown if message is not None]
        assert len(own) >= 5 and all("mine" in body for body in own)
        whole = held.client.get("/v1/messages", params={"topic": THEIRS, "key": KEY}, headers=held.other)
        assert SECRET in whole.text
        # of the same prefix, so that no scope of a token hides it
        forged = [replace(item, topic=MINE, topic_id=0, timestamp_ms=item.timestamp_ms) for item in held.theirs]
        rows = [(MINE, item.queue_id, KEY, item.offset, item.size, item.timestamp_ms) for item in forged]
        if source == "records":
            rows += [(MINE, 0, KEY, n, len(f"{KEY}{SECRET}-{n}"), BEGIN_MS + n * 1000) for n in range(10, 20)]
        if source in FORMS:
            # parts of a row, several rows, a whole file, and more than there is
            item = forged[-1]
            rows += [
                (MINE, item.queue_id, KEY, item.offset + at, size, item.timestamp_ms)
                for at in range(0, 200, 7)
                for size in (0, 1, 90, 100, 110, 120, 400, 2**20, 2**31 - 1)
            ]
        if source in ("ndjson", "gzip"):
            # the row within a row, whole
            for item in forged:
                whole = row((item.timestamp_ms - BEGIN_MS) // 1000, THEIRS)
                inner = json.dumps(whole["inner"])
                at = item.offset + json.dumps(whole).index(inner)
                rows.append((MINE, item.queue_id, KEY, at, len(inner), item.timestamp_ms))
        held.index.put_source_batch(columns_of(rows))
        for more in ({}, {"body": "json"}, {"contains": "e"}, {"contains": SECRET}, {"explain": True}):
            answer = messages(held, max_count=1000, **more)
            shown = [message["message"] for message in answer["messages"] if message["message"] is not None]
            assert all("mine" in str(message["body"]) and message["topic"] == MINE for message in shown)
            assert {message["state"] for message in answer["messages"]} <= {"local", "archived", "missing"}
        for path in (f"/v1/messages/{KEY}", *(f"/v1/messages/kafka:{MINE}/0/{n}" for n in range(10, 13))):
            got = held.client.get(path, params={"topic": MINE} if "kafka" not in path else {}, headers=held.mine)
            assert got.status_code in (200, 404) and SECRET not in got.text and HIDDEN_FILE not in got.text


@pytest.mark.parametrize("source", SOURCES)
def test_spark_joins_the_messages_of_each_source_and_none_of_another_topic(tmp_path, source):
    with opened(tmp_path, source) as held:
        shown = joined_on_spark(held, tmp_path, held.index.query(MINE, KEY, max_count=1000).items)
        bodies = [row["message_body"] for row in shown if row["message_state"] in ("local", "archived")]
        assert len(bodies) >= 5 and all(b"mine" in body for body in bodies)
        forged = joined_on_spark(held, tmp_path, [replace(item, topic=MINE, topic_id=0) for item in held.theirs])
        assert len(forged) == len(held.theirs)
        for row in forged:
            # a record of Kafka at the same offset of the same partition is of the first topic
            assert SECRET.encode() not in (row["message_body"] or b""), row
            assert row["message_state"] in ("missing", "other_key") or source == "records"


@pytest.mark.parametrize("source", SOURCES)
def test_an_entry_from_outside_uses_no_queue_of_a_source(tmp_path, source):
    """A service refuses it for each token, and the index for each program, also before the first entry is durable."""
    with opened(tmp_path, source) as held:
        item = held.theirs[0]
        place = {"queue_id": item.queue_id, "offset": item.offset, "size": item.size, "timestamp_ms": BEGIN_MS}
        got = held.client.post(
            "/v1/entries", content=lines({"topic": MINE, "keys": [KEY], **place}), headers=LINES | held.mine
        )
        entry = {name: [value] for name, value in {"topic": MINE, "key": KEY, **place}.items()}
        if source not in OWNED:
            # the message itself says its topic
            assert got.status_code == 200
            messages(held, max_count=1000)
            return
        problem = got.json()
        assert (got.status_code, problem["error"]) == (403, "OwnedBySource"), got.text
        assert "choose another" in problem["detail"] and THEIRS not in got.text and "/" not in problem["detail"]
        calls = (
            lambda: held.index.put(MINE, keys=KEY, **place),
            lambda: held.index.put(MINE, keys=[KEY, "other"], **place),
            lambda: held.index.put_batch(entry),
            lambda: held.index.put_batch(batch(9) | {name: [*values] * 9 for name, values in entry.items()}),
        )
        for call in calls:
            with pytest.raises(OwnedBySource, match="queue_id"):
                call()
        # a further topic and queue is open, also of one that `put` knows
        assert held.index.put("own", 0, KEY, 1, 1, BEGIN_MS) == held.index.put(MINE, 5, KEY, 1, 1, BEGIN_MS) == 1
        with pytest.raises(OwnedBySource):
            held.index.put("own", TOPICS_QUEUE, KEY, 1, 1, BEGIN_MS)
        assert len(held.index.query("own", KEY)) == 1


def test_no_name_of_a_position_of_a_source_is_taken_from_outside(tmp_path):
    names = ("files:-/2147483647", "kafka:c/t/0", "kafka-key:key", "rocketmq:s", "rows:-/0", "points:-/0")
    with opened(tmp_path, "ndjson") as held:
        known = held.index.durable_positions()
        for name in (*names, "read-before:kafka:c/t"):
            for put in (
                lambda name=name: held.index.put("own", 0, KEY, 1, 1, BEGIN_MS, source=name, source_position=2**40),
                lambda name=name: held.index.put_batch(batch(1), name, 2**40),
            ):
                with pytest.raises(OwnedBySource, match="choose another name"):
                    put()
        held.index.flush()
        assert held.index.durable_positions() == known
        held.index.put_batch(batch(1), "read-before:mine/t", 7)


def test_a_topic_that_is_followed_from_now_on_is_closed_to_plain_puts(tmp_path):
    """The compiled core takes plain puts of known topics without a further check."""
    with IndexService.open(root=tmp_path, storage="memory://followed", background=False) as index:
        assert index.put("t", 0, KEY, 1, 1, BEGIN_MS) == index.put("t", 0, KEY, 2, 1, BEGIN_MS) == 1
        index.put_source_batch(batch(1), "kafka:c/t/0", 1)
        with pytest.raises(OwnedBySource, match="records of Kafka"):
            index.put("t", 0, KEY, 3, 1, BEGIN_MS)
        assert index.put("t", 1, KEY, 3, 1, BEGIN_MS) == 1
        assert index.put_source_batch(batch(1, offset=[1])) == 1


NUMBERS = st.one_of(st.integers(0, 3000), st.sampled_from([2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1]))
PLACES = st.tuples(
    st.sampled_from([0, TOPICS_QUEUE]), NUMBERS, st.one_of(st.integers(0, 700), st.sampled_from([2**20, 2**31 - 1]))
)


@pytest.mark.parametrize("source", SOURCES)
def test_no_place_shows_another_topics_bytes_or_ends_in_an_error_of_the_service(tmp_path, source):
    """Entries of any place and size: those that are refused are put as a source would put them."""
    with opened(tmp_path, source) as held:
        wanted = {item.offset: item for item in held.theirs}
        examples = iter(range(10**6))

        @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
        @given(st.lists(PLACES, min_size=1, max_size=30), st.sets(st.sampled_from(sorted(wanted)), max_size=3))
        def check(places, exact):
            # each example has seconds of its own, which tell its entries apart
            at_ms = BEGIN_MS + next(examples) % 20 * 1000
            rows = [(MINE, queue_id, KEY, offset, size, at_ms) for queue_id, offset, size in places]
            rows += [(MINE, wanted[at].queue_id, KEY, at, wanted[at].size, wanted[at].timestamp_ms) for at in exact]
            body = lines(
                *(
                    {"topic": MINE, "queue_id": queue_id, "keys": [KEY], "offset": offset, "size": size - 3}
                    | {"timestamp_ms": at_ms}
                    for queue_id, offset, size in places[:3]
                )
            )
            got = held.client.post("/v1/entries", content=body, headers=LINES | held.mine)
            assert got.status_code in (200, 400, 403), got.text
            held.index.put_source_batch(columns_of([each for each in rows if each[3] < 2**63]))
            for begin in {row[5] for row in rows}:
                messages(held, max_count=1000, begin_ms=begin, end_ms=begin)

        check()
