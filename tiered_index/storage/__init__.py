"""Bytes in, bytes out: one contract (`base`), its backends, and wrappers that meter, delay or prefix any of them.

`opening.open_storage(uri)` is the way in. Nothing here knows what the bytes mean.
"""
