"""Sessions and workers: Java's collector, abilities that an older Spark lacks, freed memory, and Spark Connect."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from tests.spark.commands import run_program
from tiered_index.errors import ConfigError
from tiered_index.spark import open_session, register
from tiered_index.spark.frames import repartitioned, repartitioned_by_hash
from tiered_index.spark.session import _JAVA_VARIABLES
from tiered_index.spark.versions import check_classic, check_workers


@pytest.mark.parametrize(
    ("settings", "defaults", "variable", "is_users"),
    [
        ({"spark.ui.enabled": "false"}, "spark.ui.enabled false\n", "", False),
        ({"spark.driver.extraJavaOptions": "-Xss4m"}, "", "", True),
        ({}, "spark.driver.extraJavaOptions -XX:+UseG1GC\n", "", True),
        *(({}, "", name, True) for name in _JAVA_VARIABLES),
    ],
)
def test_the_collector_is_the_users_choice_if_they_give_options_of_java(
    monkeypatch, tmp_path, settings, defaults, variable, is_users
):
    """Java does not start with two collectors."""
    begun = []
    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", lambda builder: begun.append(dict(builder._options)))
    for name in _JAVA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (tmp_path / "spark-defaults.conf").write_text(defaults)
    if variable:
        monkeypatch.setenv(variable, "-XX:+UseSerialGC")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    open_session(settings=settings)
    chosen = "-XX:+UseParallelGC -XX:+ExitOnOutOfMemoryError"
    assert (chosen in begun[0].values()) == (not is_users)


class _Context:
    """A Spark context of the driver, whose workers run `pythonExec`."""

    master = "local[1]"

    def __init__(self, program: str) -> None:
        self.pythonExec = program


class _Session:
    version = "4.3.0"

    def __init__(self, program: str) -> None:
        self.sparkContext = _Context(program)


@pytest.mark.parametrize("check", [register, check_classic])
def test_workers_with_another_python_are_named_with_what_to_set(check, tmp_path, monkeypatch):
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    other = tmp_path / "python3"
    for script, problem in (
        (f'exec {sys.executable} -S -I "$@"', f"{other} can't import tiered_index"),
        ("echo 3.8", f"{other} is Python 3.8, and this is 3.{sys.version_info[1]}"),
        (None, "there is no nopython"),
    ):
        if script:
            other.write_text(f"#!/bin/sh\n{script}\n")
            other.chmod(0o755)
        with pytest.raises(ConfigError) as caught:
            check(_Session(str(other) if script else "nopython"))
        assert f"since {problem}: set PYSPARK_PYTHON={sys.executable} before" in str(caught.value)
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    check_workers(_Session(str(other)))
    check_workers(_Session(sys.executable))
    monkeypatch.setenv("PYSPARK_PYTHON", "any")
    check_workers(_Session("nopython"))


@pytest.mark.parametrize("count", [1, 7])
def test_rows_are_placed_by_hash_as_by_their_partitions_number(spark, count):
    rows = spark.range(2_000).withColumn("place", (F.col("id") % count).cast("int"))
    for place in (repartitioned, repartitioned_by_hash):
        placed = place(rows, count, F.col("place"))
        assert placed.rdd.getNumPartitions() == count
        assert placed.where(F.spark_partition_id() != F.col("place")).count() == 0


PROGRAM = """
import ctypes, sys, threading
from tiered_index.spark.workers import between_tasks

libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
taken = threading.Barrier(8)


def arenas():
    file = libc.fopen(sys.argv[1].encode(), b"w")
    libc.malloc_info(0, ctypes.c_void_p(file))
    libc.fclose(ctypes.c_void_p(file))
    return open(sys.argv[1]).read().count("<heap nr=")


def take():
    held = [bytearray(b"x") * 1_000 for _ in range(320)]
    taken.wait()


def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096


before, begun = arenas(), resident_bytes()
with between_tasks():
    # the last one keeps the heap's end where it is
    blocks = [bytearray(100_000) for _ in range(1_000)]
    del blocks[:-1]
    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(arenas() - before, resident_bytes() - begun < 20_000_000)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="needs glibc")
def test_memory_that_a_task_freed_returns_to_the_system(tmp_path):
    """An arena of each thread would keep it."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "arenas")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "0 True\n", done.stderr


@pytest.mark.slow
def test_the_data_sources_work_over_spark_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Spark gives the server a free port, not 15002: another process may have that one
    monkeypatch.setenv("SPARK_TESTING", "1")
    lines, _ = run_program("connect_program", tmp_path, timeout=1_200)
    figures = {name: value for line in lines for name, value in line.items()}
    assert (figures["written"], figures["of_key"], figures["hashed"]) == (500, [907, 807], True)
    # a repeated stream adds nothing
    assert (figures["streamed"], figures["messages"]) == (2_000, 101)
    assert figures["error"].startswith("tiered_index.errors.NotAnIndex: ")
    assert figures["lost"].startswith("tiered_index.errors.CorruptFile: data/")
    assert "session of Spark Connect" in figures["refused"]
