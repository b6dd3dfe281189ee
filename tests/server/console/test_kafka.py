"""The console shows a record of Kafka: its value as JSON, text or digits, its headers as a table, and its place."""

import pytest
from playwright.sync_api import expect

from tests.server.conftest import on_a_port
from tests.server.console.pages import BEGIN_MS
from tiered_index import IndexService
from tiered_index.kafka.record import KafkaRecord, TimestampType
from tiered_index.message_sources import MessageSources
from tiered_index.service.read.messages import Fetched

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


@pytest.fixture
def url(tmp_path):
    with IndexService.open(root=tmp_path / "root", storage="memory://kafka-console", background=False) as index:
        for offset, value in enumerate(VALUES):
            index.put("orders", 3, f"key-{offset}", offset, len(value or b""), BEGIN_MS + offset)
        sources = MessageSources(index, index.config)
        sources.records = lambda _: Records()
        with on_a_port(index, sources=sources) as client:
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
