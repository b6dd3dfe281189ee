"""The cold path on an S3 server behind a counting proxy: `explain` has the requests on the wire.

Damaged responses never give wrong answers.
"""

from __future__ import annotations

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
from tiered_index.errors import BudgetExceeded, CorruptFile, StorageMisconfigured, StorageUnavailable
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


@pytest.mark.parametrize("max_count", [1, 10])
def test_an_early_stop_is_made_before_the_requests_are(wire: Wire, max_count: int) -> None:
    """The key is in all of many files, newest first."""
    made = wire.made[MANY]
    with wire.reader(MANY, block_cache_bytes=0) as reader:
        for each in (2, 1):
            answer = reader.query("t", "all", max_count=max_count)
            assert [Answer.of(item) for item in answer] == made.expected("t", "all")[:max_count]
            assert answer.status == "truncated"
            assert check(wire, answer.explain) == each * max_count
        assert answer.explain.files_skipped == MANY - max_count


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
    "an inner error": Action(answer=error(500, "InternalError")),
    "a lost answer": Action(lose_answer=True),
    "a body that ends early": Action(cut_at=50),
    "a connection reset in the body": Action(cut_at=50, reset=True),
    "wrong bytes": Action(flip_byte=-70),
    "wrong bytes at the start": Action(flip_byte=0),
}


@pytest.mark.parametrize("action", SPOILED.values(), ids=SPOILED.keys())
def test_answers_spoiled_once_in_a_while_spoil_nothing(wire: Wire, action: Action) -> None:
    made = wire.made[10]
    for nth in range(2):  # directories, then groups
        struck = {stored.name for stored in made.stored[nth::3]}
        seen: Counter[str] = Counter()

        def fault(
            request: Request, nth: int = nth, struck: set[str] = struck, seen: Counter[str] = seen
        ) -> Action | None:
            name = request.key.split("/", 2)[-1]
            seen[name] += 1
            return action if name in struck and seen[name] == nth + 1 else None

        with wire.reader(10) as reader:
            wire.proxy.fault = fault
            answer = reader.query("t", "all")
            right(made, answer)
            requests, delivered = wire.billed()
            # a damaged filter that came with its directory is ignored until it is due
            repeats = 0 if action.flip_byte == 0 and nth == 0 else len(struck)
            assert answer.explain.requests == requests == 20 + repeats
            # a broken transfer counts as a whole
            assert delivered <= answer.explain.bytes
            if not (action.cut_at or action.reset):
                assert delivered == answer.explain.bytes


LASTING: dict[str, tuple[Action, type[Exception]]] = {
    "throttled": (SPOILED["throttled"], StorageUnavailable),
    "a lost answer": (SPOILED["a lost answer"], StorageUnavailable),
    "wrong bytes": (SPOILED["wrong bytes"], CorruptFile),
    "expired credentials": (
        Action(answer=error(403, "ExpiredToken", "The provided token has expired.")),
        StorageMisconfigured,
    ),
    "access denied": (Action(answer=error(403, "AccessDenied")), StorageMisconfigured),
    "no such object": (Action(answer=error(404, "NoSuchKey")), CorruptFile),
}


@pytest.mark.parametrize(("action", "kind"), LASTING.values(), ids=LASTING.keys())
def test_an_outage_from_the_middle_of_a_lookup_is_a_typed_error(
    wire: Wire, action: Action, kind: type[Exception]
) -> None:
    """The first responses arrive, then none. The lookup raises an error and never returns a short list. Afterwards, the
    answer is right.
    """
    made = wire.made[10]
    for good in (0, 11):
        with wire.reader(10, query_threads=2, block_cache_bytes=0) as reader:
            ok = iter(range(good))

            def fault(request: Request, ok: Iterator[int] = ok) -> Action | None:
                return action if request.ranged and next(ok, None) is None else None

            wire.proxy.fault = fault
            with pytest.raises(kind):
                reader.query("t", "all")
            wire.proxy.fault = lambda request: action if request.ranged else None
            partly = reader.query("t", "all", allow_partial=True)
            assert (partly.status, len(partly), len(partly.failed)) == ("partial", 0, 10)
            assert all(report.error for report in partly.failed)
            wire.proxy.reset()
            right(made, reader.query("t", "all"))
            right(made, reader.query_many([Lookup(topic="t", key="all")])[0])


def test_throttling_beyond_the_timeout_is_a_spent_budget(wire: Wire) -> None:
    """Attempts take no time here, so a delayed response uses up the time."""
    with wire.reader(10, query_threads=1) as reader:
        reader.query("t", "all", max_count=1)
        made = wire.made[10]
        released = threading.Event()
        try:
            # a busy machine may use up a short time before the first response
            for timeout_s in (0.4, 4.0, 40.0):
                ok = iter(range(3))
                wire.proxy.fault = lambda request, ok=ok: (
                    Action(hold=lambda: released.wait(60)) if next(ok, None) is None else None
                )
                with pytest.raises(BudgetExceeded, match="timeout_s") as caught:
                    reader.query("t", "all", timeout_s=timeout_s)
                result: Any = caught.value.result
                if len(result):
                    break
            assert not released.is_set()
        finally:
            released.set()
        assert result.status == "partial" and 1 <= len(result) < 10
        assert [Answer.of(item) for item in result] == made.expected("t", "all")[: len(result)]
        wire.proxy.reset()
        right(made, reader.query("t", "all"))


@pytest.mark.parametrize("spoiled", [None, "throttled", "a body that ends early"])
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
