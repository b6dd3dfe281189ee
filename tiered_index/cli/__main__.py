"""The entry point of the console script `tiered-index` and of `python -m tiered_index`."""

import gc
import os
import signal
import sys
from typing import Any


def run() -> None:
    """Run the command line and exit with its code; interrupts also end it while it loads and exits."""
    sys.unraisablehook = _unraisable
    try:
        if os.getpid() == 1:
            # the system drops SIGTERM for the first process of a container if the process has no handler
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        _open_closed_streams()
        # Collections during the imports and at exit would take a fifth of the time. A command enables them.
        gc.disable()
        # OpenBLAS starts threads for products of large matrices when it is loaded; there are none here.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        try:
            from tiered_index.cli.main import run as run_arguments
        except (ImportError, MemoryError) as error:
            if "--debug" in sys.argv:
                raise
            sys.stderr.write(
                f"tiered-index can't be loaded: {error or 'memory is lacking'}: check the limit of memory "
                "(`ulimit -v`) and the installation (--debug shows where)\n"
            )
            sys.exit(3)  # `exit_codes` may be what can't be loaded

        run_arguments()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    finally:
        if not gc.isenabled():
            gc.freeze()


def _unraisable(error: Any) -> None:
    """Do as `sys.unraisablehook`, but end the process at an interrupt, which Python only prints in a finalizer."""
    if error.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(error)
        return
    os.write(2, b"interrupted\n")
    os._exit(130)


def _open_closed_streams() -> None:
    """Open streams that the shell has closed (``>&-``) on the null device, so that no file gets their numbers.

    A closed stdin stays None: a command that reads it must not take it for an empty one.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            if name != "stdin":
                setattr(sys, name, open(number, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends


if __name__ == "__main__":
    run()
