"""Writers that race for the same log numbers, on any storage: every record is stored once, and no number is missing.

In some rounds they wait for each other before each try, so that all but one of them lose the number.

`python -m tests.fencing.races URI NAME` runs one racer.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.support.log_records import publish
from tests.support.processes import started
from tiered_index import IndexService
from tiered_index.base.clock import SystemClock
from tiered_index.errors import ObjectExists
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord, StoredObject
from tiered_index.storage.base import Bytes, Storage, WrapperStorage
from tiered_index.storage.opening import open_storage

EACH = 7
ROUNDS = 5
EPOCH = 1
TIMEOUT_S = 120


def stored(name: str) -> StoredObject:
    return StoredObject(name, name.replace("/", "-"), "main", 1, 0, 0, 1, 1, 0, 0, 0, 0, 0)


class RacingStorage(WrapperStorage):
    """Calls `wait` before each of the first tries for a log number, and counts the lost numbers."""

    def __init__(self, inner: Storage, wait: Callable[[], object]) -> None:
        super().__init__(inner)
        self._wait = wait
        self._rounds = ROUNDS
        self.lost = 0

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """As the inner storage's."""
        if self._rounds:
            self._rounds -= 1
            self._wait()
        try:
            self.inner.put_if_absent(name, data)
        except ObjectExists:
            self.lost += 1
            raise


def append_all(storage: Storage, racer: str, wait: Callable[[], object]) -> int:
    """Append `EACH` records that add one object each, from the log's present end; return the count of lost numbers."""
    racing = RacingStorage(storage, wait)
    log = StorageLog(racing, SystemClock(), checkpoint_every=7)
    log.open()
    for n in range(EACH):
        publish(log, EPOCH, (stored(f"data/{racer}-{n}"),))
    return racing.lost


def begin(uri: str, storage: Storage, root: Path) -> int:
    """Make an index of epoch `EPOCH`; return the number of its last record."""
    IndexService.open(root=root, storage=uri, background=False, slots=7, items=100).close()
    return len(list(storage.list("log/")))


def check(storage: Storage, begun: int, racers: list[str], lost: list[int]) -> None:
    assert sum(lost) >= ROUNDS * (len(racers) - 1)
    names = [info.name for info in storage.list("log/")]
    records = [LogRecord.decode(storage.get(name), name) for name in names]
    assert [record.number for record in records] == list(range(1, begun + len(racers) * EACH + 1))
    added = [each.name for record in records for each in record.add]
    assert sorted(added) == sorted(f"data/{racer}-{n}" for racer in racers for n in range(EACH))
    assert len({record.attempt for record in records}) == len(records)
    for racer in racers:  # the records of each racer are in its own order
        own = [name for name in added if name.startswith(f"data/{racer}-")]
        assert own == [f"data/{racer}-{n}" for n in range(EACH)]
    state = StorageLog(storage, SystemClock()).open()
    assert sorted(state.objects) == sorted(added)


class LogRaceScenarios:
    """The races among the scenarios. Fixtures: `uri`, `storage`."""

    def test_a_race_of_processes_for_numbers(self, uri: str, storage: Storage, tmp_path: Path) -> None:
        begun = begin(uri, storage, tmp_path / "root")
        racers = ["a", "b", "c"]
        with ExitStack() as stack:
            processes = []
            for racer in racers:
                command = [sys.executable, "-m", "tests.fencing.races", uri, racer]
                processes.append(stack.enter_context(started(command)))
            for _ in range(ROUNDS):
                for process in processes:
                    assert process.stdout.readline() == "ready\n"
                for process in processes:
                    process.stdin.write("go\n")
                    process.stdin.flush()
            lost = []
            for process in processes:
                out, err = process.communicate(timeout=TIMEOUT_S)
                assert process.returncode == 0, err
                lost.append(int(out))
        check(storage, begun, racers, lost)


if __name__ == "__main__":
    with open_storage(sys.argv[1]) as _storage:
        print(append_all(_storage, sys.argv[2], lambda: (print("ready", flush=True), sys.stdin.readline())))
