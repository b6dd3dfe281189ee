"""Benchmarks that compare with other systems and make the figures of the pages: `python -m tests.benchmarks --help`.

What measures a user's machine alone is `tiered-index bench`.
"""
