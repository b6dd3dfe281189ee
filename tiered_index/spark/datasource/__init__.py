"""Spark's data sources: entries of an index and messages of a commit log as rows, batch, stream and write.

May import audit, lookup, build.
"""
