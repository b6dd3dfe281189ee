"""What a reader sees: the state of the storage's log, a root beside its writer, several indexes as one.

May import lookup, files and what stands below them.
"""
