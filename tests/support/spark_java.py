"""The options of Java in tests of Spark, and an archive of the classes that each Java would otherwise load and verify.

`python -m tests.support.spark_java` writes the archive.
"""

import os
import sys
import tempfile
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
"""Beside the jars with the classes. Without it, or with another build of Java, Java loads classes as usual."""

# small jobs end before compiled code would pay; tests must not read Java's warnings about the archive
_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:cds=off -Xlog:cds+dynamic=off"
    " -Dspark.sql.codegen.wholeStage=false -Dspark.ui.enabled=false"
)


def options() -> str:
    """Return the `SPARK_SUBMIT_OPTS` of each driver that tests start."""
    return f"{_OPTIONS} -XX:SharedArchiveFile={ARCHIVE}"


def write(target: Path) -> None:
    """Write the archive, by a session that builds an index, looks it up and reads it as a table (half a minute)."""
    from pyspark.sql import SparkSession

    from tests.spark.entries import messages, write_parquet
    from tiered_index import IndexConfig
    from tiered_index.spark import build, look_up, open_session, register

    partial = target.with_suffix(".partial")
    os.environ["SPARK_SUBMIT_OPTS"] = f"{_OPTIONS} -XX:ArchiveClassesAtExit={partial}"
    spark: SparkSession = open_session("local[2]", settings={"spark.driver.host": "127.0.0.1"})
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    with tempfile.TemporaryDirectory() as folder:
        storage = f"file://{folder}/index"
        source = write_parquet(messages(100), Path(folder) / "source.parquet")
        build(spark, source, storage=storage, config=IndexConfig(slots=64, items=10_000, max_late_s=10**10))
        lookups = spark.createDataFrame([("orders", "key-0")], "topic string, key string")
        look_up(spark, lookups, storage=storage).frame.collect()
        spark.read.format("tiered_index").load(storage).groupBy("topic").count().toPandas()
    java = spark.sparkContext._gateway.proc
    spark.stop()
    java.stdin.close()
    java.wait()
    partial.rename(target)


if __name__ == "__main__":
    write(ARCHIVE)
