"""The command line: `tiered-index`. One module a command; `main` puts them together."""
