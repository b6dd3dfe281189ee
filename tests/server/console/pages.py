"""Helpers of the console's tests: messages and an index to show, and functions that use and check a page."""

import time

from axe_playwright_python.sync_playwright import Axe

from tests.rocketmq.archived_store import put
from tests.support.batches import batch
from tests.support.store_writer import StoreWriter
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader

# Saturday, 1 November 2025
BEGIN_MS = 1_761_955_200_000
HOUR_MS = 3_600_000
HOSTILE = "<img/src=x/onerror=window.hacked=1>\N{GRINNING FACE}"
MANY = 1_060
PATIENCE_S = 30


def put_messages(store):
    """Write a store with the messages of eight hours."""
    bodies = {
        "order-4711": b'{"id": 12345678901234567890, "note": "a, b: c", "lines": [{}, [], {"sku": "A-1", "eur": 1.5}]}',
        "order-text": "Gr\u00fc\u00dfe, <b>kein JSON</b>".encode(),
        "order-bytes": bytes(range(256)),
        HOSTILE: f"<script>window.hacked=1</script>{HOSTILE}".encode(),
    }
    with StoreWriter(store, segment_bytes=1 << 20) as writer:
        for hour in range(8):
            for n, (key, body) in enumerate(bodies.items()):
                at_ms = BEGIN_MS + hour * HOUR_MS + n * 600_000
                keys = [key, "customer-7"] if hour == 3 else [f"order-{hour}", "customer-7"]
                writer.put("orders", n, body, keys=keys, tags="paid", store_ms=at_ms)
            writer.put("payments", 0, b"1.50 EUR", keys=[f"payment-{hour}"], store_ms=BEGIN_MS + hour * HOUR_MS)


def settled_in_hours(index, store):
    """Index the store, one file per hour. The last ones are not uploaded. An unsealed one has many entries of a key."""
    hour = 0
    for message in CommitLogReader(store / "commitlog").messages():
        if (message.store_ms - BEGIN_MS) // HOUR_MS > hour:
            hour += 1
            index.seal()
            if hour < 6:
                index.run_lifecycle()
        put(index, message)
    index.seal()
    offsets = [1 << 40 | n for n in range(MANY)]
    times = [BEGIN_MS + 9 * HOUR_MS + n * 1000 for n in range(MANY)]
    index.put_batch(batch(MANY, topic="orders", queue_id=9, key="busy", offset=offsets, size=100, timestamp_ms=times))
    index.put(HOSTILE, 0, HOSTILE, 1 << 50, 100, BEGIN_MS + 9 * HOUR_MS)
    index.flush()


def search(page, topic="orders", key="customer-7"):
    page.get_by_label("Topic", exact=True).fill(topic)
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Search").click()


def status(page):
    return page.locator("#status")


def rows(page):
    return page.locator("#entries-table tbody tr")


def check_access(page):
    """Check all rules of axe."""
    report = Axe().run(page, options={"resultTypes": ["violations"]})
    assert report.violations_count == 0, report.generate_report()


def fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def drawn(page, chart, color):
    """Wait until a chart has points of a color, and return True. A change of colors draws the charts again."""
    program = """([chart, color]) => {
            const canvas = document.querySelector(`${chart} canvas`);
            const probe = document.createElement("canvas").getContext("2d");
            probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(color);
            probe.fillRect(0, 0, 1, 1);
            const [wanted] = new Uint32Array(probe.getImageData(0, 0, 1, 1).data.buffer);
            const points = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            return new Uint32Array(points.buffer).includes(wanted);
        }"""
    until_s = time.monotonic() + PATIENCE_S
    while not (is_drawn := page.evaluate(program, [chart, color])) and time.monotonic() < until_s:
        page.wait_for_timeout(50)
    return is_drawn
