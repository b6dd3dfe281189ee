"""The storage contract, its backends and its wrappers: named objects of bytes.

May import errors, documents, clock.
"""
