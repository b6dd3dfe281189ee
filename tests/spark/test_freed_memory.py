"""A worker returns the memory that its task frees. The test has its own process, since the allocator's settings are per
process.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="needs glibc")

PROGRAM = """
import ctypes, json, sys, threading
from tiered_index.spark.workers import between_tasks

libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
taken = threading.Barrier(9)


def arenas():
    file = libc.fopen(sys.argv[1].encode(), b"w")
    libc.malloc_info(0, ctypes.c_void_p(file))
    libc.fclose(ctypes.c_void_p(file))
    return open(sys.argv[1]).read().count("<heap nr=")


def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4 // 1024


def take(pins):
    # pieces that are smaller than what the allocator maps for itself, each with a small one behind it that stays
    held = []
    for _ in range(320):
        held.append(bytearray(b"x") * 100_000)
        pins.append(bytearray(b"x") * 1_000)
    taken.wait()
    taken.wait()


def task(pins):
    threads = [threading.Thread(target=take, args=(pins,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    taken.wait()
    most = resident_mib()
    taken.wait()
    for thread in threads:
        thread.join()
    return most


pins = []
before, begun = arenas(), resident_mib()
with between_tasks():
    most = task(pins)
print(json.dumps({"arenas": arenas() - before, "grown": most - begun, "kept": resident_mib() - begun}))
"""


def test_memory_that_a_task_freed_returns_to_the_system(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "arenas")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    # 8 threads, 320 pieces each of 100 kB: 244 MiB, and 2.4 MiB that stay. Without the settings more than 150 MiB stay
    assert figures["grown"] > 200 and figures["arenas"] == 0 and figures["kept"] < 60
