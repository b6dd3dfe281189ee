"""The command line `tiered-index`: one module for each command; `main` registers them (docs/reference.md)."""
