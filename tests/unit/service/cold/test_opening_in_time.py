"""A reader opens within a timeout though the storage hangs. The error says what is not done, and nothing stays open."""

import pytest

from tests.support.cold_index import cold_index
from tests.support.hanging import beside, until
from tests.support.model import Answer
from tests.support.several_indexes import Watched
from tiered_index import IndexReader
from tiered_index.errors import BudgetExceeded, InvalidArgument, StorageUnavailable
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import PrefixedStorage

SOME_S, LONG_S = 2.0, 300.0


@pytest.fixture
def index(tmp_path):
    return cold_index(tmp_path / "root", files=2)


@pytest.fixture
def storage(index):
    return Watched(index.inner)


@pytest.mark.parametrize(
    ("operation", "prefix", "beside_the_root"),
    [("list", "checkpoint/", False), ("get", "checkpoint/", True), ("list", "log/", False)],
)
def test_a_storage_that_hangs(index, storage, operation, prefix, beside_the_root):
    hang = storage.hang(operation, name_prefix=prefix)
    root = index.root if beside_the_root else None
    error = beside(lambda: index.reader(storage, timeout_s=SOME_S, root=root))()
    opened = str(index.root) if beside_the_root else index.inner.uri
    assert isinstance(error, BudgetExceeded) and error.exit_code == 6
    assert str(error) == f"timeout_s was reached while opening {opened}: its log was not read by then"
    assert not hang.release.is_set()
    storage.clear()
    hang.release.set()
    until(lambda: storage.closed)
    with index.reader(storage, timeout_s=LONG_S) as reader:
        # the time is of the opening alone
        assert [Answer.of(item) for item in reader.query("t", "all")] == index.expected("t", "all")


def test_a_part_of_the_opening_that_reaches_the_same_time_first(index, storage):
    storage.fail("list", name_prefix="log/", error=BudgetExceeded)
    with pytest.raises(BudgetExceeded, match=f"while opening {index.inner.uri}: its log was not read by then"):
        index.reader(storage, timeout_s=LONG_S)


def test_an_error_within_the_time_is_raised_itself(index, storage):
    storage.fail("list", name_prefix="checkpoint/")
    with pytest.raises(StorageUnavailable):
        index.reader(storage, timeout_s=LONG_S)
    for wrong in (0, -1, float("nan"), "1"):
        with pytest.raises(InvalidArgument, match="timeout_s"):
            index.reader(storage, timeout_s=wrong)
    assert storage.calls("list") == 1


def test_a_prefix_whose_listing_hangs(tmp_path):
    shared = MemoryStorage()
    for name in ("a", "b"):
        cold_index(tmp_path / name, files=1, storage=PrefixedStorage(shared, name))
    below = Watched(shared)
    hang = below.hang("list", nth=3)  # after the listings that find no log at the prefix
    error = beside(lambda: IndexReader.open(storage_backend=below, timeout_s=SOME_S))()
    assert str(error) == f"timeout_s was reached while listing the objects below {below.uri}"
    hang.release.set()
