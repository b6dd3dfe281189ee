"""A reader pauses inside a search while its file moves on. The writer deletes the file only after the reader's right
answer.
"""

import threading
from pathlib import Path

import pytest

from tests.support.core import compiled_core
from tests.support.hanging import beside
from tests.support.rounds import compact_only
from tests.support.storage_faults import FaultStorage
from tiered_index.service.read.files.file_view import LocalView
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import Lookup

NOW_MS = 1_700_000_000_000
COUNT = 40
ASK = {
    "query": lambda service: service.query("t", "k", max_count=1000),
    "query_many": lambda service: service.query_many([Lookup(topic="t", key="k", max_count=1000)])[0],
}
# the function that each lookup calls inside a search of a local file
INSIDE = LocalView, "find"


class Pause:
    """The first call of a function waits. `entered` and `go_on` are events."""

    def __init__(self, monkeypatch, module, name):
        self.entered, self.go_on = threading.Event(), threading.Event()
        real = getattr(module, name)

        def held(*arguments, **named):
            if not self.entered.is_set():
                self.entered.set()
                assert self.go_on.wait(30)
            return real(*arguments, **named)

        monkeypatch.setattr(module, name, held)


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*.index")}


@pytest.fixture
def storage():
    return FaultStorage(MemoryStorage())


@pytest.fixture
def service(open_index, storage):
    """One sealed file of `COUNT` messages, which is not compacted yet."""
    compiled_core()  # without it, a lookup calls other functions
    service = open_index(storage_backend=storage, background=False, local_keep_s=0.0, items=COUNT + 1)
    for number in range(COUNT):
        service.put("t", 0, "k", number, 1, NOW_MS + number * 1000)
    service.flush()
    return service


def check(result):
    assert result.status == "complete"
    assert [item.offset for item in result] == list(reversed(range(COUNT)))


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("state", ["unsealed", "compacted"])
def test_a_file_stays_while_a_reader_is_inside(service, storage, tmp_path, monkeypatch, state, ask):
    """The file is compacted, uploaded and retired meanwhile. Its local copies stay until the reader ends."""
    if state == "compacted":
        compact_only(service, storage)
    before = files_below(tmp_path / "root")
    (name,) = before
    pause = Pause(monkeypatch, *INSIDE)
    reader = beside(lambda: ASK[ask](service))
    assert pause.entered.wait(30)
    for _ in range(3):
        service.run_lifecycle()
        assert [handle.place for handle in service.files()] == ["storage"]
    # compacted/ and uploaded/ hold one file, which moves between them by renaming
    expected = {name, f"uploaded/{Path(name).name}"} if state == "unsealed" else {f"uploaded/{Path(name).name}"}
    assert files_below(tmp_path / "root") == expected
    second = ASK[ask](service)  # another reader continues meanwhile, in the storage
    assert [item.offset for item in second] == list(reversed(range(COUNT)))
    assert files_below(tmp_path / "root") == expected, "the end of another reader does not release this one's files"
    pause.go_on.set()
    check(reader())
    service.run_lifecycle()
    assert files_below(tmp_path / "root") == set(), "no reader uses the file any more"


def test_a_reader_in_the_storage_does_not_hold_up_local_files(service, storage, tmp_path):
    """A cold read hangs. Files replaced after it began wait for it, and are then deleted all at once."""
    service.seal()
    service.run_lifecycle()
    service.run_lifecycle()
    assert files_below(tmp_path / "root") == set()
    hang = storage.hang("get_range", name_prefix="data/")
    reader = beside(lambda: ASK["query"](service))
    assert hang.entered.wait(30)
    for number in range(5):
        service.put("u", 0, "k", number, 1, NOW_MS)
        service.seal()
        service.run_lifecycle()
    assert {handle.place for handle in service.files()} == {"storage"}
    retained = files_below(tmp_path / "root")
    assert retained
    hang.release.set()
    check(reader())
    service.run_lifecycle()
    assert files_below(tmp_path / "root") == set()
