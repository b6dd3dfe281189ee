"""Processes of tests, none of which outlives the block that started it, and environments without settings."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

TOP = Path(__file__).parents[2]


def without_settings() -> dict[str, str]:
    """Return this process's environment without the engine's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TIERED_INDEX_")}


@contextmanager
def own_environment(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Within the block, hide the environment's settings, and add `more`."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("TIERED_INDEX_"):
            del os.environ[name]
    os.environ.update(more or {})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def started(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a command with pipes of text. Kill it at the block's end, also if it is stopped."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment, cwd=TOP, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()
