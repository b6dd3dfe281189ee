"""The engine: `IndexService` writes and answers, `IndexReader` answers.

May import config, format, storage and what stands below them.
"""
