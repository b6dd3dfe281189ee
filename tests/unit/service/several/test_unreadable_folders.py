"""A folder below a prefix of several indexes that the user may not read: answers are partial, and name it.

It was left out of answers that still said complete, and later made every lookup fail.
"""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.rocketmq.remoting_client import HERE, by_key
from tests.support.several_indexes import Cluster, Watched, rows
from tiered_index import IndexReader
from tiered_index.base.clock import ManualClock
from tiered_index.cli.main import run
from tiered_index.connectors.rocketmq.remoting.broker import ReadOnlyBroker
from tiered_index.connectors.rocketmq.remoting.frames import Command, RequestCode, ResponseCode
from tiered_index.errors import FolderDenied, StorageMisconfigured
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import PrefixedStorage


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
            for allowed in (False, True):
                answer = reader.query("t", "k", allow_partial=allowed)
                assert (answer.status, answer.items) == ("partial", whole.items)
                assert [failed.source for failed in answer.failed] == [f"{uri}/private"]
                assert "private may be an index that this user can't read: allow" in str(answer.failed[0].error)
        # this one is named by the user
        with IndexReader.open([f"{uri}/index", f"{uri}/private"]) as reader, pytest.raises(StorageMisconfigured):
            reader.query("t", "k")
    with monkeypatch.context() as patched:
        # one that may be looked into, though not listed, is known to be no index
        deny(patched, folder, also_inside=False)
        with IndexReader.open(uri) as reader:
            answer = reader.query("t", "k")
            assert (answer.status, answer.items) == ("complete", whole.items)


@pytest.fixture
def denied(tmp_path):
    """A storage with three indexes, and the indexes: the second one answers 403."""
    store, cluster = Watched(MemoryStorage()), Cluster(tmp_path)
    for number in range(3):
        child = PrefixedStorage(store.inner, f"broker-{number}")
        cluster.add(child.uri, rows(number), child)
    for operation in ("get", "head"):
        store.fail(operation, name_prefix="broker-1/", times=None, error=StorageMisconfigured)
    return store, cluster


def test_every_kind_of_lookup_is_partial_without_an_index_that_answers_403(denied):
    store, cluster = denied
    clock, private, others = ManualClock(0), cluster.uris[1], cluster.uris[::2]
    with IndexReader.open(storage_backend=store, clock=clock, refresh_interval_s=10) as reader:
        pages = list(reader.query_all("t", "k", max_count=7))
        assert len(pages) > 1 and {page.status for page in pages} == {"partial"}
        assert cluster.answers(item for page in pages for item in page.items) == cluster.expected(others)
        for answer in (
            reader.query("t", "k", max_count=1000),
            reader.query("t", "k", max_count=1000, timeout_s=300),
            reader.query_many([("t", "k")], max_count=1000)[0],
            reader.query_many([("t", "none")])[0],
            reader.topics(),
        ):
            assert (answer.status, [failed.source for failed in answer.failed]) == ("partial", [private])
        # clients of RocketMQ's protocol would take a part for the whole
        request = Command(code=RequestCode.QUERY_MESSAGE, fields=by_key("t", "k"))
        assert ReadOnlyBroker(reader).look_up(request, HERE).code == ResponseCode.SYSTEM_ERROR
        store.clear()
        clock.advance(10)
        answer = reader.query("t", "k", max_count=1000)
        assert (answer.status, cluster.answers(answer)) == ("complete", cluster.expected())


def test_a_message_that_an_unreadable_folder_may_have_is_not_told_as_missing(tmp_path, monkeypatch, capsys):
    uri = f"file://{tmp_path}/stored"
    Cluster(tmp_path).add(f"{uri}/index", rows(1))
    folder = tmp_path / "stored" / "private"
    folder.mkdir()
    deny(monkeypatch, folder, also_inside=True)
    for named in (["--topic", "t", "AAAA"], ["kafka:t/0/5"]):
        with pytest.raises(SystemExit) as ended:
            run(["message", *named, "--storage", uri])
        assert ended.value.code == FolderDenied.exit_code
        assert "private may be an index that this user can't read" in capsys.readouterr().err
