"""Bytes in, bytes out: one contract, its backends and what wraps them. May import errors, documents, clock."""
