"""`python -m tests.benchmarks.cold_peers`: the same entries in an object store, here and in the stores of others."""
