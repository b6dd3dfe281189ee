"""`python -m tests.benchmarks SUITE [OPTIONS]`: measure one suite. `make bench SUITE=...` runs it."""

from __future__ import annotations

import os
import sys

from tests.benchmarks.command import main as run
from tests.real_s3.server import ENDPOINT_VARIABLE

_FULL = ("--slots", "5000000", "--items", "20000000", "--preset")
_BUILD = ("--root-dir", "build/billion", "--out", "build/billion.json")
_OTHERS = ("files", "kafka", "peers", "rocketmq", "segments", "service")


def main(arguments: list[str]) -> None:
    """Run a suite with its options."""
    suite, options = arguments[0] if arguments else "--help", arguments[1:]
    if suite == "quick":
        run(["--quick", *options])
    elif suite == "machine":
        for preset in ("native", "rocketmq"):
            try:
                run([*_FULL, preset, *options])
            except SystemExit as end:
                if end.code:
                    raise
    elif suite == "s3":
        server = [] if ENDPOINT_VARIABLE in os.environ else ["-m", "tests.real_s3.server", "run", "--", sys.executable]
        os.execv(sys.executable, [sys.executable, *server, "-m", "tests.real_s3.bench", *options])
    elif suite == "spark":
        run(["spark", "spark-lookup", *options])
    elif suite == "billion":
        run(["billion", *_BUILD, *options])
    elif suite == "cold":
        run(["cold-peers", "--out", "build/cold.json", *options])
    elif suite == "ranges":
        run(["cold", *options])
    elif suite in _OTHERS:
        os.execv(sys.executable, [sys.executable, "-m", f"tests.benchmarks.{suite}", *options])
    else:
        run(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
