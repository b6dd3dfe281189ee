"""After merges and compactions the process returns freed memory to the system."""

import subprocess
import sys

import pytest

PROGRAM = """
from tiered_index.base.process import give_back

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

before = resident_bytes()
# below the size from which glibc maps each by itself; the last one keeps the heap's end where it is
blocks = [bytearray(100_000) for _ in range(1_000)]
del blocks[:-1]
held = resident_bytes() - before
give_back()
print(held, resident_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc_trim")
def test_freed_memory_returns_to_the_system():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    held, left = map(int, done.stdout.split())
    assert held > 50_000_000 > 10_000_000 > left
