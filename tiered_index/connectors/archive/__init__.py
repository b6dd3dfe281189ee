"""The columnar archive of all connectors: its writers, readers and erasure."""
