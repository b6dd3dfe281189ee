"""The storage's log: records, the resulting state, checkpoints, and a writer's session (epoch and lease).

It may import the root, in which it notes the log position that the root has seen, and threads.
"""
