"""Erasure: entries that tombstones hide, found in stored bytes (`find`), taken out of them, and certified (`erase`).
May import checks, merge and what is below them.
"""
