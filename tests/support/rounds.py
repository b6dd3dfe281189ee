"""Rounds of an index's life cycle."""

import pytest

from tests.support.storage_faults import FaultStorage
from tiered_index import IndexService
from tiered_index.errors import StorageUnavailable


def upload(index: IndexService, rounds: int = 1) -> None:
    """Seal all entries and upload their files. A second round retires local copies."""
    index.seal()
    for _ in range(rounds):
        index.run_lifecycle()


def compact_only(index: IndexService, faulty: FaultStorage) -> None:
    """Seal all entries and compact a file, which is not uploaded."""
    index.seal()
    faulty.fail("put", name_prefix="data/")
    with pytest.raises(StorageUnavailable):
        index.run_lifecycle()
    assert "compacted" in {handle.place for handle in index.files()}
