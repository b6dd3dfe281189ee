"""The storage's log: records, the state they add up to, checkpoints, and a writer's session (epoch and lease).

Imports no other folder of the service.
"""
