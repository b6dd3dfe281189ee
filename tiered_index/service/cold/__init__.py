"""Verified reads of stored files, and their caches in memory and on disk. May import log, threads."""
