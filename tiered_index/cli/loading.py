"""Loads what a command line needs, when it needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tiered_index.cli.output import tell

T = TypeVar("T")


def loaded(command: str | None, load: Callable[[], T]) -> T:
    """Return what `load` loads for a command. Raises `ImportError`, which names the command."""
    try:
        return load()
    except KeyboardInterrupt:
        tell("interrupted\n")
        raise
    except (ImportError, MemoryError, OSError) as error:  # `run` would take an OSError for one of stdout
        raise ImportError(f"{command} can't be loaded: {error}") from error
