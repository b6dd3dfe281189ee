"""Rounds of a background thread: no error ends them, and rounds that fail are ever further apart."""

import asyncio
import time

from tests.support.hanging import until
from tiered_index.service.life.rounds import Rounds


def test_a_round_that_ends_with_any_error_is_reported_and_the_next_ones_run():
    begun_s = []

    def work():
        begun_s.append(time.monotonic())
        raise asyncio.CancelledError

    worker = Rounds("test", work, 0.01)
    worker.start()
    until(lambda: len(begun_s) > 6)
    worker.stop()
    assert isinstance(worker.error, asyncio.CancelledError) and worker.failed_rounds == len(begun_s)
    # pauses double: the last one is of 0.32 s at least
    assert begun_s[6] - begun_s[5] >= 0.3
