"""A context can have a deadline. Retries keep to it."""

import contextlib
import contextvars
import functools
import gc
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError

from tiered_index.errors import BudgetExceeded, StorageError
from tiered_index.storage.context import check_deadline, deadline_at, remaining_s
from tiered_index.storage.retry import PassingFault, RetryLoop
from tiered_index.storage.s3.boto import REQUEST_ERRORS, translate

FAR_S = 3600.0


def test_without_a_deadline_nothing_is_checked() -> None:
    assert remaining_s() is None
    check_deadline("reading")
    with deadline_at(None):
        assert remaining_s() is None
        check_deadline("reading")


def test_a_reached_deadline_names_the_call_that_did_not_begin() -> None:
    with deadline_at(time.monotonic() + FAR_S):
        left = remaining_s()
        assert left is not None
        assert 0 < left <= FAR_S
        check_deadline("reading 'object'")
    with deadline_at(time.monotonic() - 1), pytest.raises(BudgetExceeded, match=r"timeout_s .*'object'"):
        check_deadline("reading 'object'")
    assert remaining_s() is None


def test_of_nested_deadlines_the_nearest_holds() -> None:
    past, far = time.monotonic() - 1, time.monotonic() + FAR_S
    for outer, inner in ((past, far), (far, past), (past, None)):
        with deadline_at(outer), deadline_at(inner), pytest.raises(BudgetExceeded):
            check_deadline("reading")
    with deadline_at(far):
        with deadline_at(past):
            pass
        check_deadline("reading")


def test_it_travels_with_a_copy_of_the_context_only() -> None:
    with ThreadPoolExecutor(1) as pool, deadline_at(time.monotonic() + FAR_S):
        assert pool.submit(contextvars.copy_context().run, remaining_s).result() is not None
        assert pool.submit(remaining_s).result() is None


def client_error(status: int) -> ClientError:
    return ClientError({"Error": {"Code": "Denied"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


class Body:
    """The argument of an attempt."""


@pytest.mark.parametrize(
    "make", [lambda: PassingFault("gone"), lambda: ConnectionClosedError(endpoint_url="s"), lambda: client_error(403)]
)
@pytest.mark.parametrize("failures", [1, 9])
def test_an_attempt_releases_its_argument_at_once(failures: int, make: Callable[[], Exception]) -> None:
    """Errors, their traces and the loop's frame keep no references to each other.

    Otherwise they would keep a file's mapping until the next garbage collection.
    """
    loop = RetryLoop("s3://bucket", 3, 0.0, sleep=lambda _: None, errors=REQUEST_ERRORS, translate=translate)
    left = [failures]

    def send(body: Body) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise make()

    gc.collect()
    gc.disable()
    try:
        body = Body()
        known = weakref.ref(body)
        with contextlib.suppress(StorageError):
            loop.run("writing", "", functools.partial(send, body))
        del body
        assert known() is None
    finally:
        gc.enable()
