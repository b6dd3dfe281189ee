"""Java's collector in a session that `open_session` starts: the parallel one, unless the user gives Java options."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pyspark.sql import SparkSession

from tiered_index.spark import open_session
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
    assert any("ParallelGC" in str(value) for value in begun[0].values()) == (not is_users)
