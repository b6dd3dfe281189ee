"""Merges uploaded files into window tables.

`plan` decides from the log's state. `task` reads the inputs of one task and writes its shards. `run` runs all tasks
in this process and publishes. May import lifecycle and the folders below it.
"""
