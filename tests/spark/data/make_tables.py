"""Makes the small Delta and Iceberg tables beside this file with Spark's own writers; `make test` only reads them.

Needs jars of Maven Central, and the version of PySpark that they are for, so use environments of their own:

    python -m venv v && v/bin/pip install pyspark==4.2.0     (4.1.1 for Iceberg)
    mvn dependency:get -Dartifact=io.delta:delta-spark_4.2_2.13:4.4.0
    mvn dependency:get -Dartifact=org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0
    v/bin/python tests/spark/data/make_tables.py delta $(find ~/.m2 -name 'delta-*.jar' -o -name 'unitycatalog-*.jar')
    v/bin/python tests/spark/data/make_tables.py iceberg $(find ~/.m2 -name 'iceberg-spark-*.jar')

The tables of Iceberg state absolute paths, so they are written below `ICEBERG`; tests map this path to the folder.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pyspark.sql import SparkSession

TABLES = Path(__file__).parent / "tables"
ICEBERG = Path("/tmp/tiered-index-golden")
EXTENSIONS = {
    "delta": "io.delta.sql.DeltaSparkSessionExtension",
    "iceberg": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
}
CATALOGS = {
    "delta": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "iceberg": "org.apache.iceberg.spark.SparkCatalog",
}
FIELDS = "topic string, key string, queue_id int, offset bigint, size int, timestamp_ms bigint"
ROWS = "SELECT 'orders', concat('k', id % 10), 0, id, 10, 1700000000000 + id * 1000 FROM range({}, {}, 1, 1)"


def session(kind: str, jars: list[str]) -> SparkSession:
    """Return a session with the tables of one kind, from jars."""
    return (
        SparkSession.builder.master("local[1]")
        .config("spark.jars", ",".join(jars))
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.parquet.compression.codec", "zstd")
        .config("spark.sql.extensions", EXTENSIONS[kind])
        .config("spark.sql.catalog.spark_catalog", CATALOGS[kind])
        .config("spark.sql.catalog.spark_catalog.type", "hadoop")
        .config("spark.sql.catalog.spark_catalog.warehouse", str(ICEBERG))
        .getOrCreate()
    )


def insert(spark: SparkSession, table: str, begin: int, end: int, more: str = "") -> None:
    """Append the rows with offsets [begin, end)."""
    rows = ROWS.format(begin, end)
    spark.sql(f"INSERT INTO {table} {rows.replace(' FROM', more + ' FROM')}")


def delta(spark: SparkSession) -> None:
    """Make tables of Delta."""

    def created(name: str, columns: str = FIELDS, clause: str = "") -> str:
        table = f"delta.`{TABLES / name}`"
        spark.sql(f"CREATE TABLE {table} ({columns}) USING delta {clause}")
        return table

    # versions 1 and 2 append, 3 rewrites, 4 appends, 5 deletes rows of a file by a vector
    table = created("delta_history", clause="TBLPROPERTIES ('delta.enableDeletionVectors' = true)")
    insert(spark, table, 0, 40)
    insert(spark, table, 40, 80)
    spark.sql(f"OPTIMIZE {table}")
    insert(spark, table, 80, 100)
    spark.sql(f"DELETE FROM {table} WHERE offset % 10 = 3")
    # the same, read from a checkpoint
    table = created(
        "delta_checkpoint",
        clause="TBLPROPERTIES ('delta.enableDeletionVectors' = true, 'delta.checkpointInterval' = 2)",
    )
    insert(spark, table, 0, 40)
    spark.sql(f"DELETE FROM {table} WHERE offset = 3")
    table = created("delta_column_mapping", clause="TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    insert(spark, table, 0, 10)
    spark.sql(f"ALTER TABLE {table} RENAME COLUMN size TO bytes")
    table = created("delta_rewritten", clause="TBLPROPERTIES ('delta.enableDeletionVectors' = false)")
    insert(spark, table, 0, 10)
    spark.sql(f"UPDATE {table} SET key = 'other' WHERE offset = 3")
    table = created(
        "delta_partitioned",
        FIELDS.replace("topic string, ", "") + ", topic string, at timestamp",
        "PARTITIONED BY (topic, at)",
    )
    moment = "TIMESTAMP '2023-11-14 22:00:00'"
    for begin, topic in ((0, "'007'"), (5, "'a b:c/ü'")):
        rows = ROWS.format(begin, begin + 5).replace("'orders', ", "").replace(" FROM", f", {topic}, {moment} FROM")
        spark.sql(f"INSERT INTO {table} {rows}")


def iceberg(spark: SparkSession) -> None:
    """Make tables of Iceberg: each has an append and a row-level delete."""

    def created(name: str, version: int) -> str:
        table = f"spark_catalog.golden.{name}"
        spark.sql(
            f"CREATE TABLE {table} ({FIELDS}) USING iceberg TBLPROPERTIES ('format-version' = {version}, "
            "'write.delete.mode' = 'merge-on-read')"
        )
        insert(spark, table, 0, 40)
        return table

    for name, version in (("iceberg_position_deletes", 2), ("iceberg_deletion_vectors", 3)):
        spark.sql(f"DELETE FROM {created(name, version)} WHERE offset % 10 = 3")
    created("iceberg_equality_deletes", 2)
    equality_delete(spark, ICEBERG / "golden" / "iceberg_equality_deletes")


def equality_delete(spark: SparkSession, folder: Path) -> None:
    """Delete a key by an equality delete, as Flink writes it: Spark's SQL has none."""
    java = spark._jvm
    tables = java.org.apache.iceberg.hadoop.HadoopTables(spark._jsc.hadoopConfiguration())
    table = tables.load(str(folder))
    key = table.schema().findField("key").fieldId()
    schema = table.schema().select(["key"])
    ids = spark.sparkContext._gateway.new_array(java.int, 1)
    ids[0] = key
    factory = java.org.apache.iceberg.data.GenericAppenderFactory(table.schema(), table.spec(), ids, schema, None)
    out = java.org.apache.iceberg.encryption.EncryptedFiles.plainAsEncryptedOutput(
        table.io().newOutputFile(f"{folder}/data/equality.parquet")
    )
    parquet = java.org.apache.iceberg.FileFormat.PARQUET
    writer = factory.newEqDeleteWriter(out, parquet, None)
    record = java.org.apache.iceberg.data.GenericRecord.create(schema)
    record.setField("key", "k3")
    writer.write(record)
    writer.close()
    table.newRowDelta().addDeletes(writer.toDeleteFile()).commit()


def main() -> None:
    """Write all tables of one kind again."""
    kind, *jars = sys.argv[1:]
    for folder in TABLES.glob(f"{kind}_*"):
        shutil.rmtree(folder)
    shutil.rmtree(ICEBERG, ignore_errors=True)
    spark = session(kind, jars)
    (delta if kind == "delta" else iceberg)(spark)
    spark.stop()
    for folder in (ICEBERG / "golden").glob("*"):
        # a plan reads metadata only
        shutil.copytree(folder, TABLES / folder.name, ignore=shutil.ignore_patterns("*.parquet", "*.puffin"))
    for path in TABLES.rglob("*.crc"):
        path.unlink()


if __name__ == "__main__":
    main()
