"""Benchmarks of this machine, and of this project beside other systems: `python -m tests.benchmarks --help`."""
