"""The process of the command line: the console script `tiered-index`, and `python -m tiered_index`."""

import _thread
import gc
import os
import sys
import threading
from typing import Any

_AGAIN_S = 0.01


def run() -> None:
    """Run the process's own command line and exit with its code; an interrupt while it loads or ends counts, too."""
    interrupts = _Interrupts()
    sys.unraisablehook = interrupts.unraisable
    try:
        _open_closed_streams()
        # What is loaded stays: looking for garbage meanwhile, and at exit, would take a fifth of the time. A command
        # turns it on.
        gc.disable()
        # NumPy's library starts threads for large products of matrices when it is loaded, and there are none here.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        from tiered_index.cli.main import run as run_arguments

        run_arguments()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    finally:
        interrupts.is_ending = True
        if not gc.isenabled():
            gc.freeze()


class _Interrupts:
    """Lets interrupts count that Python prints and forgets: those in a finalizer, and while the process ends."""

    def __init__(self) -> None:
        self.is_ending = False

    def unraisable(self, error: Any) -> None:
        """Do what `sys.unraisablehook` does, and see to it that an interrupt ends the process."""
        if error.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(error)
        elif self.is_ending:
            os.write(2, b"interrupted\n")
            os._exit(130)
        else:
            again = threading.Timer(_AGAIN_S, _thread.interrupt_main)
            again.daemon = True
            again.start()


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
