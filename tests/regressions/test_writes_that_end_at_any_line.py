"""An exception other than `OSError` left a file half written and in use, such as one of a signal's handler or of
missing memory. The next flush wrote a batch that did not follow the previous one, and the file was permanently
unreadable.
"""

from __future__ import annotations

import sys

import pytest

from tests.regressions.conftest import offsets
from tests.support.disk_faults import FaultDisk
from tiered_index.service.read import unsealed
from tiered_index.service.write import appenders
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000
WRITING = {appenders.__file__, unsealed.__file__}


class Interrupt(BaseException):
    """The exception that a signal's handler raises."""


def at_line(nth, act):
    """Call `act`, and raise at the nth executed line of the writing modules; return whether it got that far."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if frame.f_code.co_filename not in WRITING:
            return None
        if event == "line":
            seen += 1
            if seen == nth:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def put(service, *numbers):
    for number in numbers:
        # every third one has another time, for the quarantine lane
        begin_ms = 5_000 if number % 3 == 0 else NOW_MS
        service.put("t", 0, "k", number, 1, begin_ms + number * 1000, source="s", source_position=number)


def flush(service):
    service._flusher.run_once()  # in this thread, which has the trace


def roll(service):
    service._flusher.roll()


@pytest.mark.parametrize("step", [31, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", [flush, roll])
@pytest.mark.parametrize("items", [64, 4], ids=["room", "full"])
def test_an_exception_at_any_line_of_a_write_loses_nothing(open_index, call, items, step):
    for nth in range(1 + items % step, 2000, step):
        disk, root = FaultDisk(), f"root-{call.__name__}-{items}-{nth}"
        settings = {"disk": disk, "items": items, "storage_backend": MemoryStorage()}
        service = open_index(root, **settings)
        put(service, 1, 2, 3)
        flush(service)
        if call is flush:
            put(service, 4, 5, 6)
        if not at_line(nth, lambda: call(service)):  # noqa: B023 - called at once
            break
        put(service, 7, 8, 9)
        flush(service)
        wanted = [1, 2, 3, *([4, 5, 6] if call is flush else []), 7, 8, 9]
        assert offsets(service) == wanted
        assert service.durable_position("s") == 9
        service.seal()
        service.run_lifecycle()
        assert offsets(service) == wanted
        service.abandon()
        disk.revive()
        disk.lose_unsynced()
        service = open_index(root, **settings)
        assert offsets(service) == wanted
        assert service.durable_position("s") == 9
        service.abandon()
    assert step < nth < 1900
