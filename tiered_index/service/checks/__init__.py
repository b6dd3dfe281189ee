"""The checks behind `verify`: of single files, of a root, of a storage's log and objects.

May import lifecycle, reading and what stands below them.
"""
