"""Seeded defects: each is put into a copy of the tree, and a test named beside it must turn red. `make mutants`;
`catalogue` holds them.
"""
