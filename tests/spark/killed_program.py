"""Publishes builds and runs merges in processes that die at a chosen call of the storage, or that race each other.

The program reads one JSON document per line, and prints one line for each. Each job runs in a fork of this process,
which has no threads and has imported everything.

- `{"job": "publish", "uri": ..., "build": FILE, "mode": ...}` or `{"job": "merge", "uri": ...}`, each with "nth" and
  "when". The response is `{"killed": ...}`. If nth is 0, the job is not killed, and the response also has "calls".
- `{"job": "race", "uri": ..., "builds": [FILE, ...], "mode": ...}`. The response is `{"outcomes": [...]}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tiered_index.clock import SystemClock
from tiered_index.errors import InvalidArgument, StorageError
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.log.log import StorageLog
from tiered_index.spark.writing.build import publish_tables
from tiered_index.storage.base import Call, Storage, WrapperStorage
from tiered_index.storage.opening import open_storage

__all__ = ["REFUSED", "WRITES"]

REFUSED = 3
WRITES = ("put", "put_if_absent", "write", "delete", "delete_many")
_T = TypeVar("_T")


class Killing(WrapperStorage):
    """A storage whose call number `nth` (from 1) kills the process, before or after the call acts."""

    def __init__(self, inner: Storage, nth: int, when: str) -> None:
        super().__init__(inner)
        self._nth, self._when = nth, when
        self.calls: list[str] = []

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        self.calls.append(call.operation)
        if len(self.calls) != self._nth:
            return act()
        if self._when == "after":
            with contextlib.suppress(StorageError):
                act()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")


def _publish(storage: Storage, build: str, mode: str) -> None:
    shards = pickle.loads(Path(build).read_bytes())
    publish_tables(shards, mode, storage, StorageLog(storage, SystemClock()))


def _merge(storage: Storage) -> None:
    log = StorageLog(storage, SystemClock())
    log.open()
    merge(storage, log, SystemClock(), MergeOptions(min_age_s=0, shard_bytes=1 << 20), threads=1)


def _job(task: dict[str, Any]) -> list[str]:
    with open_storage(task["uri"]) as opened:
        storage = Killing(opened, task["nth"], task["when"])
        if task["job"] == "publish":
            _publish(storage, task["build"], task["mode"])
        else:
            _merge(storage)
    return storage.calls


def _forked(act: Callable[[], Any], answer: Path) -> int:
    """Run `act` in a fork; return its process id. The file `answer` gets the result of `act`."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        answer.write_text(json.dumps(act()))
        code = 0
    except InvalidArgument as error:
        answer.write_text(json.dumps(str(error)))
        code = REFUSED
    except BaseException as error:  # noqa: BLE001 - its line reports it
        sys.stderr.write(f"{error!r}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(task: dict[str, Any], answer: Path) -> dict[str, Any]:
    status = os.waitpid(_forked(lambda: _job(task), answer), 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"{task}: status {status}")
    return {"killed": killed} if killed else {"killed": False, "calls": json.loads(answer.read_text())}


def _race(task: dict[str, Any], answer: Path) -> dict[str, Any]:
    """Publish builds at the same time, each in its own process; return their exit codes."""
    ready, start = os.pipe(), os.pipe()

    def one(build: str) -> None:
        os.close(start[1])
        with open_storage(task["uri"]) as storage:
            StorageLog(storage, SystemClock()).open()
            os.write(ready[1], b".")
            os.read(start[0], 1)  # the read ends when the parent closes the other end
            _publish(storage, build, task["mode"])

    pids = [
        _forked(lambda build=build: one(build), answer.with_suffix(f".{n}")) for n, build in enumerate(task["builds"])
    ]  # type: ignore[misc]
    for _ in pids:
        os.read(ready[0], 1)
    os.close(start[1])
    outcomes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    for end in (*ready, start[0]):
        os.close(end)
    return {"outcomes": outcomes}


if __name__ == "__main__":
    answer = Path(sys.argv[1])
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps((_race if task["job"] == "race" else _run)(task, answer)), flush=True)
