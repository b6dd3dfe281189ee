"""`erase` as a command: a dry run, the record, the bytes, and the certificate of each."""

import re

import pytest

from tiered_index import IndexReader, IndexService

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
    request = ("--topic", "orders", "--key", "k1", "--storage", store)
    planned = run_here("erase", *request, "--json")
    assert (planned.code, planned.document["status"], planned.document["entries"]) == (0, "planned", 10)
    assert planned.document["asked"]["keys"] == ["k1"]
    assert len(planned.document["objects"]) == 1 and planned.document["log_numbers"] == []
    text = run_here("erase", *request)
    assert re.search("entries +10\n", text.out) and "would hide: entries with a time before" in text.out
    assert "nothing was changed: pass --yes to apply" in text.out + text.err

    hidden = run_here("erase", *request, "--yes", "--json")
    assert (hidden.code, hidden.document["status"]) == (0, "hidden")
    assert hidden.document["scan"]["remaining"] and hidden.document["to_do"]
    assert run_here("query", "orders", "k1", "--storage", store, "--json").document["items"] == []
    assert len(run_here("query", "orders", "k3", "--storage", store, "--json").document["items"]) == 10

    waiting = run_here("erase", *request, "--now", "--yes", "--json")
    assert (waiting.code, waiting.document["status"]) == (0, "pending")
    assert waiting.document["pending"] and waiting.document["scan"]["remaining"] == []
    text = run_here("erase", *request, "--now", "--yes")
    assert text.code == 0 and re.search("status +pending", text.out) and "after the grace (3600 s)" in text.err
    done = run_here("erase", *request, "--now", "--grace", "0", "--yes", "--json")
    assert (done.code, done.document["status"], done.document["pending"]) == (0, "erased", [])
    assert done.document["deleted"]["objects"] == 1
    people = run_here("erase", *request, "--now", "--grace", "0", "--yes")
    assert re.search("status +erased\n", people.out)
    assert run_here("verify", "--deep", "--storage", store).code == 0
    assert len(run_here("query", "orders", "k3", "--storage", store, "--json").document["items"]) == 10


def test_the_cache_of_a_given_root_drops_erased_entries(run_here, store, tmp_path):
    cache = tmp_path / "root" / "cache"
    assert list(cache.rglob("*.trailer")) and list(cache.rglob("*.filter"))
    command = ("erase", "--topic", "orders", "--root", tmp_path / "root", "--now", "--grace", "0", "--yes")
    assert run_here(*command).code == 0
    assert not list(cache.rglob("*.trailer")) and not list(cache.rglob("*.filter"))


@pytest.mark.parametrize("topic", ["ORDERS", "orders"])
def test_an_erasure_that_matches_nothing_says_so(run_here, store, topic):
    command = ("erase", "--topic", topic, "--key", "nobody", "--storage", store)
    for more in ((), ("--now", "--yes")):
        people = run_here(*command, *more)
        # the second of the two is in force after the first one
        assert (people.code, people.out.split()[:2]) == (1, ["matched", "0"])
        assert f"nothing matches: no stored entry of topic '{topic}' before " in people.err
        hint = "no file that was read has topic 'ORDERS'; did you mean 'orders'?"
        assert (hint in people.err) is (topic == "ORDERS")
    for more in (("--now", "--yes"), ()):
        again = run_here(*command, *more, "--json")
        assert (again.code, again.document["in_force"], next(iter(again.document))) == (0, True, "matched")
    for nothing in (("--key", "no one"), ("--queue", "7", "--before", "2026-01-01")):
        command = ("erase", "--topic", topic, *nothing, "--storage", store)
        assert (run_here(*command).code, run_here(*command, "--allow-none").code) == (1, 0)


def test_a_key_without_entries_is_named_beside_others(run_here, store):
    command = ("erase", "--topic", "orders", "--storage", store)
    for wrong in ("K1", "k1x", " 'k3'"):
        alone = run_here(*command, "--key", wrong, "--json")
        assert (alone.code, alone.document["matched"], alone.document["entries"]) == (1, 0, 0)
        both = run_here(*command, "--key", wrong, "--key", "k1", "--json")
        assert (both.code, both.document["matched"], both.document["unmatched_keys"]) == (1, 10, [wrong])
    people = run_here(*command, "--key", "k1", "--before", "2020-01-01")
    assert people.code == 1 and "before 2020-01-01T00:00:00Z has key 'k1'" in people.err


def test_only_the_key_itself_is_erased(run_here, tmp_path):
    uri = f"file://{tmp_path}/stored"
    with IndexService.open(root=tmp_path / "root", storage=uri, slots=11, items=50) as index:
        for offset, key in enumerate(("\0*", "0x002a", "0x6f72646572")):
            index.put("t", 0, key, offset, 1, 1_700_000_000_000)
        index.seal()
        index.run_lifecycle()
    command = ("erase", "--topic", "t", "--storage", uri, "--json", "--yes")
    for key in ("0x002A", "order"):
        done = run_here(*command, "--key", key)
        assert (done.code, done.document["matched"], done.document["unmatched_keys"]) == (1, 0, [key]), done.err
    # a key that is named twice is one tombstone
    done = run_here(*command, "--key", "0x002a", "--key", "0x002a")
    assert (done.code, done.document["matched"], len(done.document["tombstones"])) == (0, 1, 1), done.err
    with IndexReader.open(uri) as reader:
        assert [len(reader.query("t", key)) for key in ("\0*", "0x002a", "0x6f72646572")] == [1, 0, 1]


@pytest.mark.parametrize("before", ["9999-12-31T23:59:59.999Z", "1700000000000000"])
def test_a_bound_at_the_end_of_9999_has_a_certificate(run_here, store, before):
    """A number of microseconds means that bound, too. The record is permanent, so the command must report it."""
    command = ("erase", "--topic", "orders", "--before", before, "--storage", store)
    for more in ((), ("--yes",), ("--yes", "--json")):
        outcome = run_here(*command, *more)
        assert outcome.code == 0, outcome.err
        assert "--json" in more or "before 9999-12-31T23:59:59.999Z" in outcome.out
    seconds = run_here("erase", "--topic", "orders", "--before", "1700000000", "--storage", store)
    assert seconds.code == 2 and "if it is in seconds, write 1700000000000" in seconds.err
