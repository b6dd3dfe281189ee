"""Seeded defects. `pytest tests/mutants/red.py` puts each into a copy of the tree; the test that `catalogue` names with
it must then fail.
"""
