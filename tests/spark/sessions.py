"""Sessions of Spark for tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.s3_server import CREDENTIALS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORKERS = Path(__file__).parents[1] / "support" / "spark_workers"
"""A folder of PYTHONPATH. Spark forks workers from a process that has imported everything."""


@contextmanager
def local_session(folder: Path, settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Yield a session of two cores with its files in `folder`, and with further `settings`."""
    from tiered_index.spark import open_session

    before = dict(os.environ)
    # workers have the environment in which Java started
    path = os.pathsep.join(filter(None, [str(WORKERS), before.get("PYTHONPATH")]))
    os.environ.update(CREDENTIALS, PYSPARK_PYTHON=sys.executable, PYTHONPATH=path)
    own = {"spark.sql.shuffle.partitions": "2", "spark.driver.host": "127.0.0.1", "spark.local.dir": str(folder)}
    session = open_session("local[2]", settings={**own, **(settings or {})})
    session.sparkContext.setLogLevel("OFF")
    # Java may run already: a test that had no session may have started it
    session.sparkContext.environment.update(CREDENTIALS)
    try:
        yield session
    finally:
        session.stop()
        os.environ.clear()
        os.environ.update(before)
