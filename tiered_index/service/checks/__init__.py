"""The checks behind `verify`, of single files, a root, a storage's log and objects; repairs of their findings.

May import lifecycle, reading and what is below them.
"""
