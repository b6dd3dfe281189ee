"""Benchmarks of this machine, and beside other systems: `python -m tests.benchmarks --help`."""
