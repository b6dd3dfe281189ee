"""`ingest STORE_DIR --follow` and a broker as processes of a test, and a bounded wait for their progress."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from tests.integration.cli.command_lines import SCRIPT, clean_environment

SMALL = ("--slots", "200", "--items", "4000")
QUICK = {"TIERED_INDEX_FLUSH_INTERVAL_S": "0.05", "TIERED_INDEX_LIFECYCLE_INTERVAL_S": "0.05"}
LIMIT_S = 120


def wait_until(condition, what):
    """Poll until `condition` is true, up to a limit."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


class Follower:
    """The command in a process, with its lines as they arrive."""

    def __init__(self, store, root, *more):
        places = ("--root", root, "--storage", f"file://{root.parent / 'objects'}")
        line = [SCRIPT, "ingest", store, *["--follow", "--json", "--quiet", "--poll", "0.05"], *places]
        self.process = subprocess.Popen(
            [*map(str, line), *SMALL, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(**QUICK),
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    @property
    def position(self):
        return self.lines[-1]["position"] if self.lines else -1

    def goes_on(self, what):
        before = max(0, self.position)
        wait_until(lambda: self.position > before, f"{what}: the follower continues at {before}")

    def end(self, number):
        self.process.send_signal(number)
        self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        assert self.process.stderr is not None
        errors = self.process.stderr.read()
        self.close()
        return self.process.returncode, errors

    def close(self):
        close(self.process)


def close(process):
    """End a process if it still runs, and close its pipes."""
    process.kill()
    process.wait(LIMIT_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


@contextlib.contextmanager
def starting():
    """Start followers and brokers that end with the block."""
    with contextlib.ExitStack() as stack:

        def follower(*arguments):
            made = Follower(*arguments)
            stack.callback(made.close)
            return made

        def broker(store, messages):
            # by name, from the repository: a path would not find `tests`, which is not installed
            line = [sys.executable, "-m", "tests.integration.cli.broker_process", str(store), str(messages), "65536"]
            process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
            stack.callback(close, process)
            return process

        yield SimpleNamespace(follower=follower, broker=broker)
