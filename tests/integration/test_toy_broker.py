"""docs/examples/broker.py: its acknowledged messages are found after SIGKILL, after SIGTERM, and while it runs."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.command_lines import clean_environment

PROGRAM = Path(__file__).parents[2] / "docs" / "examples" / "broker.py"


class Client:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self._reply() == "ready"

    def put(self, key: str, body: str) -> int:
        return int(self._ask(f"put orders {key} {body}"))

    def find(self, key: str) -> list[str]:
        return json.loads(self._ask(f"find orders {key}"))

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._reply()

    def _reply(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def broker(folder: Path) -> Iterator[Client]:
    environment, pipe = clean_environment(TIERED_INDEX_ROOT="/nowhere"), subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder)], stdin=pipe, stdout=pipe, text=True, env=environment
    ) as process:
        try:
            yield Client(process)
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_acknowledged_messages_are_found_again(tmp_path, number):
    bodies: dict[str, list[str]] = {}
    large = "x" * (3 << 20)
    for life in range(2):
        with broker(tmp_path) as client:
            for key, expected in bodies.items():
                assert client.find(key) == expected
            for n in range(60):
                key, body = f"order-{n % 7}", f"life {life} number {n}"
                client.put(key, body)
                bodies.setdefault(key, []).insert(0, body)
            assert client.find("order-3") == bodies["order-3"]
            # a large message holds nothing up
            client.put("large", large)
            bodies.setdefault("large", []).insert(0, large)
            client.put("small", "behind")
            bodies.setdefault("small", []).insert(0, "behind")
            client.process.send_signal(number)
            assert client.process.wait(30) == (0 if number == signal.SIGTERM else -number)
        with (tmp_path / "log").open("ab") as log:
            # half a line, as a crash leaves it
            log.write(b'{"topic": "or')
    with broker(tmp_path) as client:
        assert {key: client.find(key) for key in bodies} == bodies
        assert client.find("order-9") == []
