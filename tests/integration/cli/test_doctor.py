"""`doctor` checks a storage and a disk, and ends with 1 if an ability is missing."""

import errno
import fcntl

import pytest

from tests.integration.cli.command_lines import run_here
from tiered_index.errors import StorageUnavailable
from tiered_index.storage.local.storage import LocalStorage


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
