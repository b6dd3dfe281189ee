"""`format("rocketmq_commitlog")` for `spark.read` and `spark.readStream`: a commit log's messages as rows.

docs/spark-sources.md.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from tiered_index.spark.datasource.messages import OPTIONS, MessageReader, MessageSettings
from tiered_index.spark.datasource.options import Options
from tiered_index.spark.datasource.stream import MessageStreamReader

__all__ = ["MessageSource"]


class MessageSource(DataSource):
    """Commit logs, in batch and as a stream."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "rocketmq_commitlog"

    def schema(self) -> StructType:
        """Return the columns of a message."""
        return self._settings().columns

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        return MessageReader(self._settings(), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a stream."""
        return MessageStreamReader(self._settings(), schema)

    def _settings(self) -> MessageSettings:
        return MessageSettings.of(Options(self.name(), dict(self.options), OPTIONS))
