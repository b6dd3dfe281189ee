"""If an object is removed, the cold path forgets its notes about it. So a reader's memory does not grow over years."""

import os
import time

import pytest

from tests.support.cold_index import cold_index, columns, publish, put
from tests.support.pending import merge_all
from tiered_index.clock import ManualClock
from tiered_index.service.read.disk_cache import CacheFolder, DiskCache

FILES = 3
MERGED_MS = 2_000_000_000_000
# long after all entries, so that a merge may take all files


@pytest.fixture
def made(tmp_path):
    return cold_index(tmp_path / "root", files=FILES, entries=200, slots=50)


def noted(reader):
    """Return the names of all objects with counted misses, and of those whose filters are being fetched."""
    filters = reader._cold_paths[0].filters
    return {*filters._misses, *filters._fetching}


@pytest.mark.usefixtures("large_filters")
@pytest.mark.parametrize("filter_after_probes", [1, 10], ids=["fetched", "counted"])
def test_a_reader_has_notes_only_of_present_objects(made, filter_after_probes):
    """Files are added and merged repeatedly under a reader that looks up absent keys."""
    with made.reader(block_cache_bytes=0, filter_after_probes=filter_after_probes) as reader:
        for spell in range(3):
            gone = {stored.name for stored in made.stored}
            for number in range(2):
                assert len(reader.query("t", f"absent{number}")) == 0
            # a fetch ends the count
            assert noted(reader) == (gone if filter_after_probes > 1 else set())
            assert merge_all(made.inner, ManualClock(MERGED_MS)).sources > 0
            with made.writer() as writer:
                put(made, writer, columns(FILES + spell, 200))
                publish(made, writer)
            gone -= {stored.name for stored in made.stored}
            assert gone
            reader.refresh()
            assert not noted(reader) & gone


def test_damaged_entries_that_stay_are_forgotten(made, tmp_path):
    """The cache of another process is read-only. A damaged entry is skipped as long as the log names its object."""
    first, second, _ = made.stored
    kept = CacheFolder(DiskCache(tmp_path / "cache", 1 << 20), "index")
    folder = CacheFolder(DiskCache(tmp_path / "cache", 1 << 20, read_only=True), "index")
    for stored in (first, second):
        assert kept.write(stored.name, "filter", b"a filter")
    for path in (tmp_path / "cache").rglob("*.filter"):
        path.write_bytes(b"?" + path.read_bytes()[1:])
    for stored in (first, second):
        assert folder.read(stored.name, "filter", 8) is None
    assert len(folder._passed_over) == 2
    folder.forget_unnamed({second.name: second})
    assert [path.name for path in folder._passed_over] == [second.name.replace("/", ",") + ".filter"]


def test_a_use_is_recorded_once_a_minute(tmp_path):
    entry, room = tmp_path / "entry", DiskCache(tmp_path, 1 << 20)
    entry.write_bytes(b"?")
    for age_s, is_new in ((3600, True), (0, False), (50, False), (70, True), (-3600, True)):
        os.utime(entry, (time.time() - age_s,) * 2)
        before = entry.stat()
        room.touch(entry, before)
        assert (entry.stat().st_mtime_ns != before.st_mtime_ns) == is_new
        assert not is_new or abs(entry.stat().st_mtime - time.time()) < 30
