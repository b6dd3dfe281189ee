"""URIs of databases as other programs write them, and databases that many make at once."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tiered_index.errors import ObjectExists
from tiered_index.storage.opening import open_storage

PREFIXES = ["sqlite://", "sqlite:///", "sqlite:////", "sqlite://localhost", "sqlite://localhost/"]


@pytest.mark.parametrize(("written", "read"), list(itertools.pairwise([*PREFIXES, PREFIXES[0]])))
def test_all_of_them_open_one_database(tmp_path, written, read):
    path = tmp_path / "x.db"
    storage = open_storage(f"{written}{path}")
    storage.put("log/1", b"one")
    storage.close()
    storage = open_storage(f"{read}{path}")
    assert storage.get("log/1") == b"one"
    assert storage.uri == open_storage(f"sqlite://{path}").uri
    storage.close()
    assert path.is_file()


def test_a_uri_that_other_tools_take_for_a_relative_path_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for uri in ("sqlite:///index.db", "sqlite:////index.db", f"sqlite://{tmp_path}/index.db", "sqlite:///none/x.db"):
        open_storage(uri).close()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"sqlite:///index.db is the file /index.db. Other tools take it for {tmp_path}/index.db")


RACERS = 8


def test_the_first_puts_of_many_find_one_database(tmp_path: Path) -> None:
    for attempt in range(20):
        uri = f"sqlite://{tmp_path}/{attempt}.db"
        barrier = threading.Barrier(RACERS)

        def race(racer: int, uri: str = uri, barrier: threading.Barrier = barrier) -> bool:
            with open_storage(uri) as storage:
                barrier.wait(30)
                try:
                    storage.put_if_absent("log/1", b"%d" % racer)
                except ObjectExists:
                    return False
                return True

        with ThreadPoolExecutor(RACERS) as pool:
            assert sum(pool.map(race, range(RACERS))) == 1
