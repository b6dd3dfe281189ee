"""`python -m tiered_index.cli`: the same as the console script, for processes started by this interpreter."""

from tiered_index.cli.main import run

if __name__ == "__main__":
    run()
