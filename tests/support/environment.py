"""The environment of a program that makes its own settings: the demo and the benchmarks."""

import contextlib
import os
from collections.abc import Iterator, Mapping

_SETTINGS = "TIERED_INDEX_"


@contextlib.contextmanager
def own_environment(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Within the block, hide the environment's settings, and add `more`."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(_SETTINGS):
            del os.environ[name]
    os.environ.update(more or {})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
