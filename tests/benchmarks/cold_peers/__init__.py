"""`python -m tests.benchmarks.cold_peers`: the same entries in an object store, in this index and in other stores."""
