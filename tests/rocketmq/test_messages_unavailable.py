"""Stores and storages that don't answer, or change during a lookup; and the cost of a page."""

from __future__ import annotations

import shutil

import pytest

from tests.rocketmq.answered import BEGIN_OF_LAST, asked, same, settled, source_of
from tests.rocketmq.archived_store import delete_segments, index_log, lookups, scan
from tiered_index.errors import StorageMisconfigured, StorageUnavailable
from tiered_index.rocketmq.log import commitlog
from tiered_index.rocketmq.log.segments import segment_name


def test_a_storage_that_is_down_is_an_error_or_named(index, store, storage):
    messages = settled(index, store)
    delete_segments(store, BEGIN_OF_LAST)
    wanted = next(m for m in messages if m.is_visible and m.uniq_key)
    storage.fail("get_range", times=None, name_prefix="segments/")
    with pytest.raises(StorageUnavailable):
        index.messages(wanted.topic, wanted.uniq_key, source=source_of(index, store))
    answer = index.messages(wanted.topic, wanted.uniq_key, allow_partial=True, source=source_of(index, store))
    assert answer.status == "partial"
    assert [report.file for report in answer.failed] == [index.archived()[0].name]
    assert [(fetched.state, fetched.message) for fetched in answer.messages] == [("missing", None)]
    storage.clear()
    assert asked(index, wanted, source_of(index, store)).state == "archived"


def test_a_store_that_can_not_be_read_is_an_error_unless_the_archive_has_it(index, store):
    messages = settled(index, store)
    wanted, late = (
        next(m for m in messages if m.physical_offset >= at and m.is_visible and m.uniq_key)
        for at in (0, BEGIN_OF_LAST)
    )
    shutil.rmtree(store / "commitlog")
    (store / "commitlog").write_bytes(b"no folder")
    source = source_of(index, store)
    with pytest.raises(StorageMisconfigured, match="can't be read"):
        index.messages(late.topic, late.uniq_key, source=source)
    with pytest.raises(StorageMisconfigured):
        source.by_msg_id(late.offset_msg_id)
    fetched = asked(index, wanted, source)
    assert fetched.state == "archived"
    assert "can't be read" in fetched.problem


def test_the_folder_is_listed_once_for_all_messages_of_a_page(index, store, monkeypatch):
    """A broker's folder has hundreds of segments: a listing for each message would cost more than all other steps."""
    messages = index_log(index, store)
    topic, key = max(lookups(messages), key=lambda lookup: len(scan(messages, *lookup)))
    listing, looks = commitlog.list_segments, []
    monkeypatch.setattr(commitlog, "list_segments", lambda folder: looks.append(folder) or listing(folder))
    answer = index.messages(topic, key, source=source_of(index, store))
    assert len(answer) == len(scan(messages, topic, key)) > 5
    assert len(looks) == 1


def test_a_segment_deleted_between_two_looks_is_found_in_the_archive(index, store, monkeypatch):
    messages = settled(index, store)
    wanted = next(m for m in messages if m.is_visible and m.uniq_key)
    source = source_of(index, store)
    listing = commitlog.list_segments

    def then_deleted(folder):
        found = listing(folder)
        (folder / segment_name(0)).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(commitlog, "list_segments", then_deleted)
    fetched = asked(index, wanted, source)
    assert fetched.state == "archived"
    assert same(fetched, wanted)
