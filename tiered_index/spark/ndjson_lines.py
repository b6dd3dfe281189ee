"""What Spark's reader of NDJSON would pass over in silence, found before it reads: keys and messages are what was written, or an error.

Of two values in a line it takes the first, for half of a surrogate pair it puts a question mark. Other bytes than UTF-8 it refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from tiered_index.errors import InvalidArgument
from tiered_index.spark.local_files import to_read
from tiered_index.spark.ndjson_errors import first_line_without_object, line_without_object

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_lines"]

_SUSPECT = r"[}\]]\s*[^\s,\]}]|\\u[dD][89a-fA-F]"
# behind the end of an object something else, or a surrogate: few lines of messages, each looked at as a whole


def check_lines(spark: SparkSession, files: Sequence[Path]) -> None:
    """Raise `InvalidArgument`, naming file and line, where a line of local files isn't one value of Unicode. One pass over the files."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    lines = spark.read.text([to_read(file) for file in files])
    suspects = lines.where(F.col("value").rlike(_SUSPECT)).select(F.col("value").cast("binary"))
    if not (found := suspects.mapInArrow(_wrong_ones, "wrong string").limit(1).collect()):
        return
    for file in files:
        if wrong := first_line_without_object(file):
            raise InvalidArgument(f"{file}: line {wrong[0]:,} is {wrong[1]}")
    raise InvalidArgument(f"{', '.join(map(str, files[:3]))}: a line is {found[0][0]}")


def _wrong_ones(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        wrong = [found for line in batch.column(0).to_pylist() if (found := line_without_object(line))]
        if wrong:
            yield pa.record_batch({"wrong": pa.array(wrong[:1])})
            return
