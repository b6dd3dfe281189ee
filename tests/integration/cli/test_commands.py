"""Every reading command on a small index: its JSON, its text, its exit code."""

import re

import pytest

from tests.integration.cli.command_lines import run_script
from tests.integration.cli.conftest import BEGIN_MS, MESSAGES, expected_offsets, message, write_source
from tiered_index import IndexService

ENTRIES = 2 * MESSAGES


def offsets(document):
    return [item["offset"] for item in document["items"]]


@pytest.mark.parametrize(("topic", "key"), [("orders", "k7"), ("none", "k7")])
def test_query_by_root_or_storage_finds_everything(run_here, original, topic, key):
    """The storage lacks the entries that are not uploaded."""
    for flag, place, stop in (("--root", original.root, MESSAGES), ("--storage", original.uri, MESSAGES - 100)):
        outcome = run_here("query", topic, key, flag, place, "--json", "--max", 1000)
        assert (outcome.code, outcome.err, outcome.document["status"]) == (0, "", "complete")
        assert offsets(outcome.document) == expected_offsets(topic, key, stop)
        for item in outcome.document["items"]:
            assert {"topic_id", "queue_id", "size", "key_hash"} <= item.keys()
            assert item["timestamp_ms"] == BEGIN_MS + item["offset"] * 1000


def test_query_takes_a_range_and_pages(run_here, original):
    begin, end = BEGIN_MS + 500_000, "2023-11-14T22:46:40Z"  # second 2000 of the stream
    expected = [n for n in expected_offsets("orders", "k7") if 500 <= n <= 2000]
    where = ("query", "orders", "k7", "--root", original.root, "--begin", begin, "--end", end)
    assert offsets(run_here(*where, "--json").document) == expected
    page = run_here(*where, "--json", "--max", 15).document
    rest = run_here(*where, "--json", "--cursor", page["cursor"]).document
    assert (page["status"], rest["status"]) == ("truncated", "complete")
    assert offsets(page) + offsets(rest) == expected
    records = run_here(*where, "--json", "--all", "--max", 7).records
    assert [record["offset"] for record in records[:-1]] == expected
    assert (records[-1]["status"], records[-1]["count"]) == ("complete", len(expected))
    altered = run_here(*where, "--cursor", "AAAA", "--json")
    assert (altered.code, altered.error["type"]) == (2, "InvalidCursor")


@pytest.mark.parametrize(
    ("topic", "range_", "hints"),
    [
        ("orderz", (), ["no file that was read has topic 'orderz'; did you mean 'orders'?"]),
        ("orders", ("--begin", "2024-01-01"), ["the index has entries from 2023-11-14T22:13:20Z to "]),
        ("orders", ("--end", "1970-01-20"), ["the index has entries from "]),
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


def test_a_file_that_cannot_be_read_makes_the_answer_an_error_or_partial(run_here, damaged):
    for path in damaged.objects():
        path.unlink()
    for path in damaged.files("uploaded")[1:]:
        path.write_bytes(path.read_bytes()[:100])
    refused = run_here("query", "orders", "k7", "--root", damaged.root, "--json", "--max", 1000)
    assert (refused.code, refused.out) == (4, "")
    partial = run_here("query", "orders", "k7", "--root", damaged.root, "--json", "--max", 1000, "--allow-partial")
    assert (partial.code, partial.document["status"]) == (6, "partial")
    assert len(partial.document["failed"]) == len(damaged.files("uploaded")) - 1
    assert 0 < len(partial.document["items"]) < len(expected_offsets("orders", "k7"))
    every = run_here("query", "orders", "k7", "--root", damaged.root, "--json", "--all", "--allow-partial")
    assert (every.code, every.records[-1]["status"]) == (6, "partial")
    assert len(every.records[-1]["failed"]) == len(damaged.files("uploaded")) - 1


def test_topics_have_the_bytes_of_their_entries(run_here, tmp_path):
    """A message with two keys has two entries, so its bytes count twice: the column says so."""
    with IndexService.open(root=tmp_path, storage="memory://topics", background=False) as index:
        index.put("orders", 0, ["a", "b"], 1, 100, BEGIN_MS)
        index.flush()
    (topic,) = run_here("topics", "--root", tmp_path, "--json").document["topics"]
    assert (topic["entries"], topic["bytes_of_entries"], "bytes" in topic) == (2, 200, False)
    assert "entries   bytes of entries" in run_here("topics", "--root", tmp_path).out


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
    assert by_id == by_path == run_here("files", path.stem[-8:], "--root", original.root, "--json").document
    files = run_here("files", "--root", original.root, "--json").document["files"]
    (name,) = [file["object"] for file in files if file["file_id"] == path.stem]
    by_object = run_here("files", name, "--storage", original.uri, "--json").document
    assert by_object == by_path | {"file": name}
    assert "longest slot items" in run_here("files", path).out
    (unsealed,) = original.files("unsealed")
    document = run_here("files", unsealed, "--json").document
    assert (document["kind"], document["journal"]["count"], document["journal"]["sealed"]) == ("unsealed", 200, False)
    assert list(document["journal"]["source_positions"].values()) == [original.source.stat().st_size]
    assert run_here("files", unsealed.with_suffix(".journal"), "--json").document == document


def test_an_id_that_is_the_end_of_several_is_refused_and_listed_in_full(run_here, tmp_path):
    folder = tmp_path / "compacted"
    folder.mkdir()
    ids = ["001700000000000-0000aaaaaaaa", "001700000000000-1111aaaaaaaa"]
    for file_id in ids:
        (folder / f"{file_id}.index").touch()
    refused = run_here("files", "aaaaaaaa", "--root", tmp_path)
    said = f"tiered-index: 2 files' ids end in aaaaaaaa: give one of {', '.join(ids)}\n"
    assert (refused.code, refused.err) == (2, said)


def test_the_entries_of_a_file_are_printed_and_none_that_does_not_verify(run_here, damaged):
    for path in (*damaged.files("unsealed"), damaged.files("uploaded")[0]):
        *entries, status = run_here("files", path, "--entries").records
        assert status == {"status": "complete", "entries": len(entries), "checksummed": True}
        for entry in entries:
            put = message(entry["offset"])
            assert (entry["topic"], entry["timestamp_ms"]) == (put["topic"], put["timestamp_ms"])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    outcome = run_here("files", path, "--entries")
    *verified, status = outcome.records
    assert (outcome.code, status["status"]) == (4, "corrupt")
    assert status["entries"] == len(verified) < len(entries)


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
    assert (outcome.code, outcome.document["status"]) == (0, "recovered")
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


def test_all_answers_an_identity_that_was_put_with_two_times_once(run_here, tmp_path):
    with IndexService.open(root=tmp_path / "root", storage=f"file://{tmp_path}/store", slots=7, items=50) as index:
        for second in (0, 50):
            for offset in range(3):
                index.put("t", 0, "k", offset, 10, BEGIN_MS + (second + offset) * 1000)
    where = ["query", "t", "k", "--root", tmp_path / "root", "--all", "--max", 2]
    hint = "3 entries left out: topic, queue and offset of a newer answer"
    records = run_here(*where, "--json").records
    assert [record["offset"] for record in records[:-1]] == [2, 1, 0]
    assert (records[-1]["count"], records[-1]["hints"]) == (3, [hint])
    shown = run_here(*where).out
    assert "3 found, complete" in shown and f"\n{hint}\n" in shown


def test_a_flag_is_named_only_if_it_was_typed(run_here, original, tmp_path):
    settings = tmp_path / "settings.toml"
    settings.write_text('query_threads = "max_count"\nslots = 2.5')
    outcome = run_here("query", "t", "k", "--config", settings, "--root", original.root)
    assert outcome.err.count("setting ") == 2
    assert outcome.err.startswith(f"tiered-index: {settings}: setting ")
