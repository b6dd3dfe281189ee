"""An index remembers some settings. Others may differ at the next start, or are refused."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.support.disk_faults import FaultDisk
from tests.support.filled import merge_all
from tests.support.rounds import compact_only, upload
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.base.call import UNBOUNDED, Activation, active_context
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    InvalidArgument,
    NotAnIndex,
    SchemaMismatch,
    StorageMisconfigured,
)
from tiered_index.service.root import Root
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage

T = 1_700_000_000_000


def test_geometry_preset_and_offset_space_are_remembered(open_index):
    """By the root, and by the storage for a new root."""
    settings = {"preset": "rocketmq", "slots": 11, "items": 30, "offset_space": "commitlog"}
    with open_index("root", **settings) as first:
        first.put("t", 0, "k", 1, 1, T)
        upload(first)
    for name in ("root", "second"):
        with open_index(name, slots=..., items=...) as index:
            assert index.index_id == first.index_id and len(index.query("t", "k")) == 1
            index.put("t", 0, "other", 1, 1, T)
            index.flush()
            (file,) = [file for file in index.files() if file.place == "unsealed"]
            layout = file.layout
            assert (layout.preset.name, layout.slots, layout.items) == ("rocketmq", 11, 30)
            assert file.journal.offset_space == "commitlog"

    for changed in ({"slots": 12}, {"preset": "native", "hash": "abs"}, {"offset_space": "tiered_queue"}):
        for name in ("root", "another"):
            with pytest.raises(SchemaMismatch):
                open_index(name, **{"slots": ..., "items": ..., **changed})
    index = open_index("root", slots=..., items=33)  # files may become larger
    assert len(index.query("t", "k")) == 1


def test_topic_ids_of_other_roots_and_lives_do_not_collide(open_index):
    """Each file has its own topic table, so a source may number its topics differently later."""
    first = open_index("first", local_keep_s=86400)
    first.put("a", 0, "k", 1, 1, T, topic_id=1)
    upload(first)
    first.put("c", 0, "k", 1, 1, T, topic_id=2)
    first.close()
    first = open_index("first")
    with pytest.raises(InvalidArgument, match="already means"):
        first.put("d", 0, "k", 2, 1, T, topic_id=2)  # the open file has this id
    upload(first)
    first.close()
    first = open_index("first")
    first.put("b", 0, "k", 2, 1, T, topic_id=1)
    first.put("c", 0, "k", 3, 1, T, topic_id=9)
    for _ in range(3):
        assert [i.offset for i in first.query("a", "k")] == [1]
        assert [i.offset for i in first.query("b", "k")] == [2]
        assert [i.offset for i in first.query("c", "k")] == [3, 1]
        upload(first)


def test_two_topics_of_one_crc_get_different_ids(open_index, monkeypatch):
    monkeypatch.setattr("tiered_index.service.write.validation.assigned_topic_id", lambda topic: 2**31 - 1)
    index = open_index("root")
    for number, topic in enumerate(("x", "y", "z")):
        index.put(topic, 0, "k", number, 1, T)
    index.close()
    index = open_index("root")
    index.put("z", 0, "k", 7, 1, T)
    index.put("w", 0, "k", 8, 1, T)
    assert [[i.offset for i in index.query(topic, "k")] for topic in "xyzw"] == [[0], [1], [7, 2], [8]]
    assert len({index.query(topic, "k").items[0].topic_id for topic in "xyzw"}) == 4


@pytest.mark.parametrize("fails", [("put_if_absent", "epoch/"), ("list", "checkpoint/")], ids=["claim", "join"])
def test_a_root_that_moves_to_another_storage_remembers_it_before_it_is_claimed(open_index, tmp_path, fails):
    """A start that names no storage finds the later uploads there."""
    first = open_index("root", storage_backend=None, storage=(tmp_path / "before").as_uri())
    first.close()
    shutil.copytree(tmp_path / "before", tmp_path / "moved")
    faulty = FaultStorage(LocalStorage(tmp_path / "moved"))
    faulty.fail(fails[0], name_prefix=fails[1])
    moved = open_index("root", storage_backend=faulty, storage=faulty.uri)
    moved.put("t", 0, "k", 1, 1, T)
    upload(moved)
    assert len(moved.log_state.objects) == 1
    moved.close()
    again = open_index("root", storage_backend=None)
    assert [item.offset for item in again.query("t", "k")] == [1]
    assert len(again.log_state.objects) == 1


def test_missing_settings_are_named(tmp_path):
    root, config = tmp_path / "r", IndexConfig.load(root=tmp_path / "r")
    for error, named, opens, arguments in (
        (ConfigError, "root", IndexService, {"storage": "memory://x"}),
        (ConfigError, "storage", IndexService, {"root": root}),
        (ConfigError, "neither", IndexReader, {}),
        (NotAnIndex, None, IndexReader, {"root": root, "storage_backend": MemoryStorage()}),
        (NotAnIndex, None, IndexReader, {"storage_backend": MemoryStorage()}),
        (InvalidArgument, "not both", IndexService, {"config": config, "slots": 5}),
        (InvalidArgument, "not both", IndexReader, {"storage": "memory://x", "config": config}),
    ):
        with pytest.raises(error, match=named):
            opens.open(**arguments)
    assert not root.exists()


def refusing(path, call):
    def act(*args, **named):
        if path in args:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return call(*args, **named)

    return act


@pytest.mark.parametrize("state", ["unsealed", "compacted", "uploaded"])
def test_a_file_that_may_not_be_read_stops_the_start_with_the_way_out(open_index, faulty, monkeypatch, state):
    index = open_index("root", storage_backend=faulty)
    index.put("t", 0, "k", 1, 1, T)
    index.flush()
    if state == "compacted":
        compact_only(index, faulty)
    elif state == "uploaded":
        upload(index)
    index.close()
    (path,) = (index.config.root / state).glob("*.index")
    with monkeypatch.context() as patched:
        for owner, name in ((Path, "open"), (FaultDisk, "open_rw")):
            patched.setattr(owner, name, refusing(path, getattr(owner, name)))
        with pytest.raises(StorageMisconfigured, match=rf"{path}.*; give this user access to it.*, out of the root"):
            open_index("root")
    # no advice to move files out, because that doesn't help
    with monkeypatch.context() as patched:
        patched.setattr(Root, "temporaries", lambda root: refusing(path.parent, Path.iterdir)(path.parent))
        with pytest.raises(StorageMisconfigured, match=rf"\({path.parent}\)$"):
            open_index("root")
    for moved in path.parent.glob(f"{path.stem}.*"):
        moved.rename(index.config.root.with_name(moved.name))
    with open_index("root") as index:
        if state == "uploaded":
            assert len(index.query("t", "k").items) == 1
        else:
            with pytest.raises(CorruptFile, match=f"--lost {path.stem}"):
                index.query("t", "k")


def test_of_two_states_of_a_file_the_later_one_stays(open_index, faulty, tmp_path):
    """This holds even if the storage cannot answer, though only its log would decide."""
    with open_index("root", storage_backend=faulty) as index:
        index.put("t", 0, "k", 1, 1, T)
        upload(index)
    (uploaded,) = (tmp_path / "root" / "uploaded").glob("*.index")
    earlier = tmp_path / "root" / "compacted" / uploaded.name
    shutil.copy(uploaded, earlier)
    faulty.fail("*", times=None)
    index = open_index("root", storage_backend=faulty)
    assert not earlier.exists()
    assert [handle.place for handle in index.files()] == ["uploaded"]
    faulty.clear()
    index.run_lifecycle()
    assert [item.offset for item in index.query("t", "k")] == [1]
    assert len(index.log_state.objects) == 1


def test_local_copies_of_files_that_are_merged_after_an_opening_without_the_storage_are_deleted(
    open_index, faulty, storage, clock, tmp_path
):
    """A file that waits for its upload stays."""
    index = open_index("root", storage_backend=faulty)
    for offset in range(3):
        index.put("t", 0, "k", offset, 1, T - 36_000_000 + offset * 1000)
        upload(index)
    index.put("t", 0, "k", 3, 1, T)
    compact_only(index, faulty)
    index.close()
    faulty.fail("*", times=None)
    index = open_index("root", storage_backend=faulty)
    faulty.clear()
    assert merge_all(storage, clock).sources == 3
    clock.advance(60)
    index.run_lifecycle()
    (path,) = (tmp_path / "root" / "uploaded").iterdir()
    local = [(handle.file_id, handle.place) for handle in index.files() if handle.place != "storage"]
    assert local == [(path.stem, "uploaded")]
    assert [item.offset for item in index.query("t", "k")] == [3, 2, 1, 0]


def test_an_interrupt_at_the_end_of_a_block_leaves_no_context_to_later_calls(tmp_path, monkeypatch):
    def interrupted(block, *error):
        raise KeyboardInterrupt

    place = {"root": tmp_path / "root", "storage": (tmp_path / "storage").as_uri()}
    with monkeypatch.context() as interrupt:
        interrupt.setattr(Activation, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            IndexService.open(**place)
    assert active_context() == UNBOUNDED
    with IndexService.open(**place) as index:
        index.put("t", 0, "k", 1, 1, T)
        assert len(index.query("t", "k")) == 1
