"""Runs the command line as `python -m tiered_index`."""

from tiered_index.cli.__main__ import run

if __name__ == "__main__":
    run()
