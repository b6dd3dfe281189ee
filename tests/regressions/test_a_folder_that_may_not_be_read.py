"""A folder that the user may not read was left out of a prefix of several indexes, and answers still said complete."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.several_indexes import Cluster, rows
from tiered_index import IndexReader
from tiered_index.errors import StorageMisconfigured


def deny(monkeypatch: pytest.MonkeyPatch, folder: Path, *, also_inside: bool) -> None:
    """Let no call list an empty folder, as for a user who is not root; `also_inside`: nor find a name in it."""

    def denying(name: str) -> Any:
        allowed = getattr(os, name)

        def call(path: Any = ".", *arguments: Any, **named: Any) -> Any:
            place = Path() if isinstance(path, int) else Path(os.fsdecode(path))
            if (place == folder and name != "stat") or (also_inside and folder in place.parents):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
            return allowed(path, *arguments, **named)

        return call

    for name in ("scandir", "listdir", "open", "stat"):
        monkeypatch.setattr(os, name, denying(name))


def test_an_answer_names_a_folder_that_may_be_an_index(tmp_path, monkeypatch):
    uri = f"file://{tmp_path}/stored"
    cluster = Cluster(tmp_path)
    cluster.add(f"{uri}/index", rows(1))
    folder = tmp_path / "stored" / "private"
    folder.mkdir()
    with IndexReader.open(uri) as reader:
        whole = reader.query("t", "k")
        assert whole.status == "complete"
    with monkeypatch.context() as patched:
        deny(patched, folder, also_inside=True)
        with IndexReader.open(uri) as reader:
            answer = reader.query("t", "k", allow_partial=True)
            assert (answer.status, answer.items) == ("partial", whole.items)
            assert [failed.source for failed in answer.failed] == [f"{uri}/private"]
            with pytest.raises(StorageMisconfigured, match="private may be an index that this user can't read: allow"):
                reader.query("t", "k")
    with monkeypatch.context() as patched:
        # one that may be looked into, though not listed, is known to be no index
        deny(patched, folder, also_inside=False)
        with IndexReader.open(uri) as reader:
            answer = reader.query("t", "k")
            assert (answer.status, answer.items) == ("complete", whole.items)
