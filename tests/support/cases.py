"""Cases of parametrized tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def each(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return a case, as keyword arguments, of each value of each name."""
    return [{name: value} for name, some in values.items() for value in some]
