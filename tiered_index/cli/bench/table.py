"""A table of a suite beside its figures: what has more sides than one number. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Table"]


@dataclass(frozen=True)
class Table:
    """Rows of texts and numbers; None is an empty cell. `suite` is filled in by whoever runs it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    suite: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the table JSON-ready."""
        return {
            "suite": self.suite,
            "title": self.title,
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
        }
