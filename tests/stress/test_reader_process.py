"""Another process reads the root while the writer rolls, compacts, uploads and retires files.

Every answer is complete. It has all entries flushed before the lookup, and none that were not put.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import tests
from tests.stress.beside import KEYS, Shared, message
from tests.stress.crew import Crew

REPOSITORY = Path(tests.__file__).parent.parent
ITEMS = 16
PATIENCE_S = 120


def python(*arguments: object) -> list[str]:
    return [sys.executable, "-m", *map(str, arguments)]


def check_command(root: Path, shared: Shared, key: int) -> None:
    """`tiered-index query --root` gives the same answers."""
    flushed = shared.get("flushed")
    command = python("tiered_index.cli", "query", "t", f"k{key}", "--root", root, "--all", "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=REPOSITORY, check=False)
    begun = shared.get("begun")
    assert done.returncode == 0, done.stderr
    *items, last = [json.loads(line) for line in done.stdout.splitlines()]
    offsets = [item["offset"] for item in items]
    assert (last["status"], last["count"]) == ("complete", len(offsets))
    assert set(range(key, flushed, KEYS)) <= set(offsets) <= set(range(key, begun, KEYS))
    assert offsets == sorted(set(offsets), key=lambda n: (-message(n)[5], -n))


def write_on(service, shared, crew, rolls, rng):
    """Put, flush, seal and run the life cycle until the writer has begun that many files."""
    number, lived = 0, False
    while max((handle.sequence for handle in service.files()), default=0) < rolls and not crew.stop.is_set():
        for _ in range(rng.randrange(1, 2 * ITEMS)):
            shared.set("begun", number + 1)
            service.put(*message(number))
            number += 1
        service.flush()
        shared.set("flushed", number)
        if not lived and len(service.files()) > 8:
            # whatever the other threads do, some files are in the storage
            service.run_lifecycle()
            service.run_lifecycle()
            lived = True
        if rng.random() < 0.2:
            service.seal()
    return number


def run(open_index, folder, rolls, seed, *, keep_bytes):
    retention = {"local_keep_s": 10**6, "local_keep_bytes": keep_bytes}
    service = open_index(storage=f"file://{folder}/store", items=ITEMS, background=False, disk=None, **retention)
    root, shared, crew = folder / "root", Shared.make(folder / "shared"), Crew(seed)
    command = python("tests.stress.beside", root, folder / "shared")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            writer = crew.begin("writer", write_on, service, shared, crew, rolls, random.Random(seed))
            crew.repeat("life", service.run_lifecycle)
            check_command(root, shared, seed % KEYS)
            crew.wait_for([writer])
            crew.finish()
            service.flush()
        finally:
            shared.set("stop", 1)
            out, _ = child.communicate(timeout=PATIENCE_S)
    said = json.loads(out)
    print(f"seed {seed}: {rolls} files, {said}")
    assert said["troubles"] == []
    check_command(root, shared, 3)
    return service, said


@pytest.mark.parametrize(
    ("keep_bytes", "rolls"), [(0, 60), (2_000, 60), pytest.param(20_000, 1000, marks=pytest.mark.slow)]
)
def test_a_reader_in_another_process_finds_everything_flushed(open_index, tmp_path, keep_bytes, rolls):
    service, said = run(open_index, tmp_path, rolls, 1 + keep_bytes, keep_bytes=keep_bytes)
    assert said["seen"]["storage"]
    local = [handle for handle in service.files() if handle.place != "storage"]
    assert said["below"] <= len(local)
    assert said["mappings"] <= len(local)
