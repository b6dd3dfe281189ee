"""`expire` as a command: a dry run, then the record; the output of `query`, `merge` and `verify` afterwards."""

import re
import time

import pytest

from tiered_index import IndexService
from tiered_index.base.clock import SystemClock
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.opening import open_storage

DAY_MS = 86_400_000
TODAY_MS = time.time_ns() // 10**6 // DAY_MS * DAY_MS
DAYS = (400, 100, 10)


@pytest.fixture
def store(tmp_path):
    """A file for each of three days, with an entry of each of two topics."""
    settings = {"slots": 16, "items": 400, "background": False, "local_keep_s": 0}
    store = f"file://{tmp_path / 'store'}"
    with IndexService.open(root=tmp_path / "root", storage=store, **settings) as index:
        for day in DAYS:
            for topic in ("orders", "debug-x"):
                index.put(topic, 0, "k", day, 7, TODAY_MS - day * DAY_MS)
            index.seal()
            index.run_lifecycle()
    return store


def objects(store):
    storage = open_storage(store)
    state = StorageLog(storage, SystemClock()).open()
    return len(state.objects), len(list(storage.list("data/"))), state.number


def test_a_dry_run_then_the_record(run_here, store):
    before = objects(store)
    rule = ("--set", "retention.age_s=365d", "--set", "retention.topics.debug-*=30d", "--storage", store)
    planned = run_here("expire", *rule, "--json")
    assert planned.code == 0
    document = planned.document
    assert (document["status"], len(document["objects"]), document["entries"]) == ("planned", 1, 2)
    assert (document["mixed_objects"], document["mixed_entries"]) == (1, 1)
    assert document["bytes"] == document["objects"][0]["bytes"]
    assert document["usd_a_month"] == pytest.approx(document["bytes"] / 2**30 * 0.023)
    assert document["to_delete"] == {"objects": 0, "bytes": 0}
    assert objects(store) == before

    text = run_here("expire", *rule)
    assert re.search("entries +2\n", text.out) and re.search("mixed objects +1\n *mixed entries +1\n", text.out)
    assert "other topics: would expire before" in text.out
    assert "debug-*: would expire before" in text.out
    assert "nothing was changed: pass --yes to apply" in text.out + text.err

    done = run_here("expire", *rule, "--yes", "--json")
    assert (done.code, done.document["status"], done.document["deleted"]["objects"]) == (0, "expired", 0)
    assert objects(store) == (2, 3, before[2] + 1)
    assert run_here("expire", *rule, "--yes", "--json").document["objects"] == []
    weaker = run_here("expire", "--storage", store, "--set", "retention.age_s=9000d")
    assert "other topics: expired before" in weaker.out and "would expire" not in weaker.out

    answer = run_here("query", "orders", "k", "--storage", store, "--json").document
    assert [item["offset"] for item in answer["items"]] == [10, 100]
    assert answer["expired_before_ms"] == pytest.approx(TODAY_MS - 364.5 * DAY_MS, abs=DAY_MS)
    outcome = run_here("query", "debug-x", "k", "--storage", store)
    assert re.search("complete as of .*; entries before .* have expired", outcome.out)
    # orders has entries from before the moment, which is that of debug-x
    outcome = run_here("topics", "--storage", store)
    assert re.search("orders .*; entries before .* have expired, of some topics at least", outcome.out, re.DOTALL)

    merged = run_here("merge", "--storage", store, "--window", "1d", "--json").document
    assert [tier["expired"] for tier in merged["tiers"]] == [1]
    assert run_here("verify", "--storage", store).code == 0


def test_a_topic_that_no_object_has_is_reported(run_here, store):
    for age in ("20d", "5000d"):
        rule = [part for each in ("debgu-*", "debug-*") for part in ("--set", f"retention.topics.{each}={age}")]
        typed = ("expire", *rule, "--storage", store)
        assert "no file that was read has topic 'debgu-*'; did you mean 'debug-x'?" in run_here(*typed).err
        assert run_here(*typed, "--json").document["unknown_topics"] == ["debgu-*"]
    right = run_here("expire", "--set", "retention.topics.debug-*=20d", "--storage", store)
    assert "no file" not in right.err + right.out


def test_now_also_rewrites_objects_with_other_entries(run_here, store):
    rule = ("--set", "retention.age_s=365d", "--set", "retention.topics.debug-*=30d", "--storage", store, "--json")
    done = run_here("expire", *rule, "--now", "--yes").document
    assert (done["mixed_objects"], done["rewritten"], done["entries_removed"]) == (1, 1, 1)
    assert run_here("expire", *rule).document["mixed_objects"] == 0
    assert run_here("verify", "--storage", store).code == 0
