"""One handle a file: unsealed, compacted wherever its bytes lie, and window tables; and the search in each.

May import catalog, cold, root and what stands below them.
"""
