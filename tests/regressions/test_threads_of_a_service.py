"""An error must not end a background thread. A service that was dropped leaves no thread, and loses no entry."""

from __future__ import annotations

import asyncio
import gc
import queue
import subprocess
import sys
import threading

import pytest

from tests.support.disk_faults import FaultDisk
from tiered_index import IndexService
from tiered_index.errors import StorageUnavailable
from tiered_index.service.life.rounds import Rounds

NOW_MS = 1_700_000_000_000


def open_service(folder, **settings):
    given = {"storage": f"file://{folder}/storage", "slots": 7, "items": 12, "query_threads": 2, **settings}
    return IndexService.open(root=folder / "root", disk=FaultDisk(), **given)


def test_a_round_that_ends_with_any_error_is_reported_and_the_next_ones_run():
    rounds, met = [], threading.Event()

    def work():
        rounds.append(1)
        if len(rounds) == 3:
            met.set()
        raise asyncio.CancelledError

    worker = Rounds("test", work, 1e-4)
    worker.start()
    assert met.wait(30)
    worker.stop()
    assert isinstance(worker.error, asyncio.CancelledError) and worker.failed_rounds == len(rounds)


def test_rounds_that_fail_are_ever_further_apart():
    pauses = []

    class Woken(queue.SimpleQueue):
        def get(self, timeout):
            pauses.append(timeout)
            if len(pauses) > 8:
                worker._is_stopping = True
            raise queue.Empty

    def failing():
        raise StorageUnavailable("away")

    worker = Rounds("test", failing, 60.0, longest_pause_s=3600.0)
    worker._wake = Woken()
    worker._run()
    assert pauses == [60.0 * 2**n for n in range(6)] + [3600.0] * 3


@pytest.mark.parametrize("background", [True, False])
def test_a_service_that_is_forgotten_is_closed_with_a_warning(tmp_path, background):
    before = threading.active_count()
    service = open_service(tmp_path, background=background)
    service.run_lifecycle()
    service.put("t", 0, "k", 1, 1, NOW_MS)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("tiered-index-")]
    with pytest.warns(ResourceWarning, match="unclosed index"):
        del service
        gc.collect()
    with open_service(tmp_path, background=False) as again:
        assert len(again.query("t", "k")) == 1
    for thread in threads:
        thread.join(30)
    assert threading.active_count() <= before


PROGRAM = """
import os, sys
from tiered_index import IndexService

def held():
    place = sys.argv[1]
    options = {"root": place + "/root", "storage": "file://" + place + "/storage", "flush_interval_s": 3600}
    with IndexService.open(**options) as service:
        service.put("t", 0, "k", 1, 1, 1_700_000_000_000)
        yield service

kept = held()
next(kept)
if sys.argv[2] == "forked" and os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize("way", ["whole", "forked"])
def test_an_open_index_is_flushed_when_the_interpreter_ends(tmp_path, way):
    """The process that opened it flushes it; a forked child does not touch it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), way], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "" or way == "forked"
    with open_service(tmp_path, background=False, slots=None, items=None) as again:
        assert len(again.query("t", "k")) == (1 if way == "whole" else 0)
