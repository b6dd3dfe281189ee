"""Pure codecs: bytes of one file to arrays and back; no I/O, no clock, no threads.

May import errors, documents, types.
"""
