"""Merge: uploaded files become window tables.

`plan` decides from the log's state, `pieces` reads, `writing` makes the shards of a task, `run` does it all in this
process and publishes. May import lifecycle and what is below it.
"""
