"""The storage's log: records, the state they add up to, checkpoints, summaries, and a writer's session (epoch, lease).

May import the root, where it notes what the root has seen of the log, and threads.
"""
