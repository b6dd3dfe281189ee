"""The cold path on an S3 server behind a counting proxy: `explain` has the requests on the wire.

Repeats count, too. `tests/unit/service/cold` has damaged responses and outages.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.storage.scripted_server import error
from tests.support.cold_index import ColdIndex, cold_index, columns, publish, put
from tests.support.counting_proxy import Action, CountingProxy, Request, counting_proxy
from tests.support.hanging import until
from tests.support.model import Answer
from tests.support.s3_server import S3Server
from tiered_index import IndexReader, Lookup, QueryResult
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import open_storage
from tiered_index.types import Explain

MANY = 40
SIZES = (10, MANY)


class Wire:
    """The proxy, and an index of each size behind it."""

    def __init__(self, proxy: CountingProxy, bucket: str, made: dict[int, ColdIndex]) -> None:
        self.proxy, self.bucket, self.made = proxy, bucket, made

    def uri(self, files: int) -> str:
        return f"s3://{self.bucket}/i{files}?endpoint_url={self.proxy.endpoint_url}&addressing_style=path"

    def reader(self, files: int, **settings: Any) -> IndexReader:
        """Open a reader, and forget the requests of that."""
        reader = IndexReader.open(self.uri(files), **{"refresh_interval_s": 10**6, **settings})
        self.proxy.reset()
        return reader

    def billed(self) -> tuple[int, int]:
        """Return the number of GETs and the payload bytes since the last call; other requests are a failure."""
        exchanges = self.proxy.reset()
        assert {e.method for e in exchanges} <= {"GET"}
        listings = [e for e in exchanges if e.key == self.bucket]
        return len(exchanges), sum(e.bytes for e in exchanges if e.status in (200, 206) and e not in listings)


def copy(source: Storage, target: Storage) -> None:
    """Copy all objects; checkpoints last, as a writer does, since a reader reads records again that are younger."""
    infos = list(source.list())
    with ThreadPoolExecutor(8) as pool:
        for last in (False, True):
            chosen = [info for info in infos if info.name.startswith("checkpoint/") is last]
            list(pool.map(lambda info: target.put(info.name, source.get(info.name)), chosen))


@pytest.fixture(scope="module")
def wire(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with counting_proxy(server.endpoint_url) as proxy, pytest.MonkeyPatch.context() as patch:
        server.let_in(patch)
        patch.setattr("tiered_index.storage.retry.LONGEST_WAIT_S", 0.0)
        bucket = server.new_bucket()
        made = {}
        for files in SIZES:
            made[files] = cold_index(tmp_path_factory.mktemp("cold") / "root", files=files, entries=12, slots=16)
            uri = f"s3://{bucket}/i{files}?endpoint_url={server.endpoint_url}&addressing_style=path"
            with open_storage(uri) as target:
                copy(made[files].inner, target)
        yield Wire(proxy, bucket, made)


@pytest.fixture(autouse=True)
def _no_fault(wire: Wire) -> Iterator[None]:
    wire.proxy.reset()
    yield
    wire.proxy.reset()


def check(wire: Wire, explain: Explain) -> int:
    """Compare the report of one lookup with the counts on the wire; return the requests."""
    assert wire.billed() == (explain.requests, explain.bytes)
    assert explain.requests == sum(report.requests for report in explain.files)
    assert explain.bytes == sum(report.bytes for report in explain.files)
    return explain.requests


def right(made: ColdIndex, answer: QueryResult, key: str = "all") -> None:
    assert ([Answer.of(item) for item in answer], answer.status) == (made.expected("t", key), "complete")


@pytest.mark.parametrize("files", SIZES)
def test_explain_has_the_requests_on_the_wire(wire: Wire, files: int) -> None:
    made = wire.made[files]
    with IndexReader.open(wire.uri(files)):
        assert wire.billed()[0] <= 3  # whatever the number of files
    with wire.reader(files, block_cache_bytes=0) as reader:
        for requests in (2 * files, files):  # at first also each directory, by one exact GET
            answer = reader.query("t", "all", max_count=1000)
            right(made, answer)
            assert check(wire, answer.explain) == requests
        key = f"k{files // 2}-3"
        answer = reader.query("t", key)
        right(made, answer, key)
        assert check(wire, answer.explain) <= files
        absent = reader.query("t", "absent", max_count=1000)
        assert len(absent) == 0
        assert check(wire, absent.explain) <= files
        keys = ["all", "absent", *(f"k{n}-{m}" for n in range(0, files, 7) for m in (1, 5))]
        many = reader.query_many([Lookup(topic="t", key=key, max_count=1000) for key in keys])
        for key, each in zip(keys, many, strict=True):
            right(made, each, key)
        assert 0 < check(wire, many.explain) <= files
    if files == MANY:
        return
    with wire.reader(files) as reader:
        many = reader.query_many([Lookup(topic="t", key=key, max_count=1000) for key in keys])
        assert check(wire, many.explain) == 2 * files
        again = reader.query_many([Lookup(topic="t", key=key, max_count=1000) for key in keys])
        assert check(wire, again.explain) == 0
        assert again.counts.tolist() == many.counts.tolist()


def test_a_refresh_is_part_of_the_lookup_that_made_it(wire: Wire, tmp_path: Path) -> None:
    source = cold_index(tmp_path / "root", files=2, entries=12, slots=16)
    uri = wire.uri(10).replace("/i10?", "/refreshed?")
    with open_storage(uri) as target:
        copy(source.inner, target)
        source.storage.inner = target
        with IndexReader.open(uri, refresh_interval_s=0.000_001) as reader:
            wire.proxy.reset()
            answer = reader.query("t", "all")
            right(source, answer)
            assert check(wire, answer.explain) == 4 + 1  # no record after the last one
            with source.writer() as writer:
                put(source, writer, columns(2, 12))
                publish(source, writer)
                wire.proxy.reset()
                answer = reader.query("t", "all")
                right(source, answer)
                requests = check(wire, answer.explain)
                (log,) = [report for report in answer.explain.files if report.outcome == "refreshed"]
                assert requests == 2 + log.requests and log.requests >= 2  # of the stored files, only the new one


SPOILED: dict[str, Action] = {
    "throttled": Action(answer=error(503, "SlowDown", "reduce your request rate")),
    "a body that ends early": Action(cut_at=50),
}


@pytest.mark.parametrize("spoiled", [None, *SPOILED])
def test_limits_hold_on_the_wire(wire: Wire, spoiled: str | None) -> None:
    """The service bills repeats, after an error and after a broken body. Searches that are given up ask for no more."""
    made = wire.made[10]
    for limits in ({"max_requests": 0}, {"max_requests": 7}, {"max_requests": 20}, {"max_bytes": 2_000}):
        seen: Counter[str] = Counter()

        def fault(request: Request, seen: Counter[str] = seen) -> Action | None:
            seen[request.key] += 1
            return SPOILED[spoiled] if spoiled and seen[request.key] == 1 else None

        with wire.reader(10, block_cache_bytes=0) as reader:
            wire.proxy.fault = fault
            partly = reader.query("t", "all", allow_partial=True, **limits)
        until(lambda: not any(thread.name.startswith("tiered-index-query") for thread in threading.enumerate()))
        requests, delivered = wire.billed()
        assert requests == partly.explain.requests <= limits.get("max_requests", 10**6)
        assert delivered <= limits.get("max_bytes", 10**6)
        answers = {Answer.of(item) for item in partly}
        assert len(answers) == 10 - len(partly.failed) and answers <= set(made.expected("t", "all"))
        assert len(answers) < 10 or limits == {"max_requests": 20}
