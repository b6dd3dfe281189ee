"""Ctrl-C while Spark starts comes when it has started, and what py4j logs of an interrupt is not shown."""

from __future__ import annotations

import logging
import signal
import threading
from types import SimpleNamespace

import pytest

from tiered_index.cli import spark as sharing
from tiered_index.spark import session


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_an_interrupt_waits_for_the_session(monkeypatch, number):
    class TimeUpError(Exception):
        pass

    def time_is_up(*_):
        raise TimeUpError

    signal.signal(signal.SIGALRM, time_is_up)
    root, before = logging.getLogger(), signal.getsignal(number)
    monkeypatch.setattr(root, "filters", [])
    done = []

    def open_session(*_, **__):
        # to this thread: the test's process has others, which hold nothing back
        signal.pthread_kill(threading.get_ident(), number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as Spark sets a handler of its own
        done.append(True)
        return SimpleNamespace(sparkContext=SimpleNamespace(setLogLevel=lambda _: None))

    monkeypatch.setattr(session, "open_session", open_session)
    with pytest.raises((KeyboardInterrupt, TimeUpError)):
        sharing.spark_of(None, None)
    assert done and signal.getsignal(number) is before
    monkeypatch.setattr(
        session, "open_session", lambda *_, **__: SimpleNamespace(sparkContext=SimpleNamespace(setLogLevel=print))
    )
    sharing.spark_of(None, None)
    record = logging.LogRecord("root", logging.ERROR, "/lib/py4j/java_gateway.py", 1, "KeyboardInterrupt", None, None)
    assert not root.filter(record)
    assert root.filter(logging.LogRecord("root", logging.ERROR, "/other.py", 1, "another", None, None))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
