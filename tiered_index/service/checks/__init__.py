"""The checks behind `verify`: of files, of a root, and of a storage's log and objects. Also repairs of their findings.

It may import lifecycle and reading, and the packages that these import.
"""
