"""After merges and compactions the process returns freed memory to the system."""

import subprocess
import sys

import pytest

from tiered_index import IndexService, merge
from tiered_index.service.jobs import job
from tiered_index.service.life import lifecycle

T = 1_700_000_000_000
PROGRAM = """
from tiered_index.heap import give_back

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

before = resident_bytes()
# below the size from which glibc maps each by itself; the last one keeps the heap's end where it is
kept = [bytearray(100_000) for _ in range(1_000)]
del kept[:-1]
held = resident_bytes() - before
give_back()
print(held, resident_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc_trim")
def test_freed_memory_returns_to_the_system():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    held, left = map(int, done.stdout.split())
    assert held > 50_000_000 > 10_000_000 > left


def test_compactions_and_merges_return_memory(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(lifecycle, "give_back", lambda: given.append("compaction"))
    monkeypatch.setattr(job, "give_back", lambda: given.append("merge"))
    uri = f"file://{tmp_path}/storage"
    with IndexService.open(root=tmp_path / "root", storage=uri, slots=7, items=12, background=False) as index:
        index.run_lifecycle()
        assert given == []
        index.put("t", 0, "k", 1, 1, T)
        index.seal()
        index.run_lifecycle()
        index.run_lifecycle()
        assert given == ["compaction"]
    merge(uri)
    assert given == ["compaction", "merge"]
