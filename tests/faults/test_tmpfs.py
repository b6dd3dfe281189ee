"""A real file system that is full, at every step of a file's life and for any time.

No entry is lost, `health` reports it, and the index recovers. If no file system can be mounted, a fault layer refuses
every call that needs space.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.integration.cli.command_lines import run_script
from tests.integration.cli.conftest import expected_offsets, write_source
from tiered_index import IndexReader
from tiered_index.cli.main import app
from tiered_index.errors import BackPressure, DiskFull
from tiered_index.storage.local.storage import LocalStorage

STEPS = 15
# of the scenario
SPARE_PAGES = (0, 1, 4)


@pytest.fixture
def small_world(small_disk, make_world):
    """Return a function that makes worlds on the small disk, whose files have two pages."""

    def make(storage=None):
        world = make_world(storage, small_disk.folder)
        world.settings |= {"slots": 700, "items": 12, "buffer_max_entries": 40, "checkpoint_every": 2}
        return world

    return make


def live(world, disk, full_from, pages):
    """Go through the scenario on a disk that is full from one step on; return how many steps were refused."""
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


def heal(world):
    """Bring everything through without a restart."""
    world.flush()
    world.service.seal()
    world.service.run_lifecycle()
    world.service.run_lifecycle()
    world.check()
    assert world.service.health()["problems"] == []
    assert not {"unsealed", "compacted"} & set(world.service.health()["files"])
    assert world.service.durable_position("log") == world.position


@pytest.mark.parametrize("pages", SPARE_PAGES)
def test_it_fills_up_at_any_step_and_heals_without_a_restart(small_world, small_disk, pages):
    """The storage is on the same disk: publishing is refused, too."""
    refused = 0
    for full_from in range(STEPS):
        storage = LocalStorage(small_disk.folder / f"store-{full_from}", disk=small_disk.disk)
        world = small_world(storage)
        world.open(small_disk.disk)
        refused += live(world, small_disk, full_from, pages)
        small_disk.free()
        heal(world)
        world.service.close()
        world.tidy()
        with IndexReader.open(storage_backend=storage, clock=world.clock) as reader:
            world.check(reader.query)
        assert list(storage.list_uploads()) == []
        assert {info.name for info in storage.list("data/")} == set(world.service.log_state.objects)
    assert refused >= STEPS
    if small_disk.real:
        assert {"allocate unsealed/temporary", "pwrite compacted/temporary"} <= small_disk.refused


@pytest.mark.parametrize("pages", SPARE_PAGES)
def test_a_restart_on_the_full_disk_loses_nothing_durable(small_world, small_disk, pages):
    refused = 0
    for full_from in range(STEPS):
        world = small_world()
        world.open(small_disk.disk)
        refused += live(world, small_disk, full_from, pages)
        world.abandon()
        small_disk.fill(pages)
        world.open(small_disk.disk)
        world.check()
        world.settle()
        small_disk.free()
        world.put(5)
        heal(world)
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
        world.put(9)
        heal(world)
        world.service.close()
    assert refused


def test_a_journal_without_room_to_grow_ends_its_file(small_world, small_disk):
    """The entries' room was taken ahead, the journal's was not: it is the journal that finds the disk full."""
    world = small_world()
    world.settings |= {"items": 1000, "max_late_s": 1e10}
    world.open(small_disk.disk)
    world.put(1)
    world.flush()
    small_disk.fill()
    with pytest.raises(DiskFull):
        for _ in range(200):
            world.put(1)
            world.flush()
    (file,) = world.service.files()
    assert file.count < len(world.model.entries)
    world.check()
    assert world.service.durable_position("log") < world.position
    small_disk.free()
    world.flush()
    assert file.sealed
    assert len(world.service.files()) == 2
    heal(world)
    if small_disk.real:
        assert "pwrite unsealed/.journal" in small_disk.refused


def test_the_writers_own_threads_push_back_and_go_on_by_themselves(small_world, small_disk, eventually):
    world = small_world()
    service = world.open(small_disk.disk, background=True, flush_interval_s=0.01, lifecycle_interval_s=0.01)
    world.put(5)
    world.flush()
    small_disk.fill()
    with pytest.raises(BackPressure, match="write buffer"):
        for _ in range(100):
            world.put(1)
    assert service.health()["buffered_entries"] > 35
    eventually(
        lambda: any(
            problem.startswith("flush: ") and "No space left" in problem for problem in service.health()["problems"]
        )
    )
    world.check()
    refused = [len(world.model.entries)]
    with pytest.raises(BackPressure):
        world.put(9)
    world.check()
    assert len(world.model.entries) < refused[0] + 9
    small_disk.free()
    eventually(lambda: service.health()["buffered_entries"] == 0 and not service.health()["problems"])
    world.put(5)
    world.flush()
    world.check()
    assert service.durable_position("log") == world.position
    service.close()
    world.tidy()


def test_the_console_says_it_by_exit_code_7_and_the_same_command_goes_on(small_disk, tmp_path, monkeypatch):
    source = write_source(tmp_path / "messages.ndjson", 0, 3000)
    root, uri = small_disk.folder / "root", f"file://{tmp_path / 'store'}"
    command = [
        "ingest",
        source,
        "--root",
        root,
        "--storage",
        uri,
        "--slots",
        64,
        "--items",
        1500,
        "--patience",
        0,
        "--json",
    ]
    command = [str(word) for word in command]
    if not small_disk.real:
        monkeypatch.setattr("tiered_index.service.index.Disk", lambda: small_disk.disk)

    def run(*arguments):
        if small_disk.real:
            outcome = run_script(*arguments)
            return outcome.code, outcome.out, outcome.err
        result = CliRunner().invoke(app, list(arguments))
        return result.exit_code, result.stdout, result.stderr

    small_disk.fill(40)
    code, out, err = run(*command, "--wait")
    assert code == 7, err
    assert out == ""
    assert json.loads(err.splitlines()[-1])["error"]["type"] == "DiskFull"
    small_disk.free()
    code, out, err = run(*command, "--wait")
    assert code == 0, err
    assert json.loads(out)["position"] == source.stat().st_size
    with IndexReader.open(uri) as reader:
        for key in ("k3", "own-77", "own-2999"):
            assert [item.offset for item in reader.query("orders", key, max_count=1000)] == expected_offsets(
                "orders", key
            )
