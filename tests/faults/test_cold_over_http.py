"""The cold path on an S3 server behind a counting proxy: `explain` has the requests on the wire.

Repeats count, too. `tests/unit/service/cold` has damaged responses and outages.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.storage.scripted_server import error
from tests.support.cold_index import ColdIndex, cold_index, columns, publish, put
from tests.support.counting_proxy import Action, CountingProxy, Request, counting_proxy
from tests.support.hanging import until
from tests.support.model import Answer
from tests.support.s3_server import S3Server
from tiered_index import IndexReader, Lookup, QueryResult
from tiered_index.storage.opening import open_storage
from tiered_index.types import Explain

FILES = 10


class Wire:
    """The proxy, and the index behind it."""

    def __init__(self, proxy: CountingProxy, bucket: str, made: ColdIndex) -> None:
        self.proxy, self.bucket, self.made = proxy, bucket, made
        self.uri = f"s3://{bucket}/i?endpoint_url={proxy.endpoint_url}&addressing_style=path"

    def reader(self, **settings: Any) -> IndexReader:
        """Open a reader, and forget the requests of that."""
        reader = IndexReader.open(self.uri, **{"refresh_interval_s": 10**6, **settings})
        self.proxy.reset()
        return reader

    def billed(self) -> tuple[int, int]:
        """Return the number of GETs and the payload bytes since the last call; other requests are a failure."""
        exchanges = self.proxy.reset()
        assert {e.method for e in exchanges} <= {"GET"}
        listings = [e for e in exchanges if e.key == self.bucket]
        return len(exchanges), sum(e.bytes for e in exchanges if e.status in (200, 206) and e not in listings)

    def check(self, explain: Explain) -> int:
        """Compare the report of one lookup with the counts on the wire; return the requests."""
        assert self.billed() == (explain.requests, explain.bytes)
        assert explain.requests == sum(report.requests for report in explain.files)
        assert explain.bytes == sum(report.bytes for report in explain.files)
        return explain.requests

    def right(self, answer: QueryResult, key: str = "all") -> None:
        assert ([Answer.of(item) for item in answer], answer.status) == (self.made.expected("t", key), "complete")


@pytest.fixture
def wire(s3_environment: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with counting_proxy(s3_environment.endpoint_url) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiered_index.storage.retry.LONGEST_WAIT_S", 0.0)
        made = cold_index(tmp_path_factory.mktemp("cold") / "root", files=FILES, entries=12, slots=16)
        wire = Wire(proxy, s3_environment.new_bucket(), made)
        with open_storage(wire.uri) as target:
            for info in sorted(made.inner.list(), key=lambda info: info.name.startswith("checkpoint/")):
                target.put(info.name, made.inner.get(info.name))
            made.storage.inner = target
            yield wire


def test_explain_has_the_requests_on_the_wire(wire: Wire) -> None:
    with wire.reader(cache_slot_groups=False) as reader:
        for requests in (2 * FILES, FILES):  # at first also each directory, by one exact GET
            answer = reader.query("t", "all", max_count=1000)
            wire.right(answer)
            assert wire.check(answer.explain) == requests
        absent = reader.query("t", "absent", max_count=1000)
        assert len(absent) == 0
        assert wire.check(absent.explain) <= FILES
        keys = ["all", "absent", *(f"k{n}-{m}" for n in range(0, FILES, 7) for m in (1, 5))]
        lookups = [Lookup(topic="t", key=key, max_count=1000) for key in keys]
        many = reader.query_many(lookups)
        for key, each in zip(keys, many, strict=True):
            wire.right(each, key)
        assert 0 < wire.check(many.explain) <= FILES
    with wire.reader() as reader:
        for requests in (2 * FILES, 0):
            assert wire.check(reader.query_many(lookups).explain) == requests
    # a refresh is part of the lookup that made it
    with IndexReader.open(wire.uri, refresh_interval_s=0.000_001) as reader:
        wire.proxy.reset()
        assert wire.check(reader.query("t", "all").explain) == 2 * FILES + 1  # no record after the last one
        with wire.made.writer() as writer:
            put(wire.made, writer, columns(FILES, 12))
            publish(wire.made, writer)
            wire.proxy.reset()
            answer = reader.query("t", "all")
            wire.right(answer)
            (log,) = [report for report in answer.explain.files if report.outcome == "refreshed"]
            # of the stored files, only the new one
            assert wire.check(answer.explain) == 2 + log.requests and log.requests >= 2


SPOILED: dict[str, Action] = {
    "throttled": Action(answer=error(503, "SlowDown", "reduce your request rate")),
    "a body that ends early": Action(cut_at=50),
}


@pytest.mark.parametrize("spoiled", [None, *SPOILED])
def test_limits_hold_on_the_wire(wire: Wire, spoiled: str | None) -> None:
    """The service bills repeats, after an error and after a broken body. Searches that are given up ask for no more."""
    for limits in ({"max_requests": 0}, {"max_requests": 7}, {"max_requests": 20}, {"max_bytes": 2_000}):
        seen: Counter[str] = Counter()

        def fault(request: Request, seen: Counter[str] = seen) -> Action | None:
            seen[request.key] += 1
            return SPOILED[spoiled] if spoiled and seen[request.key] == 1 else None

        with wire.reader(cache_slot_groups=False) as reader:
            wire.proxy.fault = fault
            partly = reader.query("t", "all", allow_partial=True, **limits)
        until(lambda: not any(thread.name.startswith("tiered-index-query") for thread in threading.enumerate()))
        requests, delivered = wire.billed()
        assert requests == partly.explain.requests <= limits.get("max_requests", 10**6)
        assert delivered <= limits.get("max_bytes", 10**6)
        answers = {Answer.of(item) for item in partly}
        assert len(answers) == FILES - len(partly.failed) and answers <= set(wire.made.expected("t", "all"))
        assert len(answers) < FILES or limits == {"max_requests": 20}
