"""`tiered-index bench`: what this machine makes of the engine, by suites of figures."""
