"""Indexes that are merged."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.merging import Merging


@pytest.fixture
def make_life(tmp_path: Path) -> Iterator[Callable[..., Merging]]:
    """Return a function that makes an index to be merged; all writers are let go of at the end."""
    made: list[Merging] = []

    def make(**given: Any) -> Merging:
        made.append(Merging(tmp_path / f"life{len(made)}", **given))
        return made[-1]

    yield make
    for life in made:
        life.close()


@pytest.fixture
def life(make_life: Callable[..., Merging]) -> Merging:
    return make_life()
