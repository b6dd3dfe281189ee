"""The console shows what other systems have: a record of Kafka with its value, headers and place, and rows of files.

Neither has the words of RocketMQ's brokers.
"""

import json

import pytest
from playwright.sync_api import expect

from tests.integration.cli.command_lines import run_here
from tests.server.conftest import on_a_port
from tests.server.console.pages import BEGIN_MS, check_access, rows
from tiered_index import IndexReader, IndexService
from tiered_index.connectors.kafka.record import KafkaRecord, TimestampType
from tiered_index.connectors.read_again import MessageSources
from tiered_index.server.http.tokens import add_token
from tiered_index.service.read.answers.messages import Fetched

pytestmark = pytest.mark.long

HEADERS = (("traceparent", b"00-4bf9"), ("retry", b"\xff"), ("retry", None))
VALUES = [b'{"order": {"id": "order-4711"}}', b"plain <b>text</b>", b"\x00\xff", None]


class Records:
    """Records with a value that their offset chooses."""

    def at(self, topic, partition, offset):
        return self.fetch([None], topic, "k", [(partition, offset)])[0]

    def fetch(self, items, topic, key, places=None):
        places = places or [(item.queue_id, item.offset) for item in items]
        records = [
            KafkaRecord(topic, *place, b"customer-7", VALUES[place[1]], HEADERS, BEGIN_MS, TimestampType.CREATE)
            for place in places
        ]
        return [
            Fetched(item=item, state="local", message=record, read_from="kafka://broker:9092/orders/3")
            for item, record in zip(items, records, strict=True)
        ]


class RecordSources(MessageSources):
    """All topics are of Kafka."""

    def connector_of(self, topic):
        return "kafka"

    def of_connector(self, name):
        return Records() if name == "kafka" else super().of_connector(name)


@pytest.fixture
def url(tmp_path):
    with IndexService.open(root=tmp_path / "root", storage="memory://kafka-console", background=False) as index:
        for offset, value in enumerate(VALUES):
            index.put("orders", 3, f"key-{offset}", offset, len(value or b""), BEGIN_MS + offset)
        with on_a_port(index, sources=RecordSources(index, index.config)) as client:
            yield str(client.base_url)


def test_a_record_has_value_headers_and_place(opened, url):
    page = opened(url, "#search?topic=orders&key=key-0")
    page.get_by_role("row").nth(1).get_by_role("button").first.click()
    message = page.locator("#message")
    expect(message.locator(".state")).to_have_text("read from the broker")
    expect(message.get_by_label("JSON")).to_be_checked()
    expect(message.get_by_role("region", name="Body")).to_contain_text('"id": "order-4711"')
    headers = message.get_by_role("table", name="headers").first
    expect(headers.get_by_role("row")).to_have_text(["traceparent00-4bf9", "retry0xff", "retry\u2013"])
    expect(message.locator("dl").first.locator("dt:text-is('partition') + dd")).to_have_text("3")
    expect(message.locator("code")).to_contain_text("v1/messages/kafka%3Aorders%2F3%2F0")
    expect(message.get_by_role("link", name="customer-7").first).to_have_attribute(
        "href", "#search?topic=orders&key=customer-7"
    )
    expect(message.get_by_text("Messages around it")).to_have_count(0)


def test_a_tombstone_and_a_record_by_its_place(opened, url):
    page = opened(url, "#search?topic=orders&key=key-3")
    page.get_by_role("row").nth(1).get_by_role("button").first.click()
    expect(page.locator("#message")).to_contain_text("A record without a value")
    page = opened(url, "#search?id=kafka:orders/3/1")
    expect(page.locator("#message").get_by_role("region", name="Body")).to_contain_text("plain")


def test_rows_of_files_are_listed_and_opened(opened, tmp_path):
    log = tmp_path / "app.ndjson"
    log.write_text("".join(f"{json.dumps({'order_id': n % 3, 'at': 1_700_000_000 + n, 'n': n})}\n" for n in range(30)))
    storage = f"file://{tmp_path}/objects"
    keys = ("--topic", "orders", "--key", "order_id", "--time", "at", "--wait")
    done = run_here("ingest", log, *keys, "--root", tmp_path / "root", "--storage", storage)
    assert done.code == 0, done.err
    with IndexReader.open(storage) as reader, on_a_port(reader) as client:
        page = opened(str(client.base_url), "#search?topic=orders&key=1")
        expect(rows(page)).to_have_count(10)
        expect(rows(page).first).to_contain_text('"n": 28')
        titles = page.locator("#entries-table thead th").all_inner_texts()
        assert {"File", "Row"} <= {*titles} and {"Queue", "Offset", "Size"}.isdisjoint(titles)
        check_access(page)
        page.locator("summary", has_text="As a command").first.click()
        expect(page.locator("#commands")).not_to_contain_text("mqadmin")
        rows(page).first.get_by_role("button").click()
        message = page.locator("#message")
        expect(message).to_contain_text("read from its file")
        expect(message).to_contain_text(log.as_uri())
        expect(message.locator("pre")).to_contain_text('"n": 28')
        expect(message).not_to_contain_text("queue")
        log.write_text(log.read_text().replace('"n": 28', '"n": 29'))
        page.reload()
        expect(message).to_contain_text("has changed since it was indexed")


@pytest.mark.parametrize("kind", ["reader", "writer", "token"])
def test_a_miss_offers_named_keys_and_other_forms(opened, tmp_path, kind):
    """Of order 136 and user 136, neither of which is the key 136, and of a UUID; commands ask the service for them."""
    uuid, log = "6f1d2c3b-4a59-4687-9788-112233445566", tmp_path / "app.ndjson"
    log.write_text(json.dumps({"order": 136, "user": 136, "id": uuid, "at": 1_700_000_000}) + "\n")
    root, storage, secret = tmp_path / "root", f"file://{tmp_path}/objects", "other"
    where = ("--time", "at", "--wait", "--root", root, "--storage", storage)
    for topic, *keys in (("t", "--key", "order=order", "--key", "user=user", "--key", "id"), (secret, "--key", "x=id")):
        done = run_here("ingest", log, "--topic", topic, *keys, *where)
        assert done.code == 0, done.err
    tokens = {"tokens": tmp_path / "tokens.json"} if kind == "token" else {}
    token = add_token(tokens["tokens"], "team", "read", ["t"]) if tokens else ""
    index = IndexService.open(root=root, storage=storage) if kind == "writer" else IndexReader.open(storage)
    with index, on_a_port(index, **tokens) as client:
        url = str(client.base_url)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        known = client.get("/v1/topics", headers=headers).json()["topics"]
        names = {"t": ["order=", "user="]} | ({} if token else {secret: ["x="]})
        assert {topic["topic"]: topic["key_names"] for topic in known} == names
        for typed, offered in (("136", ["order=136", "user=136"]), (uuid.replace("-", "").upper(), [uuid])):
            page = opened(url, f"#{f'token={token}&' if token else ''}search?topic=t&key={typed}")
            for key in offered:
                expect(page.get_by_role("link", name=f"key {key} of topic t")).to_be_visible()
            expect(page.locator("#said li")).to_have_count(len(offered))
            (tmp_path / "token").write_text(token)
            command = (
                "query",
                "t",
                typed,
                "--url",
                url,
                "--json",
                *(["--token-file", tmp_path / "token"] if token else []),
            )
            said = run_here(*command).document["hints"]
            assert said == [f"keys are exact: {key!r} has entries" for key in offered]
