"""Verified reads of stored files: caches in memory and on disk, filters, and the pool of range reads.

May import log, threads.
"""
