"""The process of the command line: the console script `tiered-index`, and `python -m tiered_index.cli`."""

import os
import sys


def run() -> None:
    """Run the process's own command line and exit with its code; an interrupt while it loads ends it, too."""
    try:
        _open_closed_streams()
        from tiered_index.cli.main import run as run_arguments

        run_arguments()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


def _open_closed_streams() -> None:
    """Have what a shell has closed (``>&-``) go nowhere: else the next file that is opened would take its number.

    A closed stdin stays None: a command that reads it must not take it for an empty one.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            if name != "stdin":
                setattr(sys, name, open(number, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends


if __name__ == "__main__":
    run()
