"""`python -m tests.benchmarks.billion.step MODULE FUNCTION [ARGUMENT...]`: run one step; print its figures, if any."""

import importlib
import json
import sys


def main(module: str, function: str, *arguments: str) -> None:
    """Call the function, which gets texts."""
    figures = getattr(importlib.import_module(f"tests.benchmarks.billion.{module}"), function)(*arguments)
    if figures is not None:
        print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
