"""The index's hash as a column of Spark, made in Python by Arrow batches: a fold of Spark's own expressions over code
units takes eight times the CPU. Its text for SQL, which asks nothing of Python workers, is `format.hash_sql`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.format.hashing import code_units, hash_batch, known_rule

if TYPE_CHECKING:
    from pyspark.sql import Column


def hash_key(topic: Column | str, key: Column | str, rule: Literal["abs", "mask"] = "abs") -> Column:
    """Return `tiered_index.hash_key` of two columns (or their names) as an int column, null where either is.

    Columns of another type are hashed as Spark's text of them. Executors need this package. `rule` as there. Raises
    `InvalidArgument` for another one.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
    from pyspark.sql.pandas.functions import arrow_udf

    known_rule(rule)

    def hashed(topics: pa.Array, keys: pa.Array) -> pa.Array:
        null = pc.or_(pc.is_null(topics), pc.is_null(keys))
        encoded = pc.fill_null(topics, "").dictionary_encode()
        names, index = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
        hashes, _ = hash_batch(names, index, code_units(pc.fill_null(keys, "")), fingerprints=False, rule=rule)
        return pa.array(hashes, mask=null.to_numpy(zero_copy_only=False))

    hashed.__name__ = "hash_key"  # the column's name, and what plans show
    make: Any = arrow_udf  # whose declared overloads ask for what it infers
    texts = (F.col(one) if isinstance(one, str) else one for one in (topic, key))
    return cast("Column", make(hashed, "int")(*(text.cast("string") for text in texts)))
