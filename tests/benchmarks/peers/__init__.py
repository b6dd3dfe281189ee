"""`python -m tests.benchmarks.peers`: the same entries in this index and in the stores that it is compared with."""
