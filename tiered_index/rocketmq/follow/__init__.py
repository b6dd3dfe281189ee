"""Following a live commit log into an index: dispatcher, unfinished end, fingerprints of read messages.

May import log.
"""
