"""Erasure: finds entries that tombstones hide in stored bytes (`find`), removes them, and certifies it (`erase`).

It may import checks and merge, and the packages that these import.
"""
