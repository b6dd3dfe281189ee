"""`python -m tiered_index` is the command line, too."""

from tiered_index.cli.__main__ import run

if __name__ == "__main__":
    run()
