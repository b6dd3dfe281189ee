"""One of two Spark applications that build the same windows at once; run as a program by test_two_builds_at_once.py.

    racing_driver.py MASTER FOLDER ME OTHER SOURCE ROUND...

A round is NAME:MODE:NUMBER,...: the command builds from SOURCE into the storage FOLDER/NAME. Before it puts one of the
log records of these numbers, it waits until the other program is about to put a record of the same number. How the
command ends is one JSON line a round.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tiered_index.cli.main import run
from tiered_index.format.names import log_name
from tiered_index.spark import build
from tiered_index.spark.executors import StorageAddress
from tiered_index.storage.base import Call, Storage, WrapperStorage

__all__: list[str] = []

_LONGEST_S = 600.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class Meeting:
    """Where two programs meet, and at which log records."""

    folder: Path
    me: str
    other: str
    numbers: tuple[int, ...]

    def at(self, name: str) -> None:
        """Wait for the other one, where `name` is a record to meet at."""
        for number in self.numbers:
            if name == log_name(number):
                (self.folder / f"{number}-{self.me}").touch()
                end = time.monotonic() + _LONGEST_S
                while not (self.folder / f"{number}-{self.other}").exists():
                    if time.monotonic() > end:
                        raise TimeoutError(f"the other one doesn't come to record {number}")
                    time.sleep(0.005)


class Met(WrapperStorage):
    """The driver's storage."""

    def __init__(self, inner: Storage, meeting: Meeting) -> None:
        super().__init__(inner)
        self._meeting = meeting

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        if call.operation == "put_if_absent":
            self._meeting.at(call.name)
        return act()


@dataclass(frozen=True)
class Address:
    """Opens a storage in the driver, where it meets the other one, and in tasks."""

    address: StorageAddress
    meeting: Meeting
    driver: int
    request_stats: Any = None

    def open(self) -> Storage:
        """Return the storage."""
        inner = replace(self.address, request_stats=self.request_stats).open()
        return Met(inner, self.meeting) if os.getpid() == self.driver else inner


def main(master: str, folder: Path, me: str, other: str, source: str, rounds: list[str]) -> None:
    """Run the program."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    module: Any = sys.modules[build.__module__]
    for name, mode, numbers in (one.split(":") for one in rounds):
        place = folder / f"{name}-met"
        place.mkdir(exist_ok=True)
        meeting = Meeting(place, me, other, tuple(map(int, numbers.split(","))))

        def address(uri: str, options: Any, meeting: Meeting = meeting) -> Address:
            return Address(StorageAddress(uri, options), meeting, os.getpid())

        module.StorageAddress = address
        arguments = [
            "spark",
            "build",
            "--source",
            source,
            "--storage",
            f"file://{folder}/{name}",
            "--shards",
            "2",
            "--mode",
            mode,
        ]
        settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.sql.shuffle.partitions": "2"}
        conf = [text for setting in settings.items() for text in ("--conf", "=".join(setting))]
        out, error = io.StringIO(), io.StringIO()
        code: Any = None
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            try:
                run([*arguments, "--set", "slots=64", "--master", master, *conf, "--json", "--quiet"])
            except SystemExit as ended:
                code = ended.code
        print(
            json.dumps({"name": name, "code": code, "said": json.loads((out if code == 0 else error).getvalue())}),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5], sys.argv[6:])
