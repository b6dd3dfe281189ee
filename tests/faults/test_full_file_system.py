"""A real file system that is full, at every step of a file's life and for any time.

No entry is lost, `health` reports it, and the index recovers. If no file system can be mounted, a fault layer refuses
every call that needs space.
"""

import pytest

from tests.integration.cli.command_lines import run_here
from tests.integration.cli.conftest import expected_offsets, write_source
from tiered_index import IndexReader
from tiered_index.errors import BackPressure, DiskFull
from tiered_index.storage.local import LocalStorage

STEPS = 15
# pages left for the scenario
SPARE_PAGES = (0, 4)


@pytest.fixture
def small_world(small_disk, make_world):
    """Return a function that makes worlds on the small disk, whose files have two pages."""

    def make(storage=None):
        world = make_world(storage, small_disk.folder)
        world.settings |= {"slots": 700, "items": 12, "buffer_max_entries": 40, "checkpoint_every": 2}
        return world

    return make


def live(world, disk, full_from, pages):
    """Run the scenario on a disk that is full from one step on; return the number of refused steps."""
    refused = 0
    for number, step in enumerate(world.script()):
        if number == full_from:
            disk.fill(pages)
        try:
            step()
        except BackPressure as error:  # a full disk, and in the end a full buffer
            refused += isinstance(error, DiskFull)
            assert any("No space left" in problem for problem in world.service.health()["problems"])
            world.check()
    return refused


@pytest.mark.parametrize(
    ("pages", "restarts"),
    [
        (0, False),
        (4, True),
        pytest.param(0, True, marks=pytest.mark.long),
        pytest.param(4, False, marks=pytest.mark.long),
    ],
)
def test_it_fills_up_at_any_step_and_heals(small_world, small_disk, pages, restarts):
    """Without a restart, the storage is on the same disk, so publishing fails, too."""
    refused = 0
    for full_from in range(STEPS):
        folder = small_disk.folder / f"store-{full_from}"
        world = small_world(None if restarts else LocalStorage(folder, disk=small_disk.disk))
        world.open(small_disk.disk)
        refused += live(world, small_disk, full_from, pages)
        if restarts:
            world.abandon()
            small_disk.fill(pages)
            world.come_back(small_disk.disk)
            world.settle()
        small_disk.free()
        world.do("flush 5 heal")
        world.service.close()
        world.tidy()
    assert refused >= STEPS


def test_an_index_that_is_begun_on_a_full_disk_is_refused_until_there_is_room(small_world, small_disk):
    refused = 0
    for pages in SPARE_PAGES:
        world = small_world()
        small_disk.fill(pages)
        try:
            world.open(small_disk.disk)
        except DiskFull:
            refused += 1
        small_disk.free()
        if world.service is None:
            world.open(small_disk.disk)
        world.do("9 heal")
        world.service.close()
    assert refused


def test_the_command_exits_with_7_and_continues_when_repeated(small_disk, tmp_path, monkeypatch):
    source = write_source(tmp_path / "messages.ndjson", 0, 3000)
    root, uri = small_disk.folder / "root", f"file://{tmp_path / 'store'}"
    options = ("--root", root, "--storage", uri, "--slots", 64, "--items", 1500, "--patience", 0, "--json", "--wait")
    if not small_disk.real:
        monkeypatch.setattr("tiered_index.service.index.Disk", lambda: small_disk.disk)
    small_disk.fill(40)
    refused = run_here("ingest", source, *options)
    assert (refused.code, refused.out, refused.error["type"]) == (7, "", "DiskFull")
    small_disk.free()
    done = run_here("ingest", source, *options)
    assert (done.code, done.document["position"]) == (0, source.stat().st_size), done.err
    with IndexReader.open(uri) as reader:
        for key in ("k3", "own-77", "own-2999"):
            entry_offsets = [item.offset for item in reader.query("orders", key, max_count=1000)]
            assert entry_offsets == expected_offsets("orders", key)
