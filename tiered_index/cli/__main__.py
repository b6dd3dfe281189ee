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
    """Have what a shell has closed (``>&-``) go nowhere: else the next file that is opened would take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends


if __name__ == "__main__":
    run()
