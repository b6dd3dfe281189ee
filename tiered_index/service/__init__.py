"""The engine: `IndexService` writes an index and answers lookups, `IndexReader` only answers.

May import config, format, storage and what is below them.
"""
