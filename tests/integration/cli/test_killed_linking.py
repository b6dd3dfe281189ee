"""`ingest` of files whose process gets SIGKILL at random moments: the next run loses no row, and doubles none."""

import contextlib
import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import clean_environment, run_here
from tiered_index import IndexReader
from tiered_index.sources.linked_rows import FileRows

FILES, ROWS, KEYS = 8, 6000, 997
KILLS = 8
BEGIN_S = 1_700_000_000


def row(number):
    return {"id": f"k{number % KEYS}", "at": BEGIN_S + number, "n": number, "kind": ("a", "b")[number % 2]}


def write_files(folder):
    folder.mkdir()
    for number in range(FILES):
        rows = [row(n) for n in range(number * ROWS, (number + 1) * ROWS)]
        lines = "".join(f"{json.dumps(one)}\n" for one in rows).encode()
        if number % 3 == 0:
            (folder / f"{number}.ndjson").write_bytes(lines)
        elif number % 3 == 1:
            packed = [gzip.compress(lines[at : at + 99_999]) for at in range(0, len(lines), 99_999)]
            (folder / f"{number}.ndjson.gz").write_bytes(b"".join(packed))
        else:
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{number}.parquet", row_group_size=1000)


# blocks, records and index files of the child are small, so that there are many moments
PROGRAM = """
import sys
from tiered_index.sources import linked, restart, rows
rows.BLOCK_BYTES, linked._AT_ONCE, linked.SEGMENT_BYTES = 1 << 14, 2, 1 << 18
restart.SPACING_BYTES, restart._EARLY_BYTES, linked._MOST_POINTS = 1 << 16, 0, 2
from tiered_index.cli.__main__ import run
sys.exit(run())
"""


def size_of(folder):
    """Return what changes while the command works: the bytes and the number of files in a folder."""
    sizes = []
    # `os.walk` passes over folders that go meanwhile
    for path in (Path(above, name) for above, _, names in os.walk(folder) for name in names):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return len(sizes), sum(sizes)


def killed(arguments, folder, moments):
    """Run the command, and kill it after a random number of changes in `folder`. Return whether it was killed."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    child = subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    left, seen = moments.randrange(1, 25), size_of(folder)
    while child.poll() is None and left:
        now = size_of(folder)
        left, seen = left - (now != seen), now
        time.sleep(0.002)
    time.sleep(moments.random() * 0.02)
    child.kill()
    _, errors = child.communicate()
    assert child.returncode in (0, -9), errors.decode()
    return child.returncode == -9


@pytest.mark.parametrize(
    ("topic", "archive"),
    [("t", ()), ("field:kind", ()), ("t", ("--archive",))],
    ids=["one topic", "topic by field", "archive"],
)
def test_no_kill_loses_or_doubles_a_row(tmp_path, topic, archive):
    write_files(tmp_path / "logs")
    work, moments = tmp_path / "work", random.Random(f"{topic}{archive}")
    work.mkdir()
    storage = f"file://{work}/objects"
    arguments = ("ingest", tmp_path / "logs", "--topic", topic, "--key", "id", "--time", "at", *archive)
    arguments += ("--root", work / "root", "--storage", storage, "--slots", 97, "--items", 3000, "--wait")
    kills = sum(killed(arguments, work, moments) for _ in range(KILLS))
    assert kills > 2
    done = run_here(*arguments, "--json")
    assert done.code == 0, done.err
    assert run_here(*arguments, "--json").document["known"] == FILES
    topics = ("t",) if topic == "t" else ("a", "b")
    if archive:
        for file in (tmp_path / "logs").iterdir():
            file.unlink()
    with IndexReader.open(storage) as reader, FileRows(reader) as rows:
        places = Counter[tuple[int, int]]()
        with reader.export() as batches:
            for entries in batches:
                places.update(zip(entries["queue_id"].to_pylist(), entries["offset"].to_pylist(), strict=True))
        # no offset is of two rows, and no row has two. Each kill while a batch fills two index files leaves a part of
        # it once more in storage, which lookups show once
        assert len(places) == FILES * ROWS and max(places.values()) <= kills + 1
        for key in moments.sample(range(KEYS), 20):
            numbers = []
            for name in topics:
                for found in reader.messages(name, f"k{key}", source=rows, max_count=1000):
                    assert found.message is not None, found.problem
                    numbers.append(json.loads(found.message.text)["n"])
            assert sorted(numbers) == list(range(key, FILES * ROWS, KEYS))
        if archive:
            copies = list(reader.segments().of("rows:-/t/0"))
            assert (sum(one.rows for one in copies), len(copies) > 3) == (FILES * ROWS, True)
    assert run_here("verify", "--deep", "--storage", storage).code == 0
