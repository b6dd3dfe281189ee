"""An impossible path is bad usage (exit 2) and no unexpected error (70), in every command, call and option."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tiered_index import IndexReader, IndexService
from tiered_index.cli.main import run
from tiered_index.errors import ConfigError, InvalidArgument, StorageMisconfigured
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.storage.opening import open_storage

MESSAGE = "7F00000100002A9F0000000000000000"
PATHS = {
    "name of 256": "x" * 256,
    "path of 6,000": "/".join(["d" * 199] * 30),
    "no such home": "~nobody-is-called-so/x",
    "NUL": "a\0b",
    "loop": "loop",
}
FILES = {"inspect": ["inspect", "{path}"], "verify": ["verify", "{path}"]}
SOURCES = {
    "ingest": ["ingest", "{path}", "--root", "new"],
    "message --store": ["message", MESSAGE, "--store", "{path}"],
    "query --config": ["query", "t", "k", "--config", "{path}"],
}
INDEXES = {
    "query": ["query", "t", "k"],
    "verify": ["verify"],
    "recover": ["recover"],
    "message": ["message", MESSAGE],
    "ingest": ["ingest", "in.ndjson"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("pool")
    (tmp_path / "pool").symlink_to("loop")
    (tmp_path / "a-file").write_text("text")
    (tmp_path / "in.ndjson").write_text(
        '{"topic":"t","queue_id":0,"keys":["k"],"offset":1,"size":1,"timestamp_ms":1700000000000}\n'
    )
    return tmp_path


def code_of(line: list[str], capsys: pytest.CaptureFixture[str]) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        run(line)
    printed = capsys.readouterr()
    assert "unexpected" not in printed.err
    assert printed.err
    assert not printed.out
    return ended.value.code


BELOW_A_FILE = "a-file/x"
ROOT = ["--root", "root", "--storage", "memory://paths"]
NEW_ROOT = ["--root", "{path}", "--storage", "memory://paths"]
# command lines, and valid paths for their other options
LINES = [
    *((line, []) for line in (*FILES.values(), *SOURCES.values())),
    # possible names of an object
    *(([*line, *ROOT], [".", BELOW_A_FILE, "000000000001000-572d230f6127"]) for line in FILES.values()),
    *(([*line, *NEW_ROOT], [BELOW_A_FILE]) for line in INDEXES.values()),
]


@pytest.mark.parametrize(("line", "more"), LINES, ids=" ".join)
def test_files_sources_and_roots(line: list[str], more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for path in (*PATHS.values(), *more):
        assert code_of([part.replace("{path}", path) for part in line], capsys) == 2, path


@pytest.mark.parametrize("scheme", ["file", "sqlite"])
@pytest.mark.parametrize("line", [INDEXES[name] for name in ("verify", "recover")], ids=["verify", "recover"])
def test_storages(line: list[str], scheme: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in PATHS.values():
        if not path.startswith("~"):  # an absolute path needs no home folder
            root = ["--root", "new"] if line[0] == "recover" else []
            assert code_of([*line, "--storage", f"{scheme}://{folder}/{quote(path)}", *root], capsys) == 2, path


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_calls(path: str, folder: Path) -> None:
    with pytest.raises(ConfigError):
        IndexService.open(root=path, storage="memory://paths")
    with pytest.raises(ConfigError):
        IndexReader.open(root=path)
    with pytest.raises(ConfigError):
        IndexReader.open("memory://paths", cache_dir=path)
    with pytest.raises((ConfigError, InvalidArgument)):
        StoreDirectory.open(Path(path))
    if not path.startswith("~"):
        for scheme in ("file", "sqlite"):
            with pytest.raises(ConfigError):
                open_storage(f"{scheme}://{folder}/{quote(path)}")


@contextlib.contextmanager
def without_permission(folder: Path) -> Iterator[None]:
    """Become a user who may not enter `folder`."""
    folder.chmod(0)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)
        folder.chmod(0o700)


def test_folders_that_may_not_be_entered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locked = folder / "locked"
    locked.mkdir()
    with without_permission(locked):
        for line, _ in LINES:
            if line[-len(ROOT) :] != ROOT:
                line = [part.replace("{path}", f"{locked}/x") for part in line]
                assert code_of(line, capsys) == StorageMisconfigured.exit_code, line
