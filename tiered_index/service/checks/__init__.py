"""The checks behind `verify`, of single files, a root, a storage's log and objects; repairs of what they found.

May import lifecycle, reading and what stands below them.
"""
