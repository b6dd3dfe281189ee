"""The inventory counts entries and bytes by topic, day and state.

Its whole numbers add up to those of the files. Some of them are estimates.
"""

import datetime as dt

import pytest

from tests.support.rounds import upload
from tiered_index import IndexReader
from tiered_index.errors import BudgetExceeded, CorruptFile, StorageUnavailable
from tiered_index.service.read.inventory import _shared

DAY_MS = 86_400_000
T = 19_700 * DAY_MS
DAY = dt.date(1970, 1, 1) + dt.timedelta(days=19_700)


@pytest.fixture
def now(clock):
    clock.advance((T + 3 * DAY_MS - clock.now_ms()) / 1000)


def put(index, topic, times_ms, first=0):
    for offset, time_ms in enumerate(times_ms, first):
        index.put(topic, 0, f"k{offset}", offset, 10, time_ms)


def rows(table):
    return [(r["topic"], r["day"], r["state"], r["entries"], r["estimated"]) for r in table.to_pylist()]


def test_days_and_states_of_topics(now, open_index, storage, clock, tmp_path):
    index = open_index("root", items=200, local_keep_s=0, prices={"storage_per_gib_month_usd": 1.0})
    put(index, "a", range(T, T + 12_000, 1000))
    put(index, "b", [T + DAY_MS - 2000, T + DAY_MS - 1000, T + DAY_MS, T + DAY_MS + 1000], 12)
    put(index, "old", [0, 5 * DAY_MS], 30)
    upload(index, rounds=2)
    put(index, "a", [T + 2 * DAY_MS], 50)
    table = index.du()
    assert rows(table) == [
        ("a", DAY, "storage", 12, False),
        ("a", DAY + dt.timedelta(days=2), "buffer", 1, False),
        ("b", DAY, "storage", 2, True),
        ("b", DAY + dt.timedelta(days=1), "storage", 2, True),
        ("old", None, "storage", 2, False),
    ]
    stored = sum(index_object.size_bytes for index_object in index.log_state.objects.values())
    assert sum(table["bytes"].to_pylist()) == stored
    assert sum(table["usd_a_month"].to_pylist()) == pytest.approx(stored / 2**30)
    index.flush()
    with IndexReader.open(root=tmp_path / "root", storage_backend=storage, clock=clock) as beside:
        assert [row for row in rows(beside.du()) if row[2] == "unsealed"] == [
            ("a", DAY + dt.timedelta(days=2), "unsealed", 1, False)
        ]
        files = beside.files_table().to_pylist()
        assert {(row["state"], row["entries"]) for row in files} == {("storage", 16), ("storage", 2), ("unsealed", 1)}
        assert sum(row["bytes"] for row in files) == sum(beside.du()["bytes"].to_pylist())
    assert index.archive("store", 0, 5000, lambda position, length: bytes(length))
    (segment,) = index.archived()
    (row,) = [row for row in index.du().to_pylist() if row["state"] == "archived"]
    assert (row["topic"], row["bytes"]) == (None, segment.object_bytes)
    assert row["usd_a_month"] == pytest.approx(segment.object_bytes / 2**30)
    storage.delete_many([*index.log_state.objects])
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        with pytest.raises(CorruptFile, match="does not have it"):
            reader.du()


@pytest.mark.parametrize("how", ["away", "budget"])
def test_a_record_that_can_not_be_read_leaves_out_only_the_files_that_it_may_concern(now, open_index, faulty, how):
    index = open_index("root", storage_backend=faulty)
    put(index, "a", [T])
    upload(index)
    put(index, "b", [T + 1000], 1)
    index.seal()
    # a record since the file of b was begun
    index.archive("store", 0, 10, lambda position, length: bytes(length))
    limits = {"max_requests": 0} if how == "budget" else {}
    if how == "away":
        faulty.fail("*", times=None)
    answer = index.topics(allow_partial=True, **limits)
    assert ([topic.topic for topic in answer], answer.status) == (["a"], "partial")
    assert [(report.place, report.begin_ms) for report in answer.failed] == [("unsealed", T + 1000)]
    with pytest.raises(BudgetExceeded if limits else StorageUnavailable) as caught:
        index.topics(**limits)
    if limits:
        assert [topic.topic for topic in caught.value.result] == ["a"]
    else:
        for call in (index.du, index.export):
            with pytest.raises(StorageUnavailable):
                call()
    faulty.clear()
    assert [topic.topic for topic in index.topics()] == ["a", "b"]


def test_shares_are_whole_and_add_up():
    weights = [(10, [1]), (10, []), (7, [0, 0]), (10, [1, 1, 1]), (0, [5, 5]), (3, [1, 2])]
    assert [_shared(*weight) for weight in weights] == [[10], [], [7, 0], [3, 4, 3], [0, 0], [1, 2]]
