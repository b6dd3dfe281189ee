"""Storages of named objects: the contract, its backends and its wrappers.

May import errors, documents, clock.
"""
