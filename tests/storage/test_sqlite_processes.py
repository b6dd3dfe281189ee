"""One database file, several processes: one winner, no half objects, forks, and what SIGKILL leaves at any moment."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tiered_index.errors import ObjectNotFound
from tiered_index.storage.sqlite import SqliteStorage

FAR_FUTURE_MS = 1 << 60
PATIENCE_S = 60


@contextmanager
def child(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run `script` in a process of its own, which is gone when the block ends."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait(PATIENCE_S)


def output(process: subprocess.Popen[str], said: str = "") -> str:
    """Say `said`, and return what the process prints until it ends well."""
    out, _ = process.communicate(said, timeout=PATIENCE_S)
    assert process.returncode == 0
    return out


def check_sound(path: Path) -> None:
    """SQLite finds nothing wrong, and every row belongs to a body that something names."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        orphans = (
            "SELECT count(*) FROM pieces WHERE body NOT IN"
            " (SELECT body FROM objects UNION SELECT body FROM parts UNION SELECT body FROM drafts)",
            "SELECT count(*) FROM chunks WHERE id NOT IN (SELECT chunk FROM pieces)",
            "SELECT count(*) FROM pieces WHERE chunk NOT IN (SELECT id FROM chunks)",
        )
        assert [connection.execute(query).fetchone()[0] for query in orphans] == [0, 0, 0]


RACER = """
import sys
from pathlib import Path
from tiered_index.errors import ObjectExists
from tiered_index.storage.sqlite import SqliteStorage

racer, rounds = sys.argv[2], int(sys.argv[3])
with SqliteStorage(Path(sys.argv[1])) as storage:
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


def test_racing_processes_have_one_winner_from_the_first_byte_of_the_file(tmp_path: Path) -> None:
    """The database itself is made in the race, too."""
    path, rounds = tmp_path / "objects.db", 60
    with child(RACER, path, "a", rounds) as a, child(RACER, path, "b", rounds) as b, child(RACER, path, "c", rounds) as c:
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
    with SqliteStorage(path) as storage:
        for racer, numbers in won.items():
            assert all(storage.get(f"log/{n}") == (racer * 3000).encode() for n in numbers)
    check_sound(path)


WRITER = """
import sys
from pathlib import Path
from tiered_index.storage.sqlite import SqliteStorage

with SqliteStorage(Path(sys.argv[1])) as storage:
    for n in range(int(sys.argv[2])):
        storage.put("object", (b"a" * (40 << 20), b"b" * 300_000, b"")[n % 3])
        print(n, flush=True)
"""


def test_a_reader_beside_a_writer_never_sees_half(tmp_path: Path) -> None:
    path, sizes = tmp_path / "objects.db", {b"a": 40 << 20, b"b": 300_000, b"": 0}
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
    assert seen >= {b"a", b""}
    check_sound(path)


def test_an_upload_goes_on_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "objects.db"
    upload_part = """
import json, sys
from pathlib import Path
from tiered_index.storage.base import UploadHandle
from tiered_index.storage.sqlite import SqliteStorage

with SqliteStorage(Path(sys.argv[1])) as storage:
    part = storage.upload_part(UploadHandle.from_json(json.loads(sys.argv[2])), 2, b"second" * 500_000)
    print(part.etag)
"""
    with SqliteStorage(path) as storage:
        handle = storage.begin_upload("object")
        first = storage.upload_part(handle, 1, b"first")
        with child(upload_part, path, json.dumps(handle.to_json())) as process:
            etag = output(process).strip()
        storage.complete_upload(handle, [first, type(first)(2, etag, 3_000_000)])
        assert storage.get("object") == b"first" + b"second" * 500_000


FORKER = """
import os, sys, threading
from pathlib import Path
from tiered_index.errors import ObjectExists, StorageUnavailable
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
stop = threading.Event()

def read_on():
    while not stop.is_set():
        assert storage.get("before") == b"x"

readers = [threading.Thread(target=read_on) for _ in range(8)]
for reader in readers:
    reader.start()
receiver, sender = os.pipe()
child = os.fork()
if child == 0:
    assert not storage._pool._idle and not storage._pool._lent
    os.write(sender, " ".join(map(str, race(storage, b"c", rounds))).encode())
    os._exit(0)
os.close(sender)
mine = race(storage, b"p", rounds)
stop.set()
with os.fdopen(receiver) as file:
    theirs = [int(n) for n in file.read().split()]
assert os.waitpid(child, 0)[1] == 0
assert sorted(mine + theirs) == list(range(rounds)), (mine, theirs)
for reader in readers:
    reader.join()

# A thread that can't be waited for: the child must not use what it inherited.
impatient = SqliteStorage(path, busy_timeout_s=0.2)
entered, release = threading.Event(), threading.Event()

def hold(connection):
    entered.set()
    release.wait(30)

holder = threading.Thread(target=lambda: impatient._pool.read("holding", hold, lambda: None))
holder.start()
entered.wait(30)
child = os.fork()
if child == 0:
    try:
        impatient.get("before")
    except StorageUnavailable as error:
        os._exit(7 if "forked" in str(error) else 8)
    os._exit(9)
status = os.waitpid(child, 0)[1]
release.set()
holder.join()
assert os.waitstatus_to_exitcode(status) == 7, status
assert impatient.get("before") == b"x"
impatient.close()
storage.close()
print("well")
"""


def test_a_storage_is_used_on_both_sides_of_a_fork(tmp_path: Path) -> None:
    with child(FORKER, tmp_path / "objects.db") as process:
        assert output(process) == "well\n"
    check_sound(tmp_path / "objects.db")


CRASHER = """
import json, os, shutil, signal, sqlite3, sys
from pathlib import Path
from tiered_index.storage import sqlite_bodies, sqlite_connections
from tiered_index.storage.sqlite import SqliteStorage

sqlite_bodies.CHUNK_BYTES, sqlite_bodies._ROWS_A_TRANSACTION = 1000, 2
OLD, NEW = b"old" * 1500, b"new version" * 500
folder, operation = Path(sys.argv[1]), sys.argv[2]

def act(storage):
    if operation == "put":
        storage.put("object", NEW)
    elif operation == "put_if_absent":
        storage.put_if_absent("fresh", NEW)
    elif operation == "delete":
        storage.delete("object")
    else:
        handle = storage.begin_upload("object")
        parts = [storage.upload_part(handle, n, NEW[a:b]) for n, a, b in ((2, 2500, None), (1, 0, 2500))]
        storage.upload_part(handle, 3, b"never named" * 300)
        if operation == "complete":
            storage.complete_upload(handle, parts)
        else:
            storage.abort_upload(handle)

def die_at(nth):
    opened, statements = sqlite_connections.ConnectionPool._open, [0]
    def count(statement):
        statements[0] += 1
        if statements[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
    def traced(self, *, make):
        connection = opened(self, make=make)
        connection.set_trace_callback(count)
        return connection
    sqlite_connections.ConnectionPool._open = traced

def count(path, *tables):
    connection = sqlite3.connect(path)
    counts = [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]
    connection.close()
    return counts

with SqliteStorage(folder / "template.db") as storage:
    storage.put("object", OLD)
    storage.put("other", b"kept")
nth, crashed = 0, True
while crashed:
    nth += 1
    path = folder / f"{nth}.db"
    shutil.copy(folder / "template.db", path)
    child = os.fork()
    if child == 0:
        die_at(nth)
        with SqliteStorage(path) as storage:
            act(storage)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    crashed = code != 0
    left = sum(count(path, "drafts", "uploads"))
    with SqliteStorage(path) as storage:
        found = {info.name: storage.get(info.name).decode() for info in storage.list()}
        storage.abort_uploads(older_than_ms=1 << 60)
        swept = {info.name: storage.get(info.name).decode() for info in storage.list()}
    report = {"path": str(path), "crashed": crashed, "left": left, "found": found, "swept": swept}
    report["rows"], *report["unswept"] = count(path, "chunks", "drafts", "uploads", "parts")
    print(json.dumps(report), flush=True)
"""
OLD, NEW = "old" * 1500, "new version" * 500
STATES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "put": ({"object": OLD}, {"object": NEW}),
    "put_if_absent": ({"object": OLD}, {"object": OLD, "fresh": NEW}),
    "delete": ({"object": OLD}, {}),
    "complete": ({"object": OLD}, {"object": NEW}),
    "abort": ({"object": OLD}, {"object": OLD}),
}


@pytest.mark.parametrize("operation", STATES)
def test_a_kill_at_any_statement_leaves_old_or_new(tmp_path: Path, operation: str) -> None:
    old, new = ({**state, "other": "kept"} for state in STATES[operation])
    with child(CRASHER, tmp_path, operation) as process:
        reports = [json.loads(line) for line in output(process).splitlines()]
    assert [report["crashed"] for report in reports] == [True] * (len(reports) - 1) + [False]
    assert len(reports) > 12
    seen = [report["found"] for report in reports]
    assert all(found in (old, new) for found in seen)
    assert seen[0] == old
    assert seen[-1] == new
    turned = [found == new for found in seen]
    assert turned == sorted(turned)  # once visible it stays
    assert any(report["left"] for report in reports)
    for report in reports:
        assert report["swept"] == report["found"]
        assert report["unswept"] == [0, 0, 0]
        named = sum(-(-len(data) // 1000) for data in report["found"].values())
        # parts have rows of their own, so a completed object may have one more
        assert named <= report["rows"] <= named + (operation == "complete")
        check_sound(Path(report["path"]))


BIG_WRITER = """
import sys
from pathlib import Path
from tiered_index.storage.sqlite import SqliteStorage

with SqliteStorage(Path(sys.argv[1])) as storage:
    for n in range(1000):
        storage.put(f"small/{n}", b"%d" % n)
        print("acknowledged", f"small/{n}", flush=True)
        print("writing", flush=True)
        storage.put("big", bytes([n % 256]) * (64 << 20))
        print("acknowledged big", n, flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.1, 0.25, 0.6])
def test_a_process_killed_in_a_big_put_loses_nothing_it_acknowledged(tmp_path: Path, delay_s: float) -> None:
    path = tmp_path / "objects.db"
    with child(BIG_WRITER, path) as process:
        assert process.stdout
        said = [process.stdout.readline() for _ in range(5)]  # ends with: the second put of the big object is being made
        assert said[-1] == "writing\n"
        time.sleep(delay_s)
        os.kill(process.pid, signal.SIGKILL)
        said += process.stdout.readlines()
    acknowledged = [line.split()[1] for line in said if line.startswith("acknowledged small/")]
    big = max(int(line.split()[2]) for line in said if line.startswith("acknowledged big"))
    with SqliteStorage(path) as storage:
        assert all(storage.get(name) == name.removeprefix("small/").encode() for name in acknowledged)
        data = storage.get("big")
        assert data[0] in (big, big + 1)  # what was being written may have become whole unheard
        assert data == data[:1] * (64 << 20)
        storage.abort_uploads(older_than_ms=FAR_FUTURE_MS)
        assert storage.get("big") == data
        with pytest.raises(ObjectNotFound):
            storage.get("small/999")
    check_sound(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM drafts").fetchone()[0] == 0
        assert connection.execute("SELECT count(*) FROM chunks").fetchone()[0] == 64 + len(acknowledged) + (
            connection.execute("SELECT count(*) FROM objects").fetchone()[0] - 1 - len(acknowledged)
        )
