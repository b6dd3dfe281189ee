"""`erase` as a command: a dry run, the record, the bytes, and the certificate of each."""

import re

import pytest

from tiered_index import IndexService

BEGIN_MS = 1_700_000_000_000


@pytest.fixture
def store(tmp_path):
    """A file of two topics with two keys each."""
    store = f"file://{tmp_path / 'store'}"
    with IndexService.open(root=tmp_path / "root", storage=store, slots=16, items=400, local_keep_s=0) as index:
        for n in range(40):
            index.put("orders" if n % 2 else "pay", n % 3, f"k{n % 4}", n, 7, BEGIN_MS + n * 60_000)
        index.seal()
        index.run_lifecycle()
    return store


def test_a_dry_run_the_record_and_the_bytes(run_here, store):
    asked = ("--topic", "orders", "--key", "k1", "--storage", store)
    planned = run_here("erase", *asked, "--json")
    assert (planned.code, planned.document["status"], planned.document["entries"]) == (0, "planned", 10)
    assert planned.document["asked"]["keys"] == ["k1"]
    assert len(planned.document["objects"]) == 1 and planned.document["log_numbers"] == []
    text = run_here("erase", *asked)
    assert re.search("entries +10\n", text.out) and "would hide: entries with a time before" in text.out
    assert "nothing was changed: pass --yes to apply" in text.out + text.err

    hidden = run_here("erase", *asked, "--yes", "--json")
    assert (hidden.code, hidden.document["status"]) == (0, "hidden")
    assert hidden.document["scan"]["remaining"] and hidden.document["to_do"]
    assert run_here("query", "orders", "k1", "--storage", store, "--json").document["items"] == []
    assert len(run_here("query", "orders", "k3", "--storage", store, "--json").document["items"]) == 10

    waiting = run_here("erase", *asked, "--now", "--yes", "--json")
    assert (waiting.code, waiting.document["status"]) == (0, "pending")
    assert waiting.document["pending"] and waiting.document["scan"]["remaining"] == []
    text = run_here("erase", *asked, "--now", "--yes")
    assert text.code == 0 and re.search("status +pending", text.out) and "after the grace (3600 s)" in text.err
    done = run_here("erase", *asked, "--now", "--grace", "0", "--yes", "--json")
    assert (done.code, done.document["status"], done.document["pending"]) == (0, "erased", [])
    assert done.document["deleted"]["objects"] == 1
    people = run_here("erase", *asked, "--now", "--grace", "0", "--yes")
    assert re.search("status +erased\n", people.out)
    assert run_here("verify", "--deep", "--storage", store).code == 0
    assert len(run_here("query", "orders", "k3", "--storage", store, "--json").document["items"]) == 10


def test_the_cache_of_a_given_root_drops_erased_entries(run_here, store, tmp_path):
    cache = tmp_path / "root" / "cache"
    assert list(cache.rglob("*.trailer")) and list(cache.rglob("*.filter"))
    asked = ("erase", "--topic", "orders", "--root", tmp_path / "root", "--now", "--grace", "0", "--yes")
    assert run_here(*asked).code == 0
    assert not list(cache.rglob("*.trailer")) and not list(cache.rglob("*.filter"))


def test_progress_is_a_share_of_each_step(run_here, store, monkeypatch):
    monkeypatch.setattr("tiered_index.cli.progress._LINE_INTERVAL_S", 0)
    said = run_here("erase", "--topic", "orders", "--storage", store, "--now", "--yes").err.splitlines()
    assert said[0] == "erasing: 100 %, 1 of 1 objects read"
    assert "erasing: 100 %, 40 of 40 entries rewritten" in said


def test_a_queue_needs_a_moment_and_is_no_key(run_here, store):
    asked = ("erase", "--topic", "orders", "--storage", store)
    assert run_here(*asked, "--queue", "1").code == 2
    assert run_here(*asked, "--queue", "1", "--key", "k1", "--before", "2026-01-01").code == 2
    assert run_here(*asked, "--queue", "1", "--before", "2026-01-01").code == 0
    assert run_here("erase", "--storage", store).code == 2


def test_a_topic_that_no_file_has_is_reported(run_here, store):
    for topic, unknown in (("Orders", True), ("orders", False)):
        asked = ("erase", "--topic", topic, "--key", "nobody", "--storage", store)
        planned = run_here(*asked, "--json")
        assert (planned.code, planned.document["entries"]) == (0, 0)
        assert planned.document["unknown_topics"] == ([topic] if unknown else [])
        people = run_here(*asked)
        hint = "no file that was read has topic 'Orders'; did you mean 'orders'?"
        assert (hint in people.out + people.err) is unknown


def test_a_bound_in_seconds_is_asked_about(run_here, store):
    outcome = run_here("erase", "--topic", "orders", "--before", "1700000000", "--storage", store)
    assert outcome.code == 0, outcome.err
    assert "the erased range ends at 1970-01-20T16:13:20Z: did you mean milliseconds? 1700000000 sec" in outcome.err


@pytest.mark.parametrize("before", ["9999-12-31T23:59:59.999Z", "1700000000000000"])
def test_a_bound_at_the_end_of_9999_has_a_certificate(run_here, store, before):
    """A number of microseconds means that bound, too. The record is permanent, so the command must report it."""
    asked = ("erase", "--topic", "orders", "--before", before, "--storage", store)
    for more in ((), ("--yes",), ("--yes", "--json")):
        outcome = run_here(*asked, *more)
        assert outcome.code == 0, outcome.err
        assert "--json" in more or "before 9999-12-31T23:59:59.999Z" in outcome.out
