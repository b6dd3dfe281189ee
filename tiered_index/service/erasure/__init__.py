"""Erasure: entries that tombstones hide, found in stored bytes (`find`), taken out of them, and certified (`erase`).
May import merge and what stands below it.
"""
