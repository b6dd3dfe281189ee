"""Compacted files in memory: read as a reader reads them, and verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tiered_index.format.layout import NATIVE, Layout
from tiered_index.format.verify import Finding, verify_compacted

__all__ = ["SMALL", "parts", "reader", "verify"]

SMALL = Layout(NATIVE, NATIVE.schema, 5, 20)


def reader(data: bytes) -> Callable[[int, int], bytes]:
    """Return the function (position, length) -> bytes of a file."""
    return lambda position, length: data[position : position + length]


def verify(data: bytes, **more: Any) -> list[Finding]:
    """Return what `verify_compacted` finds in a file of that name."""
    return verify_compacted(reader(data), len(data), "file", **more)


def parts(findings: Iterable[Finding]) -> set[str]:
    """Return the parts of the file that findings are about."""
    return {finding.part for finding in findings}
