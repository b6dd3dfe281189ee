"""A reader opens within a timeout though the storage hangs. The error says what is not done, and nothing stays open."""

import threading

import pytest

from tests.support.cold_index import cold_index
from tests.support.hanging import beside, until
from tests.support.model import Answer
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader
from tiered_index.cli.main import run
from tiered_index.config import IndexConfig
from tiered_index.errors import BudgetExceeded, InvalidArgument, StorageUnavailable
from tiered_index.service.read import parts
from tiered_index.storage import pools as workers
from tiered_index.storage.context import remaining_s
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import PrefixedStorage
from tiered_index.storage.pools import have_ended

SHORT_S, LONG_S = 0.02, 300.0


class Closing(FaultStorage):
    """Count the closes, and record the remaining time of each call."""

    def __init__(self, inner):
        super().__init__(inner)
        self.closed = 0
        self.left_s = []

    def _around(self, call, act):
        self.left_s.append(remaining_s())
        return super()._around(call, act)

    def close(self):
        self.closed += 1


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(workers, "_CLOSE_S", 0.02)


@pytest.fixture
def made(tmp_path):
    return cold_index(tmp_path / "root", files=2)


@pytest.fixture
def storage(made):
    others = set(threading.enumerate())
    yield Closing(made.inner)
    until(lambda: not any(one.name.startswith("tiered-index-log") for one in {*threading.enumerate()} - others))


def overdue(act, hang):
    """Return the error of an opening that ran out of time during a request that still runs."""
    error = beside(act)()
    assert isinstance(error, BudgetExceeded), error
    assert hang.entered.is_set()
    return error


@pytest.fixture
def up_at(monkeypatch):
    """Return a function that ends the time once only the hanging request is left."""

    def make(hang):
        def wait(futures, timeout_s):
            assert timeout_s is not None
            if hang.release.is_set():
                return have_ended(futures, None)
            until(
                lambda: (
                    (left := sum(not future.done() for future in futures)) == 0 or (left == 1 and hang.entered.is_set())
                )
            )
            return have_ended(futures, 0)

        monkeypatch.setattr(parts, "have_ended", wait)

    return make


@pytest.mark.parametrize(("operation", "prefix"), [("list", "checkpoint/"), ("get", "checkpoint/"), ("list", "log/")])
@pytest.mark.parametrize("beside_the_root", [False, True])
def test_a_storage_that_hangs(made, storage, up_at, operation, prefix, beside_the_root):
    up_at(hang := storage.hang(operation, name_prefix=prefix))
    root = made.root if beside_the_root else None
    error = overdue(lambda: made.reader(storage, timeout_s=LONG_S, root=root), hang)
    opened = str(made.root) if beside_the_root else made.inner.uri
    assert str(error) == f"timeout_s was reached while opening {opened}: its log was not read by then"
    assert error.exit_code == 6
    before = storage.closed
    assert before > 0
    hang.release.set()
    # a storage that opens too late is closed, too, except beside a root, where none opens
    opens = not beside_the_root and (operation, prefix) != ("list", "checkpoint/")
    until(lambda: not opens or storage.closed > before)
    with made.reader(storage, timeout_s=LONG_S) as reader:
        assert [Answer.of(item) for item in reader.query("t", "all")] == made.expected("t", "all")
        assert not any(
            thread.name.startswith("tiered-index-log") for thread in threading.enumerate() if not thread.daemon
        )


def test_the_time_passes(made, storage):
    hang = storage.hang("*")
    assert isinstance(beside(lambda: made.reader(storage, timeout_s=SHORT_S))(), BudgetExceeded)
    hang.release.set()


def test_the_time_is_of_the_opening_alone(made, storage):
    with made.reader(storage, timeout_s=LONG_S) as reader:
        assert storage.left_s
        assert all(left_s is not None and 0 < left_s <= LONG_S for left_s in storage.left_s)
        storage.left_s.clear()
        assert [Answer.of(item) for item in reader.query("t", "all")] == made.expected("t", "all")
        assert storage.left_s
        assert set(storage.left_s) == {None}


def test_an_error_within_the_time_is_raised_itself(made, storage):
    storage.fail("list", name_prefix="checkpoint/")
    with pytest.raises(StorageUnavailable):
        made.reader(storage, timeout_s=LONG_S)
    for wrong in (0, -1, float("nan"), "1"):
        with pytest.raises(InvalidArgument, match="timeout_s"):
            made.reader(storage, timeout_s=wrong)
    assert storage.calls("list") == 1


@pytest.fixture
def below(tmp_path):
    """Two indexes below one prefix."""
    shared = MemoryStorage()
    for name in ("a", "b"):
        cold_index(tmp_path / name, files=1, storage=PrefixedStorage(shared, name))
    return Closing(shared)


def test_a_prefix_whose_listing_hangs(below, up_at):
    up_at(hang := below.hang("list", nth=3))  # after the listings that find no log at the prefix
    error = overdue(lambda: IndexReader.open(storage_backend=below, timeout_s=LONG_S), hang)
    assert str(error) == f"timeout_s was reached while listing the objects below {below.uri}"
    hang.release.set()


@pytest.mark.parametrize(
    "command", [("query", "t", "all"), ("query", "t", "all", "--messages"), ("message", "x", "--topic", "t")]
)
def test_a_command_with_a_time(made, storage, up_at, command, monkeypatch, capsys):
    monkeypatch.setattr(IndexConfig, "open_storage", lambda config: storage)
    up_at(hang := storage.hang("list", name_prefix="log/"))
    ended = beside(lambda: run([*command, "--storage", "memory://elsewhere", "--timeout", str(LONG_S)]))()
    assert isinstance(ended, SystemExit)
    assert ended.code == BudgetExceeded.exit_code
    assert f"opening {made.inner.uri}: its log was not read by then" in capsys.readouterr().err
    hang.release.set()
