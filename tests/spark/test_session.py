"""Sessions and workers: Java's collector, abilities that an older Spark lacks, freed memory, and Spark Connect."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from tests.spark.commands import run_program
from tiered_index.errors import ConfigError
from tiered_index.spark import open_session, session
from tiered_index.spark.datasource.entries import EntrySource
from tiered_index.spark.frames import repartitioned, repartitioned_by_hash
from tiered_index.spark.session import _JAVA_VARIABLES

_PROGRAM = """
import sys
from tiered_index.spark import open_session
spark = open_session("local[1]", settings=dict(pair.split("=", 1) for pair in sys.argv[1:]))
beans = spark._jvm.java.lang.management.ManagementFactory.getGarbageCollectorMXBeans()
print([bean.getName() for bean in beans])
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "collector"), [((), "PS Scavenge"), (("spark.driver.extraJavaOptions=-XX:+UseSerialGC",), "Copy")]
)
def test_the_collector_of_the_driver(settings: tuple[str, ...], collector: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in _JAVA_VARIABLES}
    command = [sys.executable, "-c", _PROGRAM, "spark.driver.host=127.0.0.1", *settings]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert f"'{collector}'" in ended.stdout, ended.stderr


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


@pytest.mark.parametrize("count", [1, 7])
def test_rows_are_placed_by_hash_as_by_their_partitions_number(spark, count):
    rows = spark.range(2_000).withColumn("place", (F.col("id") % count).cast("int"))
    for place in (repartitioned, repartitioned_by_hash):
        placed = place(rows, count, F.col("place"))
        assert placed.rdd.getNumPartitions() == count
        assert placed.where(F.spark_partition_id() != F.col("place")).count() == 0


def test_an_old_spark_is_named_with_the_version_that_is_needed(monkeypatch):
    monkeypatch.setattr("pyspark.__version__", "3.5.8")
    with pytest.raises(ConfigError, match=r"PySpark 3\.5\.8 is too old: this package needs 4\.0 or later"):
        session.register(None)
    monkeypatch.setattr("pyspark.__version__", "4.0.2")
    session.check_pyspark()
    with pytest.raises(ConfigError, match=r"PySpark 4\.0\.2 is too old: streams into an index need 4\.1 or later"):
        EntrySource({"path": "file:///tmp/index"}).streamWriter(StructType(), overwrite=False)


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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="needs glibc")
def test_memory_that_a_task_freed_returns_to_the_system(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "arenas")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    # 8 threads, 320 pieces each of 100 kB: 244 MiB, and 2.4 MiB that stay. Without the settings more than 150 MiB stay
    assert figures["grown"] > 200 and figures["arenas"] == 0 and figures["kept"] < 60


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
