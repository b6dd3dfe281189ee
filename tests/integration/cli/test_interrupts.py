"""An interrupt ends a command with exit code 130 and one line, at any place of Python's work."""

import subprocess
import sys

import pytest

from tests.integration.cli.conftest import write_source

# In finalizers, and while it ends, Python can't raise an error. It prints "Exception ignored in" and continues.
_FINALIZER = """
import signal, time
from tiered_index.cli import merge as module
from tiered_index.cli.__main__ import run
class Garbage:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
def plan(*_):
    Garbage()
    for _ in range(200):
        time.sleep(0.05)
    raise SystemExit("it went on")
module.plan = plan
run()
"""
_FIRST = """
import os, signal, time
os.getpid = lambda: 1
from tiered_index.cli import merge as module
from tiered_index.cli.__main__ import run
def plan(*_):
    signal.raise_signal(signal.SIGTERM)
    for _ in range(200):
        time.sleep(0.05)
    raise SystemExit("it went on")
module.plan = plan
run()
"""
_END = """
import atexit, signal, threading
from tiered_index.cli.__main__ import run
def late():
    signal.raise_signal(signal.SIGINT)
{register}
run()
"""


@pytest.fixture
def index(run_here, tmp_path):
    source, uri = write_source(tmp_path / "one.ndjson", 0, 1), f"file://{tmp_path}/store"
    done = run_here("ingest", source, "--root", tmp_path / "root", "--storage", uri, "--slots", 16, "--wait")
    assert done.code == 0, done.err
    return uri


def run_script(script, uri):
    command = [sys.executable, "-c", script, "merge", "--storage", uri]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_an_interrupt_that_python_can_not_raise_ends_the_command(index):
    done = run_script(_FINALIZER, index)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


@pytest.mark.parametrize(
    "register", ["atexit.register(late)", pytest.param("threading._register_atexit(late)", marks=pytest.mark.long)]
)
def test_an_interrupt_while_the_process_ends_gives_the_exit_code(index, register):
    done = run_script(_END.format(register=register), index)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


def test_sigterm_ends_the_first_process_of_a_container(index):
    done = run_script(_FIRST, index)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "interrupted")
