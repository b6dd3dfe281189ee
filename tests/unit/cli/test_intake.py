"""`ingest` handles bad messages, back-pressure and positions of batches, and waits for the storage."""

from dataclasses import replace

import pytest

from tests.support.damage import flip
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexService
from tiered_index.cli.ingest import FileIntake
from tiered_index.cli.output import ProgressDisplay
from tiered_index.cli.putting import settle
from tiered_index.errors import CorruptFile, InvalidArgument, StorageUnavailable
from tiered_index.follow import PatientPut
from tiered_index.sources.files import open_source
from tiered_index.sources.places import LocalFile
from tiered_index.storage.memory import MemoryStorage


@pytest.fixture
def storage():
    return FaultStorage(MemoryStorage())


@pytest.fixture
def make_index(tmp_path, storage):
    opened = []

    def make(**settings):
        defaults = {"slots": 10, "items": 30, "background": False, "storage": storage.uri}
        opened.append(IndexService.open(root=tmp_path / "root", storage_backend=storage, **(defaults | settings)))
        return opened[-1]

    yield make
    for index in opened:
        index.abandon()


def intake_of(index, path, **settings):
    return FileIntake(
        index,
        open_source(LocalFile(path)),
        "source",
        settings.pop("skip_bad", False),
        PatientPut(index, settings.pop("patience_s", 0.3)),
        **settings,
    )


def take_all(intake):
    for batch in intake.source.batches(intake.position):
        intake.take(batch)


def found(index, key="k1", topic="orders"):
    return sorted(item.offset for item in index.query(topic, key, max_count=1000))


def test_lines_with_and_without_topic_id_mix(make_index, write_lines, make_message):
    index = make_index()
    values = [make_message(i, topic="orders", keys=["k1"], **({"topic_id": 77} if i % 2 else {})) for i in range(8)]
    take_all(intake_of(index, write_lines(values)))
    assert found(index) == list(range(8))
    assert {i.offset for i in index.query("orders", "k1", max_count=100) if i.topic_id == 77} == {1, 3, 5, 7}


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_topic_id_of_another_topic_is_a_bad_message(make_index, write_lines, make_message, skip_bad):
    index = make_index()
    values = [make_message(i, topic="orders", keys=["k1"], topic_id=5) for i in range(6)]
    path = write_lines([*values[:2], values[2] | {"topic": "other"}, *values[3:]])
    intake = intake_of(index, path, skip_bad=skip_bad)
    if skip_bad:
        take_all(intake)
        assert (intake.messages, intake.skipped, found(index)) == (5, 1, [0, 1, 3, 4, 5])
        assert intake.skipped_reasons == {"refused by the index": 1}
    else:
        with pytest.raises(InvalidArgument, match=r"ndjson, line 3: refused by the index: topic id 5 of 'other'"):
            take_all(intake)
        assert found(index) == [0, 1]


def test_back_pressure_is_answered_by_flushing(make_index, write_lines, make_message, monkeypatch):
    monkeypatch.setattr("tiered_index.sources.files.BLOCK_BYTES", 2000)
    index = make_index(buffer_max_entries=20)
    take_all(intake_of(index, write_lines([make_message(i, topic="orders", keys=["k1"]) for i in range(200)])))
    assert found(index) == list(range(200))


def no_progress(title, total):
    return ProgressDisplay(title, total, quiet=True)


def test_settle_waits_for_a_storage_that_returns_and_fails_for_one_that_does_not(
    make_index, write_lines, make_message, storage, monkeypatch
):
    monkeypatch.setattr("tiered_index.cli.putting._PAUSE_S", 0.01)
    index = make_index()
    take_all(intake_of(index, write_lines([make_message(i) for i in range(100)])))
    storage.fail("put", times=None, name_prefix="data/")
    with pytest.raises(StorageUnavailable, match="scripted"):
        settle(index, 0.1, no_progress)
    assert set(index.health()["files"]) == {"compacted"}
    storage.clear()
    storage.fail("put", times=3, name_prefix="data/")
    settle(index, 5, no_progress)
    assert set(index.health()["files"]) == {"uploaded"}


def test_settle_raises_the_error_of_a_damaged_file(make_index, write_lines, make_message, tmp_path):
    index = make_index()
    take_all(intake_of(index, write_lines([make_message(i) for i in range(10)])))
    index.flush()
    index.abandon()
    (path,) = (tmp_path / "root" / "unsealed").glob("*.index")
    flip(path, 28 + 8 * 10 + 36 * 3)
    again = make_index()
    with pytest.raises(CorruptFile):
        settle(again, 1, no_progress)


def test_bad_messages_are_counted_by_reason_and_the_first_ones_shown(make_index, write_lines, make_message):
    bad = [b"nope", b"{", make_message(1, offset=-5), make_message(2, offset=-7), make_message(3, keys=["x" * 40_000])]
    lines = [b"{}", *bad, make_message(4, topic=None), *[b"[]"] * 20]
    intake = intake_of(make_index(), write_lines([make_message(0), *lines]), skip_bad=True)
    take_all(intake)
    assert intake.skipped_reasons == {
        "'topic' is missing": 1,
        "not JSON": 2,
        "offset is outside 0..9223372036854775807": 2,
        "key is longer than 32,767": 1,
        "topic must be text": 1,
        "not a JSON object, but an array": 20,
    }
    assert len(intake.skipped_first) == 10
    assert intake.skipped_first[0] == {"where": "line 2", "problem": "'topic' is missing"}
    assert intake.skipped_first[3] == {"where": "line 5", "problem": "offset -5 is outside 0..9223372036854775807"}


@pytest.mark.parametrize("slow", [False, True])
def test_a_message_in_quarantine_is_named_by_its_line(make_index, write_lines, make_message, slow):
    index = make_index()
    values = [make_message(i, timestamp_ms=1_700_000_000 + i) if i in (3, 5) else make_message(i) for i in range(9)]
    intake = intake_of(index, write_lines([*values, *[b"nope"] * slow]), skip_bad=True)
    take_all(intake)
    index.flush()
    assert index.health()["quarantined_entries"] == 4
    told = [(m["where"], m["offset"], m["timestamp_ms"]) for m in intake.quarantined]
    assert told == [("line 4", 3, 1_700_000_000), ("line 6", 5, 1_700_000_000)]


def test_a_message_in_quarantine_that_no_line_matches_is_named_by_its_batch(make_index, write_lines, make_message):
    intake = intake_of(make_index(), write_lines([make_message(3, timestamp_ms=1_700_000_003)]))
    (batch,) = intake.source.batches(0)
    assert batch.columns is not None
    intake.take(replace(batch, records=lambda: iter(())))
    assert [one["where"] for one in intake.quarantined] == [f"bytes up to {batch.end:,}"]
