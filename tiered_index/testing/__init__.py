"""Tests that every storage must pass, for authors of storages.

docs/embedding.md shows how to use them. docs/api.md lists all public names.
"""
