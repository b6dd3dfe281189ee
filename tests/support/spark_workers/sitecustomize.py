"""Python runs this file first if its folder is in PYTHONPATH. It imports the modules of PySpark's workers into their
daemons. Workers are forks, hundreds of them, and each would otherwise import them again.
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
