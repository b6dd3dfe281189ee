"""`python -m tests.benchmarks.peers`: the same entries in this index and in the other stores of the comparison."""
