"""A merge continues without objects that the storage lost. A window table may lack a shard."""

import pytest

from tests.support.merging import BASE_MS, DAY_MS, HOUR_MS
from tiered_index import Lookup, LostFile
from tiered_index.errors import CorruptFile
from tiered_index.format.hashing import key_hash
from tiered_index.service.jobs import merge_plan as plan_module
from tiered_index.service.jobs import merge_run as run
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.jobs.lost import give_up
from tiered_index.service.jobs.verify import check_storage
from tiered_index.service.jobs.verify_report import Report

KEYS = [f"k{number}" for number in range(60)]


@pytest.fixture
def life(merging):
    """Two days of two files each."""
    life = merging(settings={"slots": 64})
    for hour in (0, 1, 30, 31):
        life.put((BASE_MS + hour * HOUR_MS + 1000 * number, key) for number, key in enumerate(KEYS))
        life.publish()
    life.later()
    return life


def checked(life):
    report = Report()
    check_storage(life.storage, {}, report, lambda *_: None, deep=True, threads=1)
    return report


def test_a_merge_names_the_lost_object_or_merges_the_rest(life):
    gone = min(life.state.objects.values(), key=lambda stored: stored.second_min)
    life.storage.delete(gone.name)
    with pytest.raises(CorruptFile, match="--skip-lost") as caught:
        life.merge()
    assert (caught.value.file, caught.value.exit_code, life.windows()) == (gone.name, 4, [])
    report = life.merge(skip_lost=True)
    assert report.left == ((gone.file_id, "the storage lacks one of its objects"),)
    assert set(life.state.files) == {gone.file_id} and life.windows() == [(0, 24), (24, 24)]
    give_up(life.storage, life.log(), [gone.file_id])
    assert life.merge().jobs == 0 and checked(life).status == "ok"


def test_a_merge_plans_again_if_a_source_was_removed_meanwhile(life):
    behind = life.log()
    first, *rest = sorted(life.state.objects.values(), key=lambda stored: stored.second_min)
    life.storage.delete(first.name)
    give_up(life.storage, life.log(), [first.name])
    plan = plan_module.plan_merge
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(behind, "refresh", lambda: behind.state)
        patch.setattr(run, "plan_merge", lambda *given, **more: (patch.undo(), plan(*given, **more))[1])
        report = run.merge(life.storage, behind, life.clock, life.options())
    assert report.entries == sum(stored.count for stored in rest)


def test_a_table_that_lost_a_shard_answers_for_the_other_slots(life, monkeypatch):
    make = plan_module._rewrite
    monkeypatch.setattr(plan_module, "_rewrite", lambda *given: make(*given[:-1], 1 << 10))
    life.merge()
    table, shards = min(life.state.tables.items(), key=lambda pair: pair[1][0].part.begin_s)
    assert len(shards) > 2
    gone = shards[1]
    slots = gone.part.slots
    touched = {key for key in KEYS if gone.part.slot_low <= slots.slot_of(key_hash("t", key)) < gone.part.slot_high}
    assert 0 < len(touched) < len(KEYS) / 2
    with life.reader(refresh_interval_s=10**6, block_cache_bytes=0) as reader:
        reader.query("t", KEYS[0])
        life.storage.delete(gone.name)
        (missing,) = checked(life).missing
        assert (missing.object, missing.file, missing.entries) == (gone.name, table, gone.count)
        assert missing.topics == ("t",)
        give_up(life.storage, life.log(), [table])
        told = LostFile(file=table, begin_ms=gone.second_min * 1000, end_ms=gone.second_max * 1000, entries=gone.count)
        many = reader.query_many([Lookup(topic="t", key=key) for key in KEYS])
        for key, batched in zip(KEYS, many, strict=True):
            for result in (reader.query("t", key), batched):
                expected = life.model.query("t", key, max_count=None)
                if key in touched:
                    expected = [answer for answer in expected if answer.timestamp_ms >= BASE_MS + DAY_MS]
                assert (life.answers(result), result.status) == (expected, "complete")
                assert result.lost == ((told,) if key in touched else ())
    report = checked(life)
    assert (report.status, [one.object for one in report.lost]) == ("ok", [gone.name])
    left = sum(stored.count for stored in life.state.objects.values())
    assert life.merge(30 * 86400).entries == left and checked(life).status == "ok"


def test_an_erasure_leaves_a_table_that_lost_a_shard(life, monkeypatch):
    make = plan_module._rewrite
    monkeypatch.setattr(plan_module, "_rewrite", lambda *given: make(*given[:-1], 1 << 10))
    life.merge()
    table, (gone, other, *_) = min(life.state.tables.items(), key=lambda pair: pair[1][0].part.begin_s)
    low, high, slots = other.part.slot_low, other.part.slot_high, other.part.slots
    key = next(key for key in KEYS if low <= slots.slot_of(key_hash("t", key)) < high)
    life.storage.delete(gone.name)

    def erased():
        request = EraseRequest("t", (key,))
        return erase(life.storage, life.log(), request, life.clock, yes=True, now=True, grace_s=0, threads=1)

    done = erased()
    # the table of the other day is written again
    assert (done.status, done.entries, done.entries_removed) == ("remains", 4, 2)
    assert set(done.remaining) == {gone.name, other.name}
    give_up(life.storage, life.log(), [table])
    done = erased()
    assert (done.status, done.remaining, done.entries_removed) == ("erased", (), 2)
