"""Fault: a file that can't be read makes the answer shorter, without an error.

RocketMQ: golden fault 4.
RocketMQ: `queryAsync` logged a failed read and completed with the results of the other files: 60 of 80 results, no
error.
Here: a lookup that can't read a file raises a typed error. If partial answers are allowed, it says `partial` and names
the file.
"""

from __future__ import annotations

import pytest

from tests.support.damage import flip
from tests.support.model import Answer
from tiered_index.errors import CorruptFile, StorageUnavailable

T = 1_700_000_000_000
FILES, EACH = 4, 20
FAULTS = {
    "no answer": lambda storage, name: storage.fail("get_range", name_prefix=name, times=None),
    "wrong": lambda storage, name: storage.corrupt("get_range", mode="wrong", name_prefix=name, times=None),
    "short": lambda storage, name: storage.corrupt("get_range", mode="short", name_prefix=name, times=None),
    "lost": lambda storage, name: storage.inner.delete(name),
    "cut": lambda storage, name: storage.inner.put(name, storage.inner.get(name)[:100]),
}


@pytest.fixture
def written(make_life):
    """Four files of twenty entries of one key, a hundred seconds each, as in the golden data."""
    life = make_life(items=EACH + 1, block_cache_bytes=0, directory_cache_bytes=0)  # no answer comes from memory
    for number in range(FILES * EACH):
        life.put("t", 0, "k", number, timestamp_ms=T + number * 5000)
    return life


def check(life, number, failing, error):
    """Check that no answer is short because the file with this number can't be read."""
    others = [answer for answer in life.model.query("t", "k", max_count=None) if answer.offset // EACH != number]
    for name, ask in life.asking():
        with pytest.raises(error):
            ask("t", "k", max_count=1000)
        result = ask("t", "k", max_count=1000, allow_partial=True)
        assert result.status == "partial", name
        assert [report.file for report in result.failed] == [failing.file_id], name
        assert all(report.error for report in result.failed)
        assert [Answer.of(item) for item in result] == others, name
        # a lookup that does not need the file is whole
        low, high = (0, number * 100_000 - 1) if number else (100_000, FILES * 100_000)
        window = (T + low, T + high)
        assert ask("t", "k", *window).status == "complete"
        assert [Answer.of(item) for item in ask("t", "k", *window)] == life.model.query("t", "k", *window)


@pytest.mark.parametrize("number", [0, FILES - 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_in_the_storage(written, fault, number):
    written.bring("storage")
    failing = written.service.files()[number]
    name = f"data/{failing.file_id}/" if fault not in ("lost", "cut") else failing.stored.stored.name
    FAULTS[fault](written.storage, name)
    check(written, number, failing, StorageUnavailable if fault == "no answer" else CorruptFile)
    if fault not in ("lost", "cut"):
        written.storage.clear()
        written.check("t", "k", max_count=1000)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("state", ["unsealed", "compacted"])
def test_a_local_file(written, state, number):
    written.bring(state)
    failing = written.service.files()[number]
    (path,) = (written.root / state).glob(f"{failing.file_id}.index")
    written.crash()
    flip(path, 28 + 8 * 7 + (40 if state == "unsealed" else 0) + 14)
    data = path.read_bytes()
    written.open()
    written.state = state
    check(written, number, failing, CorruptFile)
    assert path.read_bytes() == data


def test_the_copy_in_the_storage_makes_up_for_a_damaged_local_one(written):
    written.bring("uploaded")
    failing = written.service.files()[1]
    path = written.root / "uploaded" / f"{failing.file_id}.index"
    flip(path, 28 + 8 * 7 + 14)
    written.check("t", "k", max_count=1000)
    written.storage.fail("get_range", name_prefix="data/", times=None)
    for name, ask in written.asking():
        if name.startswith("service"):
            with pytest.raises(StorageUnavailable):
                ask("t", "k", max_count=1000)
