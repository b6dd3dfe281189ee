"""Verified reads of stored files, and their caches in memory and on disk. It may import log and threads."""
