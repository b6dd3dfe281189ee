"""`doctor` checks a storage and a disk, and ends with 1 if an ability is missing."""

import errno
import fcntl
import shutil

import pytest

from tests.integration.cli.command_lines import run_here
from tests.support.store_writer import StoreWriter
from tiered_index.errors import StorageUnavailable
from tiered_index.storage.local import LocalStorage


def test_what_is_sound_is_said_to_be(tmp_path):
    (tmp_path / "cold").mkdir()
    done = run_here("doctor", (tmp_path / "cold").as_uri(), "--root", tmp_path / "new" / "root", "--json")
    assert (done.code, done.document["status"]) == (0, "ok"), done.err
    results = [(row["of"], row["what"], row["result"]) for row in done.document["abilities"]]
    assert ("storage", "put-if-absent", "yes") in results and ("root", "file locks", "yes") in results
    assert len(results) == 10 and not (tmp_path / "new").exists()
    assert not any((tmp_path / "cold").iterdir())
    shown = run_here("doctor", "memory://sound")
    assert "needed for" in shown.out and "nothing is missing" in shown.out


@pytest.mark.parametrize("scheme", ["file", "sqlite"])
def test_a_missing_place_is_said_and_not_made(tmp_path, scheme):
    done = run_here("doctor", f"{scheme}://{tmp_path}/typo", "--json")
    assert done.code == 2 and f"nothing is at {scheme}://{tmp_path}/typo: check the URI" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_ability_is_a_finding(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    done = run_here("doctor", "--root", tmp_path, "--json")
    assert (done.code, done.document["status"]) == (1, "missing")
    (missing,) = [row for row in done.document["abilities"] if row["state"] == "missing"]
    assert missing["what"] == "file locks" and "No locks available" in missing["result"]
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_breaks_off_leaves_no_folders(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise StorageUnavailable("it went away")

    monkeypatch.setattr(LocalStorage, "get", refuse)
    done = run_here("doctor", tmp_path.as_uri(), "--json")
    assert done.code == 3 and "it went away" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_source_of_files_is_listed(tmp_path):
    (tmp_path / "a.ndjson").write_bytes(b"{}\n")
    done = run_here("doctor", "--source", tmp_path / "*.ndjson", "--json")
    (row,) = done.document["abilities"]
    assert (done.code, row["of"], row["result"]) == (0, "source", "yes: 1 file, 3 bytes")
    done = run_here("doctor", "--source", tmp_path / "typo.ndjson")
    assert (done.code, "typo.ndjson: No such file or directory" in done.err) == (2, True)


def test_a_store_without_readable_queues_is_told_its_price(tmp_path):
    with StoreWriter(tmp_path / "store") as writer:
        writer.put("orders", 0, b"body", keys="k", store_ms=1_762_000_000_000)
        writer.flush()
    done = run_here("doctor", "--source", tmp_path / "store", "--json")
    assert (done.code, [row["state"] for row in done.document["abilities"]]) == (0, ["ok", "ok"])
    shutil.rmtree(tmp_path / "store" / "consumequeue")
    done = run_here("doctor", "--source", tmp_path / "store", "--json")
    results = {row["what"]: (row["state"], row["result"]) for row in done.document["abilities"]}
    problem = "it has no consumequeue/: queue offsets are read from the messages, once a segment"
    assert (done.code, results["consume queues"]) == (0, ("worked round", problem))


def test_options_of_kafka_need_its_topics(tmp_path):
    done = run_here("doctor", "--source", tmp_path / "a", "--kafka", "security.protocol=SSL")
    assert (done.code, f"--kafka is for Kafka, and {tmp_path / 'a'} is a file" in done.err) == (2, True)
    assert "--source SOURCE, or several" in run_here("doctor").err
