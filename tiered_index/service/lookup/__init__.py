"""The execution of lookups: budget, scan over files, query, messages.

It may import `files`, and the folders that `files` may import.
"""
