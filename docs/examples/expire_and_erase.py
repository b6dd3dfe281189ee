"""Expire entries by age, and erase those of a key."""

import tempfile
import time

from tiered_index import IndexReader, IndexService, Retention, erase, expire

uri, now_ms, day_ms = "file://" + tempfile.mkdtemp(), time.time_ns() // 10**6, 86_400_000
with IndexService.open(root=tempfile.mkdtemp(), storage=uri, slots=100, items=1000, local_keep_s=0) as index:
    for days in (400, 10):
        index.put("orders", 0, "order-4711", offset=days, size=512, timestamp_ms=now_ms - days * day_ms)
        index.seal()
        index.run_lifecycle()

rule = Retention(age_s="365d", topics={"debug-*": "7d"})
assert len(expire(uri, rule).objects) == 1  # the plan
assert len(expire(uri, rule, yes=True).objects) == 1
with IndexReader.open(uri) as reader:
    answer = reader.query("orders", "order-4711")
    assert [item.offset for item in answer] == [10] and answer.expired_before_ms is not None

uri, now_ms = "file://" + tempfile.mkdtemp(), time.time_ns() // 10**6
with IndexService.open(root=tempfile.mkdtemp(), storage=uri, slots=100, items=1000, local_keep_s=0) as index:
    for number, key in enumerate(("order-4711", "order-4712")):
        index.put("orders", 0, key, offset=number, size=512, timestamp_ms=now_ms - 60_000)
    index.seal()
    index.run_lifecycle()

assert erase(uri, "orders", keys="order-4711").entries == 1  # the plan
certificate = erase(uri, "orders", keys="order-4711", yes=True, now=True, grace_s=0)
assert (certificate.status, certificate.entries_removed, certificate.remaining) == ("erased", 1, ())
with IndexReader.open(uri) as reader:
    assert not len(reader.query("orders", "order-4711")) and len(reader.query("orders", "order-4712")) == 1
