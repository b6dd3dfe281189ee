"""Caches in memory and on disk."""
