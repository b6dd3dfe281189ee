"""Following a live commit log into an index: dispatcher, the end that is being written, fingerprints of what was read.

May import log.
"""
