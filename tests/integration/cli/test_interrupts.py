"""An interrupt ends a command with exit code 130 and one line, at any place of Python's work."""

import subprocess
import sys

import pytest

from tests.integration.cli.conftest import write_source

# In finalizers, and while it ends, Python can't raise an error. It prints "Exception ignored in" and continues.
_PROGRAM = """
import atexit, os, signal, threading, time
from tiered_index.cli.keep import merge as module
from tiered_index.cli.__main__ import run
def interrupt(number=signal.SIGINT):
    signal.raise_signal(number)
class Garbage:
    def __del__(self):
        interrupt()
def wait_for(act):
    def plan(*_):
        act()
        for _ in range(200):
            time.sleep(0.05)
        raise SystemExit("it went on")
    module.plan = plan
{set_up}
run()
"""
_AS_THE_FIRST_OF_A_CONTAINER = "os.getpid = lambda: 1\nwait_for(lambda: interrupt(signal.SIGTERM))"


@pytest.mark.parametrize(
    "set_up",
    [
        "wait_for(Garbage)",
        _AS_THE_FIRST_OF_A_CONTAINER,
        "atexit.register(interrupt)",
        pytest.param("threading._register_atexit(interrupt)", marks=pytest.mark.long),
    ],
)
def test_an_interrupt_ends_the_command(run_here, tmp_path, set_up):
    source, uri = write_source(tmp_path / "one.ndjson", 0, 1), f"file://{tmp_path}/store"
    made = run_here("ingest", source, "--root", tmp_path / "root", "--storage", uri, "--slots", 16, "--wait")
    assert made.code == 0, made.err
    command = [sys.executable, "-c", _PROGRAM.format(set_up=set_up), "merge", "--storage", uri]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr
