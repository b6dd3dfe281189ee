"""SIGKILL at any moment of a call leaves a database file in its old or new state, and leftovers that a sweep finds."""

import json
import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.storage.children import check_sound, child, output
from tiered_index.errors import ObjectNotFound
from tiered_index.storage.sqlite.storage import SqliteStorage

FAR_FUTURE_MS = 1 << 60


CRASHER = """
import json, os, shutil, signal, sqlite3, sys
from pathlib import Path
from tiered_index.storage.sqlite import bodies, connections
from tiered_index.storage.sqlite.storage import SqliteStorage

bodies.CHUNK_BYTES, bodies._ROWS_A_TRANSACTION = 1000, 2
OLD, NEW = b"old" * 1500, b"new version" * 500
folder, operation = Path(sys.argv[1]), sys.argv[2]

def adopt(connection, adopted=connections.adopt):
    adopted(connection)
    connection.execute("PRAGMA synchronous=OFF")  # a kill is no power cut

connections.adopt = adopt

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
    opened, statements = connections.ConnectionPool._open, [0]
    def count(statement):
        statements[0] += 1
        if statements[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
    def traced(self, *, make):
        connection = opened(self, make=make)
        connection.set_trace_callback(count)
        return connection
    connections.ConnectionPool._open = traced

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
        storage.abort_uploads()
        storage.purge(1 << 60)
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
        # parts have separate rows, so a completed object may have one more
        assert named <= report["rows"] <= named + (operation == "complete")
        check_sound(Path(report["path"]))


BIG_WRITER = """
import sys
from pathlib import Path
from tiered_index.storage.sqlite.storage import SqliteStorage

with SqliteStorage(Path(sys.argv[1])) as storage:
    for n in range(1000):
        storage.put(f"small/{n}", b"%d" % n)
        print("acknowledged", f"small/{n}", flush=True)
        print("writing", flush=True)
        storage.put("big", bytes([n % 256]) * (64 << 20))
        print("acknowledged big", n, flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.4])
def test_a_process_killed_in_a_big_put_loses_nothing_it_acknowledged(tmp_path: Path, delay_s: float) -> None:
    path = tmp_path / "objects.db"
    with child(BIG_WRITER, path) as process:
        assert process.stdout
        # ends while the second put of the big object runs
        said = [process.stdout.readline() for _ in range(5)]
        assert said[-1] == "writing\n"
        time.sleep(delay_s)
        os.kill(process.pid, signal.SIGKILL)
        said += process.stdout.readlines()
    acknowledged = [line.split()[1] for line in said if line.startswith("acknowledged small/")]
    big = max(int(line.split()[2]) for line in said if line.startswith("acknowledged big"))
    with SqliteStorage(path) as storage:
        assert all(storage.get(name) == name.removeprefix("small/").encode() for name in acknowledged)
        data = storage.get("big")
        assert data[0] in (big, big + 1)  # the interrupted object may be complete, without a report
        assert data == data[:1] * (64 << 20)
        storage.purge(FAR_FUTURE_MS)
        assert storage.get("big") == data
        with pytest.raises(ObjectNotFound):
            storage.get("small/999")
    check_sound(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM drafts").fetchone()[0] == 0
        assert connection.execute("SELECT count(*) FROM chunks").fetchone()[0] == 64 + len(acknowledged) + (
            connection.execute("SELECT count(*) FROM objects").fetchone()[0] - 1 - len(acknowledged)
        )
