"""Storages of a process that forks. Races of processes are in tests/fencing."""

import contextlib
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.scripted_server import Answer, ScriptedServer
from tests.storage.sqlite_probes import check_sound, output
from tests.storage.test_s3_writer import BEGUN, DONE
from tests.support.processes import started
from tiered_index.errors import IndexClosed
from tiered_index.storage.opening import open_storage


def child(script: str, *arguments: object) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return started([sys.executable, "-c", script, *map(str, arguments)])


FORKER = """
import os, sys, threading, time
from pathlib import Path
from tests.storage.sqlite_probes import HookedClock
from tiered_index.storage.sqlite import SqliteStorage

def hold(_):
    if threading.current_thread() is not threading.main_thread():
        entered.set()
        time.sleep(0.2)
        ended.append(True)

path, entered, ended = Path(sys.argv[1]), threading.Event(), []
storage = SqliteStorage(path, clock=HookedClock(hold))
storage.put("before", b"x")
# a connection in use: SQLite would take its locks for those of the child, so the fork waits for the transaction
holder = threading.Thread(target=lambda: storage.put("held", b"y"))
holder.start()
entered.wait(30)
child = os.fork()
if child == 0:
    with SqliteStorage(path) as own:
        own.put("after", own.get("before"))
        storage.put("after", b"x" * storage.head("before").size_bytes)
    os._exit(7 if ended else 8)
status = os.waitpid(child, 0)[1]
holder.join()
assert os.waitstatus_to_exitcode(status) == 7, status
assert storage.get("before") == storage.get("after") == b"x"
storage.close()
print("well")
"""


def test_a_child_opens_a_storage_of_its_own(tmp_path: Path) -> None:
    with child(FORKER, tmp_path / "objects.db") as process:
        assert output(process) == "well\n"
    check_sound(tmp_path / "objects.db")


HANDLER = """
import os, signal, sys
from pathlib import Path
from tests.storage.sqlite_probes import HookedClock
from tiered_index.storage.sqlite import SqliteStorage

statuses = []

def fork(*_):
    child = os.fork()
    if child == 0:
        with SqliteStorage(path) as own:
            own.put(f"child-{len(statuses)}", own.get("before"))
        os._exit(7)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

def ring(nth):
    if nth == 2:
        signal.raise_signal(signal.SIGUSR1)

signal.signal(signal.SIGUSR1, fork)
signal.alarm(50)
path = Path(sys.argv[1])
with SqliteStorage(path, clock=HookedClock(ring)) as storage:
    storage.put("before", b"x")
    storage.put("object", b"y" * 3_000_000)
    assert statuses == [7]
    listed = {info.name: info.size_bytes for info in storage.list()}
    assert listed.pop("object") == 3_000_000 and set(listed.values()) == {1}
print("well")
"""


def test_a_signal_handler_may_fork_in_a_transaction(tmp_path: Path) -> None:
    with child(HANDLER, tmp_path / "objects.db") as process:
        assert output(process) == "well\n"
    check_sound(tmp_path / "objects.db")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("scheme", ["file", "sqlite", "s3"])
def test_a_forked_child_leaves_the_writers_of_its_parent_alone(
    tmp_path: Path, scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """As garbage, or when an exception leaves a block of the child, it would drop what the parent sent."""
    answers = iter([Answer(200, BEGUN), *[Answer(200, headers={"ETag": "x"})] * 3, Answer(200, DONE)])
    scripted.script = lambda request: next(answers)
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    place = f"s3://bucket?endpoint_url={scripted.endpoint_url}" if scheme == "s3" else f"{scheme}://{tmp_path}/objects"
    data = bytes(range(256)) * 4096 * 18
    with open_storage(place) as storage, storage.open_writer("large") as writer, storage.open_writer("other") as other:
        writer.write(data)
        child = os.fork()
        if not child:
            with contextlib.suppress(IndexClosed), writer:
                writer.write(b"x")
            with contextlib.suppress(IndexClosed):
                other.close()
            other.abort()
            writer.abort()
            del writer
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writer.close()
        if scheme == "s3":
            assert [request.method for request in scripted.requests] == ["POST", "PUT", "PUT", "PUT", "POST"]
        else:
            assert storage.get("large") == data
        other.abort()
