"""The storage that docs/embedding.md shows to authors of storages keeps the contract."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiered_index.storage.base import Storage
from tiered_index.testing.storage_conformance import StorageConformance

_PAGE = Path(__file__).parents[2] / "docs/embedding.md"


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    (program,) = [block for block in _PAGE.read_text().split("```python\n")[1:] if "class SqlStorage" in block]
    program = program.partition("```")[0]
    lines = [line for line in program.splitlines() if line.strip()]
    assert len(lines) < 120, "the page promises about 100 lines"
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(program, str(_PAGE), "exec"), names)
    return names


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
