"""`tiered-index spark ...`: the data pipeline on Spark. PySpark is loaded by the command that needs it."""
