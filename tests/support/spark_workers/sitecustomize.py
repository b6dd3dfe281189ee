"""Python runs this file before anything else where its folder is in PYTHONPATH: it imports into the daemons of PySpark
all that their workers use. Workers are forks, hundreds of them, and each would import it anew.
"""

import gc
import importlib
import sys

if sys.orig_argv[1:3] == ["-m", "pyspark.daemon"]:
    kind = sys.orig_argv[3]
    importlib.import_module(kind)
    for name in ("entries", "lookup_function", "messages"):
        importlib.import_module(f"tiered_index.spark.datasource.{name}")
    if kind == "pyspark.worker":
        importlib.import_module("pandas")
    gc.collect()
    gc.freeze()
