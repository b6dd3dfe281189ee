"""`ingest --follow` under a supervisor, which starts it again if it ends with exit code 3."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.hanging import until

FOLDER = Path(__file__).parents[2]
# a client counts as stuck sooner than in use
PROGRAM = """
import os
from tiered_index.connectors.kafka.client import calls

calls.LATE_S, calls.TOLD_S, calls.ENDED_S = 1.0, 1.5, float(os.environ["ENDED_S"])
from tiered_index.cli.__main__ import run
run()
"""


class Supervised:
    """A command on topics of Kafka. `position` is that of its last line, `problems` has those of all its lines."""

    def __init__(self, *arguments: object, ended_s: float = 10.0) -> None:
        self._command = [sys.executable, "-c", PROGRAM, "ingest", *map(str, arguments), "--follow", "--json"]
        self._environment = os.environ | {"ENDED_S": str(ended_s)}
        self.position, self.problems, self.codes, self.errors = 0, set[str](), list[int](), list[str]()
        self._is_ending = False
        self._process = self._start()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def end(self) -> int:
        """End the command by SIGTERM, and return its exit code."""
        self._is_ending = True
        self._process.send_signal(signal.SIGTERM)
        until(lambda: not self._reading.is_alive())
        return self.codes[-1]

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self._command, cwd=FOLDER, env=self._environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )

    def _read(self) -> None:
        while True:
            process = self._process
            assert process.stdout is not None
            with process.stdout as lines:
                for text in lines:
                    self._take(text)
            self.codes.append(process.wait())
            if self.codes[-1] != 3 or self._is_ending:
                return
            self._process = self._start()

    def _take(self, text: str) -> None:
        line: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            line = json.loads(text)
        if "position" not in line:
            self.errors.append(text)
            return
        self.position = line["position"]
        self.problems.update(line.get("problems", ()))


@contextlib.contextmanager
def supervised(*arguments: object, ended_s: float = 10.0) -> Iterator[Supervised]:
    """Yield the command, which is killed at the end of the context."""
    command = Supervised(*arguments, ended_s=ended_s)
    try:
        yield command
    finally:
        command._is_ending = True
        command._process.kill()
        command._reading.join()
