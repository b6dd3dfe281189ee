"""The storage's log: records, the state they add up to, checkpoints, and a writer's session (epoch and lease).

May import the root: what it has seen of the log is noted there.
"""
