"""Counts the bytes that tests read of a kind of text."""

from typing import Any

import pytest


def counted_reads(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[int]:
    """Return a list that gets the length of each read of a kind of text."""
    lengths, of_text = list[int](), kind.read

    def counted(self: Any, size: int) -> bytes:
        data: bytes = of_text(self, size)
        lengths.append(len(data))
        return data

    monkeypatch.setattr(kind, "read", counted)
    return lengths
