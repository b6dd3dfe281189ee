"""The suites, one module each; `SUITES` in `tiered_index.cli.bench.running` lists them."""
