"""SIGKILL at any moment of a call leaves a database file in its old or new state, without leftovers."""

import json
import sys
from pathlib import Path

import pytest

from tests.storage.sqlite_probes import check_sound, output
from tests.support.processes import started

CRASHER = """
import json, os, shutil, signal, sqlite3, sys
from pathlib import Path
from tiered_index.storage import sqlite
from tiered_index.storage.sqlite import SqliteStorage

sqlite.CHUNK_BYTES, sqlite.MOST_BYTES = 1000, 2000
sqlite.PRAGMAS = (*sqlite.PRAGMAS, "synchronous=OFF")  # a kill is no power cut
OLD, NEW = b"old" * 1500, b"new version" * 500
folder, operation = Path(sys.argv[1]), sys.argv[2]

def act(storage):
    if operation == "put":
        storage.put("object", NEW)
    elif operation == "put_if_absent":
        storage.put_if_absent("fresh", NEW)
    elif operation == "delete":
        storage.delete_many(["object"])
    else:
        writer = storage.open_writer("object")
        for start in range(0, len(NEW), 700):
            writer.write(NEW[start : start + 700])
        writer.close()

def die_at(nth):
    connect, statements = sqlite3.connect, [0]
    def count(statement):
        statements[0] += 1
        if statements[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
    def traced(*place, **settings):
        connection = connect(*place, **settings)
        connection.set_trace_callback(count)
        return connection
    sqlite3.connect = traced

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
    with SqliteStorage(path) as storage:
        found = {info.name: storage.get(info.name).decode() for info in storage.list()}
    report = {"path": str(path), "crashed": crashed, "found": found}
    print(json.dumps(report), flush=True)
"""
OLD, NEW = "old" * 1500, "new version" * 500
STATES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "put": ({"object": OLD}, {"object": NEW}),
    "put_if_absent": ({"object": OLD}, {"object": OLD, "fresh": NEW}),
    "delete": ({"object": OLD}, {}),
    "stream": ({"object": OLD}, {"object": NEW}),
}


@pytest.mark.parametrize("operation", STATES)
def test_a_kill_at_any_statement_leaves_old_or_new(tmp_path: Path, operation: str) -> None:
    old, new = ({**state, "other": "kept"} for state in STATES[operation])
    with started([sys.executable, "-c", CRASHER, str(tmp_path), operation]) as process:
        reports = [json.loads(line) for line in output(process).splitlines()]
    assert [report["crashed"] for report in reports] == [True] * (len(reports) - 1) + [False]
    assert len(reports) > 5
    seen = [report["found"] for report in reports]
    assert all(state in (old, new) for state in seen)
    assert seen[0] == old
    assert seen[-1] == new
    turned = [state == new for state in seen]
    assert turned == sorted(turned)  # once visible it stays
    for report in reports:
        check_sound(Path(report["path"]), 1000)
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]
