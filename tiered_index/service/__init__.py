"""The engine: `IndexService` writes an index and answers lookups, `IndexReader` only answers lookups.

It may import config, format and storage, and the packages that these import.
"""
