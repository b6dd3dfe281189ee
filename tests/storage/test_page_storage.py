"""The storage that docs/examples shows to authors of storages keeps the contract."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiered_index.storage.base import Storage
from tiered_index.testing.storage_conformance import StorageConformance

_EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "sql_storage.py"


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    program = _EXAMPLE.read_text()
    lines = [line for line in program.splitlines() if line.strip()]
    assert len(lines) < 120, "docs/embedding.md promises about 100 lines"
    return runpy.run_path(str(_EXAMPLE))


class TestSqlStorage(StorageConformance):
    racers, readers, many = 4, 4, 1_050

    @pytest.fixture
    def storage(self, shown: dict[str, Any], tmp_path: Path) -> Iterator[Storage]:
        with shown["SqlStorage"](tmp_path / "objects") as storage:
            yield storage

    @pytest.fixture
    def another(self, shown: dict[str, Any], tmp_path: Path) -> Iterator[Storage]:
        with shown["SqlStorage"](tmp_path / "objects") as another:
            yield another
