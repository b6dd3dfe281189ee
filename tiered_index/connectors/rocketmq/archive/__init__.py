"""Archives closed segments of a commit log in the index's storage, and reads messages from the log or the archive.

May import follow, log.
"""
