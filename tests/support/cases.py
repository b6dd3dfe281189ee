"""Cases of parametrized tests."""

from collections.abc import Iterable
from typing import Any


def each(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return a test case per value of each name, as keyword arguments."""
    return [{name: value} for name, some in values.items() for value in some]
