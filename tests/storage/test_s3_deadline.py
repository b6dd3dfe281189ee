"""One deadline for all work of an `S3Storage` for one caller: attempts, waits and redirects."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.storage.conftest import WAYS
from tests.storage.scripted_server import Answer, Request, ScriptedServer, error, part
from tiered_index.base.call import deadline_at
from tiered_index.errors import BudgetExceeded, ObjectNotFound, StorageUnavailable
from tiered_index.storage.base import PART_BYTES
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage

DATA = bytes(range(256)) * 4
LEFT_S = 100.0
SLOW_DOWN = error(503, "SlowDown", "please")


class Waits:
    """Replaces `time.sleep` and `time.monotonic`: a wait moves the clock, and takes no time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waited: list[float] = []
        self.late_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now_s += seconds + self.late_s

    def deadline_in(self, seconds: float) -> float:
        return self.now_s + seconds

    @contextmanager
    def exceeded(self, seconds: float, said: str) -> Iterator[None]:
        """Set a deadline that the block's work exceeds."""
        with deadline_at(self.deadline_in(seconds)), pytest.raises(BudgetExceeded, match=said):
            yield


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    monkeypatch.setattr("tiered_index.base.call.time", SimpleNamespace(monotonic=lambda: waits.now_s))
    return waits


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def s3(request: pytest.FixtureRequest, scripted: ScriptedServer, waits: Waits) -> Iterator[S3Storage]:
    options = S3Options(endpoint_url=scripted.endpoint_url, max_attempts=8, backoff_s=0.5, client=request.param)
    storage = S3Storage("bucket", "", options, sleep=waits.sleep, uniform=lambda low, high: high)
    yield storage
    storage.close()


READS: tuple[Callable[[S3Storage], object], ...] = (
    lambda s3: s3.get("object"),
    lambda s3: s3.get_range("object", 0, 10),
    lambda s3: s3.get_suffix("object", 10),
    lambda s3: s3.head("object"),
    lambda s3: list(s3.list()),
)
WRITES: tuple[Callable[[S3Storage], object], ...] = (
    lambda s3: s3.put("object", b"x"),
    lambda s3: s3.put_if_absent("object", b"x"),
    lambda s3: s3.delete_many(["object"]),
    lambda s3: s3.open_writer("object").write(bytes(PART_BYTES + 1)),
)


def test_past_the_deadline_nothing_is_sent(s3, scripted, waits):
    for call in (*READS, *WRITES):
        with waits.exceeded(0, r"timeout_s was reached while .*s3://bucket"):
            call(s3)
    assert scripted.requests == []


@pytest.mark.parametrize("calls", [READS, WRITES], ids=["reads", "writes"])
def test_repeats_end_before_a_wait_that_would_pass_the_deadline(s3, scripted, waits, calls):
    scripted.answers(error(500, "InternalError", "not today"))
    for call in calls:
        scripted.requests.clear()
        waits.waited.clear()
        with deadline_at(waits.deadline_in(4)), pytest.raises(BudgetExceeded, match=r"timeout_s .*: 500") as caught:
            call(s3)
        assert waits.waited == [1, 2]  # the next wait would be 4 s, and 1 is left
        assert len(scripted.requests) == 3
        if scripted.requests[0].method != "HEAD":
            assert "InternalError not today" in str(caught.value)


def test_repeats_of_bodies_and_of_requests_share_the_deadline(s3, scripted, waits):
    cut = Answer(206, DATA[:5], {"Content-Range": "bytes 0-9/1024"}, announced=10)
    scripted.answers(cut, SLOW_DOWN, cut)  # waits: 1 s, 2 s, and the next would be 4 s
    with waits.exceeded(4, r"timeout_s .*bytes 0-9 of 'object'.*(broke off|a body of 5 bytes)"):
        s3.get_range("object", 0, 10)
    assert len(scripted.requests) == 3
    assert waits.waited == [1, 2]
    scripted.answers(cut, part(DATA, 0, 10))
    with deadline_at(waits.deadline_in(9)):
        assert s3.get_range("object", 0, 10) == DATA[:10]
    scripted.answers(error(404, "NoSuchKey"))  # an error without a retry is raised unchanged, even at the deadline
    with deadline_at(waits.deadline_in(0.001)), pytest.raises(ObjectNotFound):
        s3.get("object")


def test_an_attempt_that_a_wait_left_no_time_for_is_not_sent(s3, scripted, waits):
    """A wait takes longer than requested, and the check before the attempt finds that the deadline has passed."""

    scripted.answers(SLOW_DOWN)
    waits.late_s = LEFT_S
    with waits.exceeded(LEFT_S, r"timeout_s was reached while reading .*'object'"):
        s3.get_range("object", 0, 10)
    assert len(scripted.requests) == 1


def test_a_redirect_is_not_followed_past_the_deadline(s3, scripted, waits):
    """The clients follow it within the attempt."""
    elsewhere = error(400, "AuthorizationHeaderMalformed")
    elsewhere.body = elsewhere.body.replace(b"</Error>", b"<Region>eu-west-3</Region></Error>")
    elsewhere.headers["x-amz-bucket-region"] = "eu-west-3"

    def script(request: Request) -> Answer:
        waits.now_s += LEFT_S
        return elsewhere

    scripted.script = script
    with waits.exceeded(LEFT_S, r"reading .*'object'.*while sending (GetObject|HeadBucket)"):
        s3.get_range("object", 0, 10)
    assert len(scripted.requests) == 1


def test_without_a_deadline_every_attempt_is_made_and_no_wait_is_long(s3, scripted, waits):
    scripted.answers(SLOW_DOWN)
    with pytest.raises(StorageUnavailable, match="SlowDown"):
        s3.get("object")
    assert len(scripted.requests) == 8
    assert waits.waited == [1, 2, 4, 5, 5, 5, 5]
