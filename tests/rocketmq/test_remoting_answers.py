"""Responses to RocketMQ's tools from index, store and archived segments, to requests that its own code wrote.

Real brokers prove the plain answers (tests/brokers). Here are faults, damage, bounds, access keys and odd requests.
"""

import asyncio
import json
import logging
import random
import re
import socket
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.rocketmq.archived_store import BEGIN_OF_LAST, delete_segments, index_log, lookups, put, scan, settled
from tests.rocketmq.remoting_client import (
    BEGIN,
    END,
    FOREVER,
    HERE,
    PULL,
    STATS,
    Client,
    ask,
    by_key,
    by_unique_key,
    ends,
    pull,
    records,
    run,
)
from tests.rocketmq.test_remoting_frames import KEYS, SECRET, frames, requests
from tests.support.damage import flip_object, flipped
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader
from tiered_index.base.call import Cancellation, active_context
from tiered_index.base.clock import ManualClock
from tiered_index.connectors.documents import document_of
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import TAG_NAME, Host, tag_key
from tiered_index.connectors.rocketmq.log.message import Message
from tiered_index.connectors.rocketmq.remoting import server as remoting_server
from tiered_index.connectors.rocketmq.remoting.broker import ReadOnlyBroker
from tiered_index.connectors.rocketmq.remoting.frames import (
    BINARY,
    JSON,
    AccessKey,
    Command,
    RequestCode,
    decode_frame,
    encode_frame,
    signature,
)
from tiered_index.connectors.rocketmq.remoting.pulling import Ends, StoreQueues
from tiered_index.connectors.rocketmq.remoting.server import RemotingServer
from tiered_index.errors import InvalidArgument

QUERY, VIEW = RequestCode.QUERY_MESSAGE, RequestCode.VIEW_MESSAGE_BY_ID
GOLDEN = {"cluster": "ArchiveA", "name": "broker-a", "advertised": "127.0.0.1:10911"}
BUSY = (2, "[REJECTREQUEST]system busy, start flow control for a while", b"")
NO_INDEX = (1, "the index could not be read; its server's log says why", b"")
BEGIN_MS = 1_700_000_000_000


@asynccontextmanager
async def client_of(index, *, keys=None, **settings):
    bound = socket.create_server(("127.0.0.1", 0))
    async with RemotingServer(ReadOnlyBroker(index, **settings), bound, keys=keys) as server:
        async with Client.open(server) as client:
            yield client


async def signed(client, code, **fields):
    """Send a request with the access key that is limited to some topics."""
    command = Command(code=code, fields={"AccessKey": "pay", **fields})
    return await client.ask(code, {**command.fields, "Signature": signature(command, SECRET)})


def response_to(broker, code, **fields):
    """Return the response to a request without a connection."""
    request = Command(code=code, fields=fields)
    return broker.answer_at_once(request, HERE) or broker.look_up(request, HERE)


def summary(answer):
    return answer.code, answer.remark, answer.body


@pytest.fixture
def messages(index, store) -> list[Message]:
    """The messages of the golden store, indexed and, except for the last segment, archived."""
    return settled(index, store)


def most_found(messages):
    """Return the lookup with the most messages, and these."""
    answers_by_lookup = {lookup: scan(messages, *lookup) for lookup in lookups(messages)}
    return max(answers_by_lookup.items(), key=lambda pair: len(pair[1]))


# The recording server's response, and the golden response that one read-only broker gives to the same request.
EXACT = {name: name for name in ("ok", "route_none", "consumer_offline", "system_topics", "view_none")}
EXACT |= {name: name for name in ("view_0", "view_788", "view_4372", "groups_empty")} | {"groups_one": "groups_empty"}
EXACT |= dict.fromkeys(("route_one", "route_std", "route_plain"), "route_one")
SAME_RECORDS = {"query_order0", "query_dup", "query_empty_body", "query_unicode", "query_topicv2", "query_same"}


def _recorded(name: str, request: Command) -> Command:
    """Return a golden response in the request's serialisation, about the request's topic."""
    kind = "json" if request.serialisation == JSON else "rmq"
    response = decode_frame(frames()[f"resp.{name}.{kind}.bin"]["frame"][4:])
    if name == "route_none":
        response = replace(response, remark=response.remark.replace("NoSuchTopic", request.fields["topic"]))
    if name == "route_one" and request.fields["topic"] not in ("TopicOrder", "TopicPay", "TopicTx"):
        # the recording server claimed four queues for each topic, and the store has one of this topic
        response = replace(response, body=response.body.replace(b'QueueNums":4', b'QueueNums":1'))
    return response


def _wanted(messages: list[Message], fields: dict[str, str]) -> list[Message]:
    """Return the messages that a scan of the log finds for a query."""
    topic, key, most = fields["topic"], fields["key"], int(fields["maxNum"])
    if fields["_UNIQUE_KEY_QUERY"] == "true":
        own = [m for m in scan(messages, topic, key) if m.uniq_key == key]
        return own[:32][::-1] or [m for m in messages if m.offset_msg_id == key and m.topic == topic]
    begin_s, end_s = int(fields["beginTimestamp"]) // 1000, int(fields["endTimestamp"]) // 1000
    return [m for m in scan(messages, topic, key) if begin_s <= m.store_ms // 1000 <= end_s][:most]


@run
async def test_recorded_requests_get_the_recorded_responses(index, store, messages):
    """One connection sends each golden request in its own serialisation. The responses have the golden `opaque`."""
    exact, same, others = set(), set(), set()
    async with client_of(index, store=store, **GOLDEN) as client:
        for name in requests():
            golden = frames()[name]
            request = replace(decode_frame(golden["frame"][4:]), opaque=4660)
            await client.send(request)
            frame = await client.receive_frame()
            response = decode_frame(frame[4:])
            answer = golden["answeredWith"].split(".")[1]
            if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC and "Group" in request.fields["topic"]:
                answer = "route_none"  # no group has its own topic here
            if answer in EXACT:
                assert frame == encode_frame(_recorded(EXACT[answer], request)), name
                exact.add(answer)
            elif request.code == QUERY:
                wanted = _wanted(messages, request.fields)
                recorded = _recorded("query_order0" if wanted else "query_none", request)
                assert (response.code, response.remark) == (recorded.code, recorded.remark), name
                assert response.fields.keys() == recorded.fields.keys()
                assert response.body == b"".join(m.encode() for m in wanted), name
                if answer in SAME_RECORDS:
                    assert set(records(_recorded(answer, request).body)) <= set(wanted), name
                    same.add(answer)
            else:
                others.add((answer, response.code))
                if request.code == PULL:
                    queue = _of_queue(messages, "TopicOrder", 0)
                    assert summary(response) == (0, "FOUND", queue[0].encode())
                    zeros = dict.fromkeys(("suggestWhichBrokerId", "topicSysFlag", "groupSysFlag", "minOffset"), "0")
                    assert response.fields == {**zeros, "nextBeginOffset": "1", "maxOffset": str(len(queue))}
    assert exact == EXACT.keys()
    assert same == SAME_RECORDS
    # records that are not in the store, lists of other topics and brokers, and a pull
    assert others == {
        *((f"view_{kind}", 1) for kind in ("lz4", "zstd", "zlib", "v6")),
        *(("cluster", 0), ("topics", 0), ("runtime", 0), ("unsupported", 0)),
    }


# keys, times and bounds


def test_times_and_counts_are_as_tools_give_them(index, store, messages):
    (topic, key), matches = most_found(messages)
    greatest, second = str(2**63 - 1), matches[0].store_ms // 1000 * 1000
    inner = [m for m in matches if m.store_ms >= second]
    broker = ReadOnlyBroker(index, store=store)
    for begin, end, wanted in (
        (str(-(2**63)), greatest, matches),
        (str(second), str(second + 999), inner),
        (greatest, greatest, []),
        ("0", "-1", []),
    ):
        answer = response_to(broker, QUERY, **by_key(topic, key, 1000, beginTimestamp=begin, endTimestamp=end))
        assert (answer.code, records(answer.body)) == (0 if wanted else 22, wanted), (begin, end)
        assert answer.remark == (None if wanted else "can not find message, maybe time range not correct")
    for most, number in (("-1", 0), ("1", 1), ("9999999", len(matches))):
        assert records(response_to(broker, QUERY, **by_key(topic, key) | {"maxNum": most}).body) == matches[:number]
    assert len(matches) > 3


def test_unique_keys_offset_ids_and_kinds_of_keys(index, store, messages):
    """`viewMessage` asks for the last three days, since a broker has no older messages; tools ask for an offset id as
    for a unique key if the host in it is gone. Newer clients say what kind of key it is.
    """
    wanted = next(m for m in messages if m.is_visible and m.uniq_key and m.tags and m.index_keys[1:])
    late = {"beginTimestamp": str(wanted.store_ms + 86_400_000), "endTimestamp": FOREVER["endTimestamp"]}
    broker, topic, key = ReadOnlyBroker(index, store=store), wanted.topic, wanted.index_keys[1]
    assert records(response_to(broker, QUERY, **by_unique_key(topic, wanted.uniq_key, **late)).body) == [wanted]
    # one key of several is not unique, and its begin counts
    assert response_to(broker, QUERY, **by_unique_key(topic, key)).code == 22
    assert [response_to(broker, QUERY, **by_key(topic, key, **more)).code for more in (late, {})] == [22, 0]
    put(index, wanted, [tag_key(wanted.tags)])
    for kind, wanted_key in (("K", key), ("U", wanted.uniq_key), ("T", wanted.tags)):
        assert wanted in records(response_to(broker, QUERY, **by_key(topic, wanted_key, indexType=kind)).body)
        other = {"K": "U", "U": "T", "T": "K"}[kind]
        # it is not known yet whether there are tags
        assert response_to(broker, QUERY, **by_key(topic, wanted_key, indexType=other)).code == (
            1 if kind == "U" else 22
        )
    index.describe_topics([topic], document_of("rocketmq", {"key_names": [TAG_NAME]}))
    assert response_to(broker, QUERY, **by_key(topic, "none", indexType="T")).code == 22
    # clients keep the offset id if the message has no unique key
    wanted = next(m for m in messages if m.is_visible and not m.uniq_key and m.topic != "TopicPay")
    elsewhere = wanted.offset_msg_id.replace("7F000001", "7F000002")
    assert records(response_to(broker, QUERY, **by_unique_key(wanted.topic, wanted.offset_msg_id)).body) == [wanted]
    for topic, message_id in (("TopicPay", wanted.offset_msg_id), (wanted.topic, elsewhere), (wanted.topic, "FF" * 16)):
        assert response_to(broker, QUERY, **by_unique_key(topic, message_id)).code == 22


def test_one_offset_in_the_logs_of_several_brokers(tmp_path, index):
    """The broker at the request's address answers, else the one that has the topic. The server never guesses."""
    hosts = [Host("127.0.0.1", 1), Host("10.0.0.2", 10911), Host("10.0.0.3", 10911)]
    made = []
    for n, (host, topic) in enumerate(zip(hosts, ("orders", "orders", "pay"), strict=True)):
        with StoreWriter(tmp_path / f"{n}", segment_bytes=4096) as writer:
            for _ in range(60):
                writer.put(topic, 0, b"paid", keys=["k"], store_ms=BEGIN_MS, store_host=host)
        made.append(index_log(index, tmp_path / f"{n}")[0])
        assert SegmentArchiver(index, f"broker-{n}", tmp_path / f"{n}" / "commitlog").run_once() >= 1
    broker = ReadOnlyBroker(index)

    def view(local, **fields):
        return broker.look_up(Command(code=VIEW, fields={"offset": "0", **fields}), local)

    for host, m in zip(hosts, made, strict=True):
        assert view(host).body == m.encode()
    other = Host("10.0.0.9", 9876)
    assert view(other, topic="pay").body == made[2].encode()
    for number, answer in ((2, view(other, topic="orders")), (3, view(other)), (3, view(other, topic="none"))):
        assert summary(answer) == (1, f"can not find message by the offset, 0: {number} brokers stored one there", b"")


def test_a_response_fits_into_a_frame(index, tmp_path):
    """All older messages are left out, small ones, too; a message that is too large for any frame alone. The entries
    of one key do not have the sizes.
    """
    with StoreWriter(tmp_path / "s", segment_bytes=64 << 20) as writer:
        for n in range(40):
            body = bytes(17 << 20 if n == 30 else 900_000 if n > 5 else 10)
            writer.put("orders", 0, body, keys=["k", "unsized", f"k-{n}"], store_ms=BEGIN_MS + n * 1000)
    messages = list(CommitLogReader(tmp_path / "s" / "commitlog").messages())[::-1]
    for m in messages:
        put(index, m, ["k", m.index_keys[2]])
        index.put("orders", 0, "unsized", m.physical_offset, 0, m.store_ms)
    broker = ReadOnlyBroker(index, store=tmp_path / "s")
    answer = response_to(broker, QUERY, **by_key("orders", "k"))
    page = records(answer.body)
    assert page == [m for m in messages if m.size < 1 << 20][: len(page)] and 15 < len(page) < 20
    lacking = f"{40 - len(page)} of 40 messages, the older ones, do not fit into a frame of 16 MiB"
    assert (answer.code, answer.remark) == (0, lacking)
    assert response_to(broker, QUERY, **by_key("orders", "k-30")).body == b""
    answer = response_to(broker, QUERY, **by_key("orders", "unsized"))
    assert records(answer.body) and len(answer.body) < 16 << 20


@pytest.mark.parametrize("most", [1, 3])
def test_pages_continue_after_the_last_key(index, store, messages, most):
    """RocketMQ 5.5 asks for pages by the key of the last message in its index, hour by hour."""
    broker = ReadOnlyBroker(index, store=store)
    (topic, key), expected = most_found(messages)
    paged = []
    fields = by_key(topic, key, maxNum=str(most), indexType="K")
    while (answer := response_to(broker, QUERY, **fields)).code == 0:
        paged += records(answer.body)
        last = paged[-1]
        hour = last.store_ms // 3_600_000 * 3_600_000
        place = (str(hour), topic, "K", key, last.uniq_key or "", str(last.physical_offset))
        fields = {**fields, "lastKey": "@".join(place)}
        assert len(paged) <= len(expected)
    assert (answer.code, paged) == (22, expected)
    for wrong in ("x", f"{hour}@{topic}@K@{key}@u@{10**12}", f"{hour}@x", "@@@@@"):
        answer = response_to(broker, QUERY, **{**fields, "lastKey": wrong})
        assert (answer.code, answer.body) == (1, b"")
        assert "<lastKey>" in answer.remark


# requests that are no lookups, bad ones, and topics


def test_requests_of_tools_besides_messages(index, messages):
    broker = ReadOnlyBroker(index, **GOLDEN)
    topics = sorted({m.topic for m in messages if m.index_keys})
    version = {"counter": 0, "stateVersion": 0, "timestamp": 0}
    named = {"brokerAddrs": {"0": "127.0.0.1:10911"}, "brokerName": "broker-a", "cluster": "ArchiveA"}
    brokers = {"broker-a": {**named, "enableActingMaster": False}}
    for code, fields, body in (
        (206, {}, {"topicList": topics}),
        (224, {"cluster": "ArchiveA"}, {"topicList": topics}),
        (224, {"cluster": "other"}, {"topicList": []}),
        (201, {}, {"dataVersion": version, "forbiddenTable": {}, "subscriptionGroupTable": {}}),
        (208, {"consumerGroup": "g"}, {"consumeTps": 0.0, "offsetTable": {}}),
        (106, {}, {"brokerAddrTable": brokers, "clusterAddrTable": {"ArchiveA": ["broker-a"]}}),
    ):
        answer = response_to(broker, code, **fields)
        assert (answer.code, json.loads(answer.body)) == (0, body), code
    config = response_to(broker, 26)
    assert config.body.decode().splitlines() == ["brokerClusterName=ArchiveA", "brokerId=0", "brokerName=broker-a"]
    assert json.loads(config.fields["version"]) == version
    configs = json.loads(response_to(broker, 21, topicSeq="0").body)["topicConfigTable"]
    assert {name: (settings["topicName"], settings["perm"]) for name, settings in configs.items()} == {
        topic: (topic, 4) for topic in topics
    }
    for code, fields, answer in (
        (101, {"namespace": "ORDER", "key": "t"}, (22, "No config item, Namespace: ORDER Key: t", b"")),
        (351, {"topic": "none"}, (17, "No topic in this broker. topic: none", b"")),
        (224, {}, (1, "the custom field <cluster> is null", b"")),
    ):
        assert summary(response_to(broker, code, **fields)) == answer
    # the text that mqadmin's clusterList of 4.x and 5.x and the Dashboard's collector split and parse
    table = json.loads(response_to(broker, 28).body)["table"]
    assert table["brokerVersionDesc"].startswith("tiered-index ")
    for name in ("putTps", "getTotalTps", "getTransferedTps", "getTransferredTps"):
        assert float(table[name].split(" ")[0]) == int(table["msgGetTotalTodayNow"]) == 0
    for pool in ("send", "pull", "ack"):
        assert table[f"{pool}ThreadPoolQueueSize"] == table[f"{pool}ThreadPoolQueueHeadWaitTimeMills"] == "0"
    assert (table["commitLogDiskRatio"], table["timerEnqueueTps"]) == ("0.0", "0.0")
    for wrong in ("host", "host:", ":9876", "host:0", "host:65536", "http://host:1", "[::1]:1", "a b:1"):
        with pytest.raises(InvalidArgument, match="HOST:PORT"):
            ReadOnlyBroker(index, advertised=wrong)
    assert ReadOnlyBroker(index, advertised="0:0:0:0:0:0:0:1:10911")


def test_a_new_topic_appears_after_a_second_if_it_is_asked_for_and_else_after_half_a_minute(index):
    clock = ManualClock()
    broker = ReadOnlyBroker(index, clock=clock)
    codes = []
    for topic, passed in (("first", 0), ("second", 0), ("second", 1)):
        clock.advance(passed)
        codes.append(ask(broker, 105, topic).code)
        index.put(topic, 0, "k", 0, 100, BEGIN_MS)
        codes.append(ask(broker, 105, topic).code)
    assert codes == [17, 17, 17, 17, 0, 0]
    index.put("third", 0, "k", 100, 100, BEGIN_MS)
    for passed, topics in ((29, ["first", "second"]), (1, ["first", "second", "third"])):
        clock.advance(passed)
        assert json.loads(response_to(broker, 206).body)["topicList"] == topics


def test_writing_requests_are_refused_and_unknown_codes_are_named(index):
    broker = ReadOnlyBroker(index)
    writes = (10, 310, 320, 36, 15, 17, 215, 216, 25, 100, 103, 37, 41, 3001)
    for code in (*writes, 908, 212, 355, 1001, 1002, 1003, 1011, 1012, 1013, 200050):
        answer = broker.answer_at_once(Command(code=code, opaque=4660), HERE)
        assert encode_frame(answer) == frames()["resp.no_permission.json.bin"]["frame"], code
    for code in (0, 29, 999, -1):
        assert summary(response_to(broker, code)) == (3, f" request type {code} not supported", b"")
    for code in (PULL, END, BEGIN, STATS):
        answer = response_to(broker, code)
        assert answer.code == 3 and answer.remark.startswith(f" request type {code} not supported: ")
    unsupported = frames()["resp.unsupported.rmq.bin"]["frame"]
    answer = broker.answer_at_once(Command(code=311, opaque=4660, serialisation=BINARY), HERE)
    assert encode_frame(answer) == unsupported.replace(b"310", b"311")


def without(name: str) -> dict[str, str]:
    return {other: value for other, value in by_key("t", "k").items() if other != name}


@pytest.mark.parametrize(
    ("code", "fields", "said"),
    [
        (105, {}, "the custom field <topic> is null"),
        (105, {"topic": " "}, "topic is empty"),
        (105, {"topic": "\ud800"}, "the custom field <topic> is not Unicode text"),
        *((12, without(name), f"the custom field <{name}> is null") for name in ("key", "beginTimestamp", "maxNum")),
        (12, by_key("t", "k", maxNum="1e3"), "the custom field <maxNum> is not a number"),
        (12, by_key("t", "k", maxNum="\u0661"), "the custom field <maxNum> is not a number"),
        (12, by_key("t", "k", beginTimestamp="9" * 4000), "the custom field <beginTimestamp> is not a number"),
        (33, {}, "the custom field <offset> is null"),
        (33, {"offset": "-1"}, "can not find message by the offset, -1"),
        (33, {"offset": "9223372036854775807"}, "can not find message by the offset, 9223372036854775807"),
    ],
)
def test_the_response_to_a_bad_request_names_the_fault(index, code, fields, said):
    assert summary(response_to(ReadOnlyBroker(index), code, **fields)) == (1, said, b"")


def test_routes_claim_the_queues_that_the_store_has(index, store, messages):
    def queues(broker, topic):
        (route,) = json.loads(ask(broker, 105, topic).body)["queueDatas"]
        table = json.loads(response_to(broker, 21).body)["topicConfigTable"]
        assert json.loads(ask(broker, 351, topic).body) == table[topic]
        assert route["readQueueNums"] == route["writeQueueNums"] == table[topic]["readQueueNums"]
        return route["readQueueNums"]

    long = next(m.topic for m in messages if m.topic.startswith("LongTopic"))
    broker = ReadOnlyBroker(index, store=store)
    assert [queues(broker, topic) for topic in ("TopicOrder", long)] == [4, 1]
    assert queues(ReadOnlyBroker(index), "TopicOrder") == 1
    # a queue that appeared since queues were counted
    (store / "consumequeue" / "TopicOrder" / "6").mkdir()
    assert json.loads(ask(broker, 105, "TopicOrder").body)["queueDatas"][0]["readQueueNums"] == 7
    # the broker's own number counts, also of queues without a message
    (store / "config").mkdir(exist_ok=True)
    table = {"TopicOrder": {"readQueueNums": 9, "writeQueueNums": 8}}
    (store / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": table}))
    broker = ReadOnlyBroker(index, store=store)
    assert queues(broker, "TopicOrder") == 9
    assert ask(broker, STATS, "TopicOrder").body.count(b'"maxOffset":0') == 5


# faults and damage


def test_a_storage_that_fails_is_never_a_short_answer(index, store, storage, messages, caplog):
    delete_segments(store, BEGIN_OF_LAST)
    wanted = next(m for m in messages if m.is_visible and m.uniq_key)
    query = (QUERY, by_unique_key(wanted.topic, wanted.uniq_key))
    view = (VIEW, {"offset": str(wanted.physical_offset)})
    with IndexReader.open(storage_backend=storage) as reader:
        broker = ReadOnlyBroker(reader)
        for prefix in ("segments/", ""):
            storage.fail("get_range", times=None, name_prefix=prefix)
            assert [summary(response_to(broker, code, **fields)) for code, fields in (query, view)] == [BUSY] * 2
            storage.clear()
        assert "memory://" in caplog.text or "get_range" in caplog.text
        assert [records(response_to(broker, code, **fields).body) for code, fields in (query, view)] == [[wanted]] * 2
        # a slow lookup is logged, unless its client has left
        caplog.clear()
        assert summary(response_to(ReadOnlyBroker(reader, timeout_s=1e-9), query[0], **query[1])) == BUSY
        assert len(caplog.records) == 1
        gone = Cancellation()
        gone.set()
        with active_context().cancelled_by(gone).active():
            assert summary(response_to(ReadOnlyBroker(reader), query[0], **query[1])) == BUSY
        assert len(caplog.records) == 1


def test_topics_of_files_that_can_not_be_read_are_not_denied(index, storage, messages):
    index.put("other", 0, "k", 10**6, 100, messages[0].store_ms)
    index.seal()
    index.run_lifecycle()
    with IndexReader.open(storage_backend=storage, read_cache_bytes=0) as reader:
        broker = ReadOnlyBroker(reader)
        storage.fail("get_range", nth=1, times=1)
        storage.fail("get_suffix", nth=1, times=1)
        assert [ask(broker, code, "none").code for code in (206, 105)] == [2, 17]
        assert response_to(broker, 206).code == 0


def test_damaged_messages_hide_no_others_and_are_told_without_names(index, store, storage, messages, caplog):
    """Whatever bit of an archived segment flips, even in a key: the response has every intact message, and a remark
    with the number of damaged ones. Damage of the index is an error.
    """
    delete_segments(store, BEGIN_OF_LAST)
    (topic, key), matches = most_found(messages)
    chosen = random.Random(8)
    whole = [m for m in matches if m.physical_offset < BEGIN_OF_LAST]
    newest = max(m.store_ms for m in messages if m.is_visible and m.index_keys) // 1000 * 1000
    for _ in range(15):
        wanted = chosen.choice(whole)
        name = next(s.name for s in index.archived() if s.start <= wanted.physical_offset < s.end)
        data, at = storage.get(name), wanted.physical_offset % 16_384 + chosen.randrange(wanted.size)
        storage.put(name, flipped(data, at, 1 << chosen.randrange(8)))
        with IndexReader.open(storage_backend=storage) as reader:
            broker = ReadOnlyBroker(reader)
            answer = response_to(broker, QUERY, **by_key(topic, key, maxNum="1000"))
            assert answer.fields == {"indexLastUpdateTimestamp": f"{newest}", "indexLastUpdatePhyoffset": "0"}
            remark = re.fullmatch(r"([0-9]+) of ([0-9]+) messages are not available: (.+)", answer.remark)
            assert (answer.code, int(re.search(r"([0-9]+) damaged", remark[3])[1]) > 0) == (0, True)
            intact = [m for m in matches if m.encode() in answer.body]
            assert wanted not in intact and len(intact) == int(remark[2]) - int(remark[1])
            assert answer.body == b"".join(m.encode() for m in intact)
            if wanted.uniq_key:
                alone = response_to(broker, QUERY, **by_unique_key(topic, wanted.uniq_key))
                assert summary(alone) == (1, "1 of 1 messages are damaged; the server's log says why", b"")
            view = response_to(broker, VIEW, offset=str(wanted.physical_offset))
            assert summary(view) == (1, "the message is damaged; the server's log says why", b"")
        assert name in caplog.text
        caplog.clear()
        storage.put(name, data)
    # offsets of no message are no damage, and no client fills the log
    clock = ManualClock()
    broker = ReadOnlyBroker(index, clock=clock)
    lost = next(m for m in messages if m.physical_offset >= BEGIN_OF_LAST and m.is_visible and m.uniq_key)
    for more in range(1, 30):
        assert response_to(broker, VIEW, offset=str(messages[3].physical_offset + more)).code == 1
        response_to(broker, QUERY, **by_unique_key(lost.topic, lost.uniq_key))
    # debug lines do not count: a test of the command line may have turned them on
    (record,) = [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert "no archived segment holds it" in record.getMessage()
    clock.advance(60)
    response_to(broker, QUERY, **by_unique_key(lost.topic, lost.uniq_key))
    assert "(28 lines like this one were left out)" in caplog.records[-1].getMessage()
    storage.corrupt("get_range", mode="wrong", times=None)
    with IndexReader.open(storage_backend=storage, cache_slot_groups=False) as reader:
        assert summary(response_to(ReadOnlyBroker(reader), QUERY, **by_key(topic, key))) == NO_INDEX


# access keys


@run
async def test_signed_requests(index, store, messages, caplog):
    """With access keys configured, the server answers each recorded signed request, and no others."""
    seen = set()
    async with client_of(index, store=store, keys=KEYS) as client:
        for name in requests():
            request = decode_frame(frames()[name]["frame"][4:])
            await client.send(request)
            answer = await client.receive()
            signed = "Signature" in request.fields
            assert (answer.remark == "check signature failed.") is (not signed), name
            assert (answer.code == 16) is (not signed)
            seen.add((request.code, signed))
            if signed:
                await client.send(replace(request, fields={**request.fields, "AccessKey": "other"}))
                assert (await client.receive()).code == 16
    assert {code for code, signed in seen if signed} == {12, 33, 34, 35, 105, 206}
    assert "from 127.0.0.1 is refused: it is not signed" in caplog.text


@run
async def test_an_access_key_sees_only_its_topics(index, store, messages):
    wanted = {
        topic: next(m for m in messages if m.topic == topic and m.is_visible) for topic in ("TopicOrder", "TopicPay")
    }
    keys = {"pay": AccessKey(SECRET, ("TopicP", "none"))}
    async with client_of(index, store=store, keys=keys) as client:
        assert json.loads((await signed(client, 206)).body) == {"topicList": ["TopicPay"]}
        for topic, m in wanted.items():
            seen = topic == "TopicPay"
            assert (await signed(client, 105, topic=topic)).code == (0 if seen else 17)
            for fields in (by_key(topic, m.index_keys[0]), by_unique_key(topic, m.offset_msg_id)):
                assert (await signed(client, QUERY, **fields)).code in ((0, 22) if seen else (22,))
            answer = await signed(client, VIEW, offset=str(m.physical_offset))
            assert (answer.code, answer.body) == ((0, m.encode()) if seen else (1, b""))
        assert (await signed(client, QUERY, **by_key("TopicPay", wanted["TopicPay"].index_keys[0]))).code == 0


@run
async def test_a_key_of_some_topics_learns_nothing_of_other_places(index, store, storage, messages, monkeypatch):
    """A response used to show whether a message of another topic begins at a place, and whether it is damaged."""
    waits = []
    monkeypatch.setattr(remoting_server, "pause_s", lambda passed_s: waits.append(passed_s) or 0.0)
    keys = {"pay": AccessKey(SECRET, ("TopicP",))}
    topics = ("TopicOrder", "TopicPay")
    other, own = (next(m for m in messages if m.topic == topic and m.is_visible) for topic in topics)
    for key, more in (("begins", 0), ("within", 4)):
        index.put("TopicPay", other.queue_id, key, other.physical_offset + more, other.size, other.store_ms)
    async with client_of(index, store=store, keys=keys) as client:
        for key in ("begins", "within"):
            answer = await signed(client, QUERY, **by_key("TopicPay", key))
            assert (answer.code, answer.remark) == (22, "1 of 1 messages are not available: 1 missing")
        for offset in (other.physical_offset, other.physical_offset + 4, 10**9):
            assert (await signed(client, VIEW, offset=str(offset))).code == 1
        assert len(waits) == 5
        assert ((await signed(client, VIEW, offset=str(own.physical_offset))).code, len(waits)) == (0, 5)
    view = {"offset": str(other.physical_offset), "topic": "TopicOrder"}
    asking, answers = ((QUERY, by_unique_key("TopicPay", other.offset_msg_id)), (VIEW, view)), []
    for _ in ("whole", "damaged"):
        with IndexReader.open(storage_backend=storage) as reader:
            async with client_of(reader, keys=keys) as client:
                answers.append([summary(await signed(client, code, **fields)) for code, fields in asking])
        flip_object(storage, index.archived()[0].name, other.physical_offset + 4)
    assert answers[0] == answers[1] and [code for code, *_ in answers[0]] == [22, 1]


# pulls from a store; those from an archive are in test_archived_queues


def _of_queue(messages, topic, queue_id):
    return [m for m in messages if m.is_visible and (m.topic, m.queue_id) == (topic, queue_id)]


def test_a_pull_of_tags_and_its_bounds(index, tmp_path):
    with StoreWriter(tmp_path / "tagged", segment_bytes=1 << 22) as writer:
        for n in range(2_000):
            # "Aa" and "BB" have one hash
            tag = {1: "Aa", 2: "BB", 1_000: "late"}.get(n, "other")
            writer.put("orders", 0, b"x", keys=["k"], tags=tag, store_ms=BEGIN_MS + n)
        for n in range(8):
            writer.put("large", 0, b"x" * (100_000 if n else 600_000), keys=["k"], store_ms=BEGIN_MS + n)
    index_log(index, tmp_path / "tagged")
    broker = ReadOnlyBroker(index, store=tmp_path / "tagged")

    def tagged(subscription, at=0, **more):
        answer = pull(broker, "orders", 0, at, subscription=subscription, **more)
        offsets = [m.queue_offset for m in records(answer.body)]
        return answer.code, offsets, int(answer.fields.get("nextBeginOffset", -1))

    assert tagged(" Aa || late") == (0, [1, 2], 800)
    assert tagged("late") == (20, [], 800)
    assert tagged("late", 800) == (0, [1_000], 1_600)
    assert tagged("other", expressionType="TAG") == (0, [0, *range(3, 34)], 34)
    assert tagged("*", maxMsgBytes="1") == (0, [0], 1)
    assert tagged("", 1_999, maxMsgBytes="-5") == (0, [1_999], 2_000)
    assert tagged("||")[0] == 23
    answer = pull(broker, "orders", 0, 0, expressionType="SQL92", subscription="a > 1")
    assert summary(answer) == (1, "The broker does not support consumer to filter message by SQL92", b"")
    answer = pull(broker, "orders", 0, 0, sysFlag="0")
    assert (answer.code, answer.body) == (24, b"")
    # at most a broker's bytes, and always one message
    assert [len(records(pull(broker, "large", 0, at).body)) for at in (0, 1, 7)] == [1, 2, 1]


def test_messages_decide_tags_if_the_queue_has_an_extension(index, tmp_path):
    with StoreWriter(tmp_path / "extended", segment_bytes=1 << 20) as writer:
        for n in range(4):
            writer.put("orders", 0, b"x", keys=["k"], tags="ab"[n % 2], store_ms=BEGIN_MS + n)
    (path,) = (tmp_path / "extended" / "consumequeue" / "orders" / "0").iterdir()
    data = bytearray(path.read_bytes())
    for n in range(4):
        # the place in the extension, in place of the tags' hash
        data[20 * n + 12 : 20 * n + 20] = (n - 2**63).to_bytes(8, "big", signed=True)
    path.write_bytes(data)
    index_log(index, tmp_path / "extended")
    answer = pull(ReadOnlyBroker(index, store=tmp_path / "extended"), "orders", 0, 0, subscription="a")
    assert [m.queue_offset for m in records(answer.body)] == [0, 2]


def test_queues_and_topics_that_there_are_not(index, store, messages):
    """A topic that an access key may not see does not exist for it. A topic's name never leads to other files."""
    index.put("../commitlog", 0, "k", 0, 100, BEGIN_MS)
    broker = ReadOnlyBroker(index, store=store)

    def sees(topic):
        return topic == "TopicPay"

    for topic, who in (("none", None), ("../commitlog", None), ("TopicOrder", sees), ("none", sees)):
        answers = [ask(broker, code, topic, 0, who) for code in (BEGIN, END, STATS)]
        for answer in (*answers, pull(broker, topic, 0, 0, sees=who)):
            assert (summary(answer), answer.fields) == ((17, f"topic[{topic}] not exist", b""), {})
    assert pull(broker, "TopicPay", 0, 0, sees=sees).code == 0
    assert (ends(broker, "TopicOrder", 4), ends(broker, "TopicOrder", -1)) == ((0, 0), (0, 0))
    for queue_id in (-1, 4, 10**18):
        answer = pull(broker, "TopicOrder", queue_id, 0)
        assert (answer.code, answer.body) == (29, b"")
    # the queue exists, but has no message
    for path in (store / "consumequeue" / "TopicOrder" / "1").iterdir():
        path.unlink()
    assert [pull(broker, "TopicOrder", 1, at).code for at in (0, 5)] == [19, 21]
    for name in ("topic", "queueId", "queueOffset", "maxMsgNums", "sysFlag"):
        fields = {"topic": "t", "queueId": "0", "queueOffset": "0", "maxMsgNums": "1"}
        fields.pop(name, None)
        answer = response_to(broker, PULL, **fields)
        assert (answer.code, "custom field" in answer.remark) == (1, True)


def test_a_pull_ends_before_damage_and_fails_at_it(index, store, messages, caplog):
    """Whatever bit of a message or its entry flips, or if it is a hole: a pull never skips or returns a wrong one."""
    chosen = random.Random(11)
    queue = _of_queue(messages, "TopicOrder", 1)
    (entries,) = (store / "consumequeue" / "TopicOrder" / "1").iterdir()
    whole = entries.read_bytes()
    for turn in range(40 + len(queue) - 1):
        row = chosen.randrange(len(queue)) if turn < 40 else turn - 40
        lost = queue[row]
        if turn >= 40:
            path, changed = entries, whole[: 20 * row] + bytes(20) + whole[20 * row + 20 :]
        elif chosen.random() < 0.5:
            path = store / "commitlog" / f"{lost.physical_offset // 16_384 * 16_384:020d}"
            at = lost.physical_offset % 16_384 + chosen.randrange(8)
            changed = flipped(path.read_bytes(), at, 1 << chosen.randrange(8))
        else:
            path, changed = entries, flipped(whole, 20 * row + chosen.randrange(12), 1 << chosen.randrange(8))
        data = path.read_bytes()
        path.write_bytes(changed)
        broker = ReadOnlyBroker(index, store=store)
        offset = 0
        while (answer := pull(broker, "TopicOrder", 1, offset)).code == 0:
            page = records(answer.body)
            assert page == queue[offset : offset + len(page)]
            offset += len(page)
        assert summary(answer) == NO_INDEX
        assert offset <= row
        assert pull(broker, "TopicOrder", 1, row).code == 1
        end = ask(broker, END, "TopicOrder", 1)
        assert end.code == 1 or end.fields["offset"] == str(len(queue))
        path.write_bytes(data)
    assert caplog.records


def test_messages_that_the_broker_deletes_meanwhile_are_skipped_and_an_unmounted_log_is_no_empty_queue(
    index, store, messages, monkeypatch
):
    """The consume queues are on another disk than the log. A consumer must not skip all messages."""
    queue, broker = _of_queue(messages, "TopicOrder", 1), ReadOnlyBroker(index, store=store)
    (store / "commitlog").rename(store / "elsewhere")
    assert [ask(broker, code, "TopicOrder", 1).code for code in (BEGIN, END)] == [2, 2]
    assert pull(broker, "TopicOrder", 1, 0).code == 2
    (store / "elsewhere").rename(store / "commitlog")
    assert records(pull(broker, "TopicOrder", 1, 0).body)[:1] == queue[:1]
    monkeypatch.setattr(StoreQueues, "ends", lambda *_: Ends(0, len(queue)))
    broker = ReadOnlyBroker(index, store=store)
    delete_segments(store, 16_384)
    remaining = [m for m in queue if m.physical_offset >= 16_384][:32]
    assert 0 < len(remaining) < len(queue)
    assert records(pull(broker, "TopicOrder", 1, 0).body) == remaining


@run
async def test_a_pull_that_may_wait_gets_a_late_response(index, store, messages, monkeypatch):
    held = []
    really = asyncio.sleep

    async def sleep(seconds):
        if seconds:
            held.append(seconds)
        else:
            await really(0)

    end = len(_of_queue(messages, "TopicOrder", 1))
    fields = {"topic": "TopicOrder", "queueId": "1", "queueOffset": str(end), "maxMsgNums": "1", "subscription": "*"}
    async with client_of(index, store=store) as client:
        monkeypatch.setattr("tiered_index.connectors.rocketmq.remoting.server.asyncio.sleep", sleep)
        for flag, offset, code in (("4", end, 19), ("6", end, 19), ("6", end - 1, 0)):
            sent_fields = {**fields, "sysFlag": flag, "queueOffset": str(offset)}
            assert (await client.ask(PULL, sent_fields)).code == code
        monkeypatch.undo()
    assert held == [1.0]
