"""Every reading command on a small index: its JSON, its text, its exit code."""

import re

import pytest

from tests.integration.cli.command_lines import Outcome, run_script
from tests.integration.cli.conftest import BEGIN_MS, MESSAGES, expected_offsets, write_source
from tiered_index import IndexService, __version__

ENTRIES = 2 * MESSAGES
SECONDS = "1970-01-20T16:13:20Z: did you mean milliseconds? 1700000000 seconds are 1700000000000"


def offsets(document):
    return [item["offset"] for item in document["items"]]


@pytest.mark.parametrize(
    ("topic", "key"), [("orders", "k7"), ("orders", "own-2999"), ("orders", "absent"), ("none", "k7")]
)
def test_query_by_root_finds_everything(run_here, original, topic, key):
    outcome = run_here("query", topic, key, "--root", original.root, "--json", "--max", 1000)
    assert outcome.code == 0
    assert outcome.err == ""
    assert outcome.document["status"] == "complete"
    assert offsets(outcome.document) == expected_offsets(topic, key)


def test_query_by_storage_alone_finds_uploaded_entries(run_here, original):
    outcome = run_here("query", "orders", "k7", "--storage", original.uri, "--json", "--max", 1000)
    assert offsets(outcome.document) == expected_offsets("orders", "k7", MESSAGES - 100)
    assert outcome.document["explain"]["requests"] > 0
    item = outcome.document["items"][0]
    assert {"topic", "topic_id", "queue_id", "offset", "size", "timestamp_ms", "key_hash"} <= set(item)
    assert item["timestamp_ms"] == BEGIN_MS + item["offset"] * 1000


def test_query_takes_a_range_and_pages(run_here, original):
    begin, end = BEGIN_MS + 500_000, "2023-11-14T22:46:40Z"  # second 2000 of the stream
    expected = [n for n in expected_offsets("orders", "k7") if 500 <= n <= 2000]
    where = ("query", "orders", "k7", "--root", original.root, "--begin", begin, "--end", end)
    assert offsets(run_here(*where, "--json").document) == expected
    paged, cursor, statuses = [], [], []
    while not statuses or statuses[-1] == "truncated":
        page = run_here(*where, "--json", "--max", 15, *cursor).document
        paged += offsets(page)
        statuses.append(page["status"])
        cursor = ["--cursor", page["cursor"]]
    assert paged == expected
    assert len(statuses) >= len(expected) // 15
    assert statuses[0] == "truncated"
    records = run_here(*where, "--json", "--all", "--max", 7).records
    assert [record["offset"] for record in records[:-1]] == expected
    assert records[-1]["status"] == "complete"
    assert records[-1]["count"] == len(expected)
    altered = run_here(*where, "--cursor", "AAAA", "--json")
    assert (altered.code, altered.error["type"]) == (2, "InvalidCursor")


def test_all_answers_an_identity_that_was_put_with_two_times_once(run_here, tmp_path):
    with IndexService.open(root=tmp_path / "root", storage=f"file://{tmp_path}/store", slots=7, items=50) as index:
        for second in (0, 50):
            for offset in range(3):
                index.put("t", 0, "k", offset, 10, BEGIN_MS + (second + offset) * 1000)
    where = ["query", "t", "k", "--root", tmp_path / "root", "--all", "--max", 2]
    records = run_here(*where, "--json").records
    assert [record["offset"] for record in records[:-1]] == [2, 1, 0]
    assert records[-1]["count"] == 3
    assert "3 found, complete" in run_here(*where).out


@pytest.mark.parametrize(
    ("topic", "range_", "hints"),
    [
        ("orderz", (), ["no file that was read has topic 'orderz'; did you mean 'orders'?"]),
        ("nothing-like-it", (), ["no file that was read has topic 'nothing-like-it'"]),
        ("orders", ("--begin", "2024-01-01"), ["the index has entries from 2023-11-14T22:13:20Z to "]),
        ("orders", ("--end", "1700000000"), ["the index has entries from ", f"the range ends at {SECONDS}"]),
        ("orders", ("--end", "86400"), ["the index has entries from ", "the range ends at 1970-01-01T00:01:26"]),
        ("orders", ("--begin", "2023-11-14", "--end", "2023-11-14"), []),
        ("orders", ("--begin", "2023-11-14T22:13:20Z"), []),
    ],
)
def test_nothing_found_is_explained(run_here, original, topic, range_, hints):
    where = ("query", topic, "nobody", *range_, "--root", original.root)
    first, *lines = run_here(*where).out.splitlines()
    assert first == "0 found, complete"
    assert [line.startswith(hint) for line, hint in zip(lines, hints, strict=True)] == [True] * len(hints)
    assert run_here(*where, "--json").document["hints"] == lines
    assert run_here(*where, "--json", "--all").records[-1]["hints"] == lines


def test_a_flag_is_named_only_if_it_was_typed(run_here, original, tmp_path):
    settings = tmp_path / "settings.toml"
    settings.write_text('query_threads = "max_count"\nslots = 2.5')
    outcome = run_here("query", "t", "k", "--config", settings, "--root", original.root)
    assert outcome.err.count("setting ") == 2
    assert outcome.err.startswith(f"tiered-index: {settings}: setting ")


def test_a_file_that_cannot_be_read_makes_the_answer_an_error_or_partial(run_here, damaged):
    for path in damaged.objects():
        path.unlink()
    for path in damaged.files("uploaded")[1:]:
        path.write_bytes(path.read_bytes()[:100])
    refused = run_here("query", "orders", "k7", "--root", damaged.root, "--json", "--max", 1000)
    assert refused.code == 4
    assert refused.out == ""
    partial = run_here("query", "orders", "k7", "--root", damaged.root, "--json", "--max", 1000, "--allow-partial")
    assert partial.code == 6
    assert partial.document["status"] == "partial"
    assert len(partial.document["failed"]) == len(damaged.files("uploaded")) - 1
    assert 0 < len(partial.document["items"]) < len(expected_offsets("orders", "k7"))
    every = run_here("query", "orders", "k7", "--root", damaged.root, "--json", "--all", "--allow-partial")
    assert (every.code, every.records[-1]["status"]) == (6, "partial")
    assert len(every.records[-1]["failed"]) == len(damaged.files("uploaded")) - 1


def test_files_lists_each_file_with_its_state(run_here, original):
    document = run_here("files", "--root", original.root, "--json").document
    assert document["totals"]["entries"] == ENTRIES
    assert document["totals"]["by_state"] == {"uploaded": len(original.files("uploaded")), "unsealed": 1}
    assert len(document["files"]) == document["totals"]["files"] > 3
    for file in document["files"]:
        assert file["begin_ms"] <= file["end_ms"]
        assert (file["object"] is not None) == (file["state"] == "uploaded")
    stored = run_here("files", "--storage", original.uri, "--json").document
    assert stored["totals"]["by_state"] == {"storage": len(original.files("uploaded"))}
    assert stored["totals"]["entries"] == ENTRIES - 200
    text = run_here("files", "--root", original.root).out
    assert all(file["file_id"] in text for file in document["files"])


def test_files_is_partial_if_one_cannot_be_read(run_here, damaged):
    (path,) = damaged.files("unsealed")
    path.with_suffix(".journal").write_bytes(b"not a journal at all")
    outcome = run_here("files", "--root", damaged.root, "--json")
    assert (outcome.code, outcome.document["status"]) == (6, "partial")
    assert [file["file_id"] for file in outcome.document["files"] if file["error"]] == [path.stem]
    assert re.search(f"{path.stem} +unsealed, damaged ", run_here("files", "--root", damaged.root).out)


def test_a_compacted_file_is_shown_by_path_id_and_object(run_here, original):
    path = original.files("uploaded")[0]
    by_path = run_here("files", path, "--json").document
    assert by_path["kind"] == "compacted"
    geometry = {"slots": 64, "items": 1500, "item_bytes": 32}
    assert by_path["layout"] == {"preset": "native", "hash": "abs", "schema": "KeyedIndexItem"} | geometry
    assert by_path["metadata"]["count"] == 1499
    assert sorted(name for _, name in by_path["metadata"]["topics"]) == ["orders", "payments"]
    assert by_path["directory"]["longest_slot_items"] >= 1499 // 64
    by_id = run_here("files", path.stem, "--root", original.root, "--json").document
    assert by_id == by_path
    files = run_here("files", "--root", original.root, "--json").document["files"]
    (name,) = [file["object"] for file in files if file["file_id"] == path.stem]
    by_object = run_here("files", name, "--storage", original.uri, "--json").document
    assert run_here("files", path.stem[-8:], "--root", original.root, "--json").document == by_id
    assert run_here("files", path.stem[-8:], "--storage", original.uri, "--json").document == by_object
    assert by_object == by_path | {"file": name}
    assert "longest slot items" in run_here("files", path).out
    missing = run_here("files", "nowhere", "--json")
    assert (missing.code, missing.error["type"]) == (2, "InvalidArgument")


def test_an_id_that_is_the_end_of_several_is_refused_and_listed_in_full(run_here, tmp_path):
    folder = tmp_path / "compacted"
    folder.mkdir()
    ids = ["001700000000000-0000aaaaaaaa", "001700000000000-1111aaaaaaaa"]
    for file_id in ids:
        (folder / f"{file_id}.index").touch()
    refused = run_here("files", "aaaaaaaa", "--root", tmp_path)
    assert (refused.code, refused.err) == (
        2,
        f"tiered-index: 2 files' ids end in aaaaaaaa: give one of {', '.join(ids)}\n",
    )


def test_an_unsealed_file_is_shown_with_its_journal(run_here, original):
    (path,) = original.files("unsealed")
    document = run_here("files", path, "--json").document
    assert document["kind"] == "unsealed"
    assert (document["journal"]["count"], document["journal"]["sealed"]) == (200, False)
    assert list(document["journal"]["source_positions"].values()) == [original.source.stat().st_size]
    assert run_here("files", path.with_suffix(".journal"), "--json").document == document


def test_every_entry_of_every_file_is_printed_once(run_here, original):
    seen = []
    for path in (*original.files("uploaded"), *original.files("unsealed")):
        outcome = run_here("files", path, "--entries")
        assert outcome.code == 0
        *entries, status = outcome.records
        assert status == {"status": "complete", "entries": len(entries), "checksummed": True}
        seen += [(e["topic"], e["offset"], e["timestamp_ms"], e["key_hash"], e["fingerprint"]) for e in entries]
    assert len(seen) == len(set(seen)) == ENTRIES
    assert {(o, t) for _, o, t, _, _ in seen} == {(n, BEGIN_MS + n * 1000) for n in range(MESSAGES)}
    assert {topic for topic, o, _, _, _ in seen if o % 3 == 0} == {"payments"}


def test_no_entry_is_printed_that_does_not_verify(run_here, damaged):
    path = damaged.files("uploaded")[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    good = run_here("files", damaged.files("uploaded")[1], "--entries").records[-1]["entries"]
    outcome = run_here("files", path, "--entries")
    assert outcome.code == 4
    *entries, status = outcome.records
    assert status["status"] == "corrupt"
    assert status["entries"] == len(entries) < good


def test_a_rocketmq_file_without_trailer_or_journal(run_here, tmp_path):
    root, bare = tmp_path / "root", tmp_path / "20231114221320000"
    source, uri = write_source(tmp_path / "m.ndjson", 0, 25), f"file://{tmp_path / 'store'}"
    geometry = ("--preset", "rocketmq", "--slots", 16, "--items", 100)
    assert run_here("ingest", source, "--root", root, "--storage", uri, *geometry).code == 0
    (path,) = (root / "unsealed").glob("*.index")
    bare.write_bytes(path.read_bytes())
    refused = run_here("files", bare, "--json")
    assert (refused.code, refused.error["type"]) == (2, "InvalidArgument")
    sizes = ("--set", "slots=16", "--set", "items=100")
    document = run_here("files", bare, *sizes, "--json").document
    assert (document["kind"], document["metadata"]["count"]) == ("unsealed without journal", 50)
    *entries, last = run_here("files", bare, *sizes, "--entries").records
    assert last == {"status": "complete", "entries": 50, "checksummed": False}
    assert [entry["offset"] for entry in entries] == [n // 2 for n in range(50)]
    assert run_here("verify", bare, *sizes).code == 0
    assert run_here("ingest", source, "--root", root, "--wait").code == 0
    (compacted,) = (root / "uploaded").glob("*.index")
    trailer = run_here("files", compacted, "--json").document["trailer"]
    bare.write_bytes(compacted.read_bytes()[: trailer["position"]])
    document = run_here("files", bare, "--json").document
    assert (document["kind"], document["metadata"]["count"]) == ("compacted without trailer", 50)
    assert run_here("verify", bare, "--json").document["status"] == "ok"
    bare.write_bytes(bare.read_bytes()[:-5])
    assert run_here("verify", bare, "--json").code == 1


def test_recover_reports_its_findings(run_here, damaged):
    (path,) = damaged.files("unsealed")
    half_made = damaged.root / "compacted" / ".tmp-0123456789abcdef"
    half_made.write_bytes(b"half")
    outcome = run_here("recover", "--root", damaged.root, "--json")
    assert outcome.code == 0
    assert outcome.document["status"] == "recovered"
    assert any("temporary" in note for note in outcome.document["notes"])
    assert not half_made.exists()
    assert list(outcome.document["sources"].values()) == [damaged.source.stat().st_size]
    data = bytearray(path.read_bytes())
    data[28 + 8 * 64 + 36 * 20] ^= 1
    path.write_bytes(data)
    outcome = run_here("recover", "--root", damaged.root, "--json")
    assert (outcome.code, outcome.document["status"]) == (4, "damaged")
    assert outcome.document["damaged"][0]["file_id"] == path.stem
    assert path.read_bytes() == data


def test_files_says_why_a_storage_was_not_read_and_calls_it_not_damaged(run_here, damaged):
    damaged.store.rename(damaged.store.with_name("away"))
    outcome = run_here("files", "--root", damaged.root)
    assert outcome.code == 6
    assert "damaged" not in outcome.out
    assert re.search(r"log +storage, not read .*is it mounted\?", outcome.out)


def test_processes_answer_as_this_one_does(run_here, original):
    query = ("query", "orders", "k7", "--root", original.root, "--max", 5, "--json")
    done, here = run_script(*query), run_here(*query)
    assert (done.code, done.err) == (here.code, here.err) == (0, "")
    assert done.document["items"] == here.document["items"] != []
    altered = (*query, "--cursor", "AAAA")
    assert run_script(*altered, module="tiered_index.cli") == run_here(*altered)
    assert run_here(*altered).code == 2


def test_the_version(run_here):
    assert run_here("--version") == Outcome(0, f"tiered-index {__version__}\n", "")
