"""The index's hash as a Spark column, computed by Java's own method in Spark's generated code. `format.hash_sql` is
the same as SQL text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.format.keys.hashing import code_units, hash_batch, known_rule
from tiered_index.spark.frames import arrow_function

if TYPE_CHECKING:
    from pyspark.sql import Column


def hash_key(topic: Column | str, key: Column | str, rule: Literal["abs", "mask"] = "abs") -> Column:
    """Return `tiered_index.hash_key` of two columns (or their names) as an int column `hash_key`, null if either is.

    Columns of other types are hashed as their text in Spark. Raises `InvalidArgument` for an unknown `rule`. If the
    driver has no access to Java (Spark Connect), Python workers hash, and executors need this package.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    known_rule(rule)
    topics, keys = ((F.col(column) if isinstance(column, str) else column).cast("string") for column in (topic, key))
    hashed = _by_java(F.concat(topics, F.lit("#"), keys))
    if hashed is None:
        return _by_arrow(topics, keys, rule).alias("hash_key")
    # as long, abs can't overflow; the least int becomes 0
    whole = F.abs(hashed.cast("long")) if rule == "abs" else hashed
    return whole.bitwiseAND(2**31 - 1).cast("int").alias("hash_key")


def _by_java(text: Column) -> Column | None:
    """Return Java's `String.hashCode` of a column, None if Java or the classes can't be reached.

    SQL has no function that calls a method; Spark's own encoders use this expression.
    """
    from py4j.protocol import Py4JError
    from pyspark import SparkContext
    from pyspark.sql.classic.column import Column as ClassicColumn

    context: Any = SparkContext._active_spark_context
    if context is None or not isinstance(text, ClassicColumn):
        return None
    java = context._jvm
    spark, none = java.org.apache.spark.sql, java.PythonUtils.toSeq([])
    try:
        string = spark.types.ObjectType(java.java.lang.Class.forName("java.lang.String"))
        number = spark.types.DataType.fromDDL("int")
        columns, call = spark.classic.ExpressionUtils, spark.catalyst.expressions.objects.Invoke
        as_text = call(columns.expression(text._jc), "toString", string, none, none, True, False, True)
        hashed = call(as_text, "hashCode", number, none, none, True, False, True)
        return cast("Column", ClassicColumn(columns.column(hashed)))
    except (Py4JError, TypeError):  # TypeError: py4j returns a missing class as a package, which can't be called
        return None


def _by_arrow(topics: Column, keys: Column, rule: Literal["abs", "mask"]) -> Column:
    def hashed(topics: pa.Array, keys: pa.Array) -> pa.Array:
        # pandas has no type for a column of nulls
        topics, keys = topics.cast(pa.string()), keys.cast(pa.string())
        null = pc.or_(pc.is_null(topics), pc.is_null(keys))
        encoded = pc.fill_null(topics, "").dictionary_encode()
        names, index = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
        hashes, _ = hash_batch(names, index, code_units(pc.fill_null(keys, "")), fingerprints=False, rule=rule)
        return pa.array(hashes, mask=null.to_numpy(zero_copy_only=False))

    return cast("Column", arrow_function(hashed, "int")(topics, keys))
