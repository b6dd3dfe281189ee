"""One folder or database file, several processes: one winner, no half objects, uploads that change hands, forks."""

import contextlib
import gc
import os
from pathlib import Path

import pytest

from tests.storage.children import check_sound, child, output
from tests.storage.scripted_server import Answer, ScriptedServer
from tests.storage.test_s3_writer import BEGUN, DONE
from tiered_index.errors import IndexClosed
from tiered_index.storage.opening import open_storage
from tiered_index.storage.sqlite import SqliteStorage

RACER = """
import sys
from tiered_index.errors import ObjectExists
from tiered_index.storage.opening import open_storage

racer, rounds = sys.argv[2], int(sys.argv[3])
with open_storage(sys.argv[1]) as storage:
    print("ready", flush=True)
    sys.stdin.readline()
    won = []
    for n in range(rounds):
        try:
            storage.put_if_absent(f"log/{n}", (racer * 3000).encode())
        except ObjectExists:
            continue
        won.append(n)
print(*won)
"""


@pytest.fixture(params=["file", "sqlite"])
def url(request, tmp_path: Path):
    yield f"{request.param}://{tmp_path}/objects"
    if request.param == "sqlite":
        check_sound(tmp_path / "objects")


def test_racing_processes_have_one_winner_from_the_first_byte_of_the_storage(url: str) -> None:
    """The race makes the database itself, too."""
    rounds = 60
    with child(RACER, url, "a", rounds) as a, child(RACER, url, "b", rounds) as b, child(RACER, url, "c", rounds) as c:
        racers = {"a": a, "b": b, "c": c}
        for process in racers.values():
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        for process in racers.values():
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        won = {racer: [int(n) for n in output(process).split()] for racer, process in racers.items()}
    assert sorted(n for numbers in won.values() for n in numbers) == list(range(rounds))
    with open_storage(url) as storage:
        for racer, numbers in won.items():
            assert all(storage.get(f"log/{n}") == (racer * 3000).encode() for n in numbers)


WRITER = """
import sys
from pathlib import Path
from tiered_index.storage.sqlite import SqliteStorage

with SqliteStorage(Path(sys.argv[1])) as storage:
    for n in range(int(sys.argv[2])):
        storage.put("object", (b"a" * (20 << 20), b"b" * 300_000, b"")[n % 3])
        print(n, flush=True)
"""


def test_a_reader_beside_a_writer_never_sees_half(tmp_path: Path) -> None:
    path, sizes = tmp_path / "objects.db", {b"a": 20 << 20, b"b": 300_000, b"": 0}
    seen: set[bytes] = set()
    with SqliteStorage(path) as storage:
        storage.put("object", b"")
        with child(WRITER, path, 9) as writer:
            while writer.poll() is None:
                data = storage.get("object")
                assert len(data) == sizes[data[:1]]
                assert data.count(data[:1]) == len(data) + (not data)
                tail, size = storage.get_suffix("object", 10)
                assert tail == tail[:1] * min(10, size)
                assert size == sizes[tail[:1]]
                assert [(info.name, info.size_bytes in sizes.values()) for info in storage.list()] == [("object", True)]
                seen.add(data[:1])
            assert output(writer).split() == [str(n) for n in range(9)]
    assert len(seen) > 1
    check_sound(path)


FORKER = """
import os, sys, threading, time
from pathlib import Path
from tiered_index.errors import ObjectExists
from tiered_index.storage.sqlite import SqliteStorage

def race(storage, who, rounds):
    won = []
    for n in range(rounds):
        try:
            storage.put_if_absent(f"log/{n}", who * 1000)
        except ObjectExists:
            continue
        won.append(n)
    return won

path, rounds = Path(sys.argv[1]), 40
storage = SqliteStorage(path)
storage.put("before", b"x")
receiver, sender = os.pipe()
child = os.fork()
if child == 0:
    assert storage.get("before") == b"x"
    with SqliteStorage(path) as own:
        os.write(sender, " ".join(map(str, race(own, b"c", rounds))).encode())
    os._exit(0)
os.close(sender)
mine = race(storage, b"p", rounds)
with os.fdopen(receiver) as file:
    theirs = [int(n) for n in file.read().split()]
assert os.waitpid(child, 0)[1] == 0
assert sorted(mine + theirs) == list(range(rounds)), (mine, theirs)

# a connection in use: SQLite would take its locks for those of the child, so the fork waits for the transaction
entered, ended = threading.Event(), []

def hold(connection):
    entered.set()
    time.sleep(0.2)
    ended.append(True)

holder = threading.Thread(target=lambda: storage._writes.transact("holding", hold))
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
    # in a read, at one of its steps
    for step in range(4, 40, 5):
        steps = []
        sys.setprofile(lambda *_: steps.append(1) or (len(steps) == step and signal.raise_signal(signal.SIGUSR1)))
        found = storage.get("object")
        sys.setprofile(None)
        assert found == b"y" * 3_000_000
    assert statuses == [7] * 9
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
            with contextlib.suppress(IndexClosed):
                with writer:
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
