"""Storages and roots that are restored, cloned, mixed or half synced: no durable entry is lost without an error."""

import contextlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import tiered_index
from tests.integration.cli.command_lines import run_here
from tests.support.disk_faults import FaultDisk
from tests.support.log_records import publish
from tests.support.restores import (
    RESTORES,
    Life,
    Sites,
    another_history,
    as_many_in_a_copy,
    entries,
    leave_two_copies,
    read,
)
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.errors import RootBehind, StorageBehind, StorageUnavailable, TieredIndexError
from tiered_index.format.names import SEGMENT_SUFFIX, data_name, segment_name
from tiered_index.service.jobs.copying import Copier
from tiered_index.service.jobs.repair import Repairs
from tiered_index.service.jobs.verify import check_index
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage

OUTCOMES = """
| restored                        | said            | who | storage            | sent      | remaining              |
| the storage                     | earlier state   | WRJ | 1-30               | 2, 50, 1  | 1-80                   |
| the storage, files were retired | earlier state   | WRJ | 1-30               | 1, 10, 0  | 1-30, 71-80            |
| the storage, another went on    | another history | WRJ | 1-10, 101-110      | 1, 10, 1  | 1-20, 101-110          |
| the root                        | a backup        | WRJ | 1-300              | 1, 100, 0 | 1-300                  |
| the root, its file was merged   | a backup        | WRJ | 1-300              | 1, 100, 0 | 1-300                  |
| the root, an object is lost     | a backup        | WRJ | bad: 1-110         | 1, 100, 0 | 1-110                  |
| the root, an object is damaged  | a backup        | WRJ | bad: 1-110         | 1, 100, 0 | 1-110                  |
| the root, the storage was away  | a backup        | WRJ | 1-30               | 2, 15, 0  | 1-30, 101-105          |
| a clone, which took the lease   | a clone         | WRJ | 1-10, 101-107      | 1, 15, 0  | 1-15, 101-107          |
| a clone that ran meanwhile      | a clone         | WRJ | 1-15, 106-110      | 1, 15, 0  | 1-15, 101-110          |
| a file that had grown           | another file    | WR  | 1-10               | 1, 15, 1  | 1-15                   |
| a grown file that was merged    | another file    | WR  | 1-10               | 1, 15, 1  | 1-15                   |
| a grown file that was retired   | another file    | L   | 1-10               | 1, 15, 0  | 1-15                   |
| an earlier file                 |                 |     | 1-15               |           | 1-15                   |
| an earlier file that went on    | another file    | WR  | 1-15               | 1, 13, 0  | 1-15, 21-23            |
| a file, unsealed, the same      |                 |     | 1-15               |           | 1-15                   |
| a file, compacted, the same     |                 |     | 1-15               |           | 1-15                   |
| a file, unsealed, as many       | another file    | WR  | 1-15               | 1, 15, 0  | 1-15, 21-25            |
| a file, compacted, as many      | another file    | WR  | 1-15               | 1, 15, 0  | 1-15, 21-25            |
| shorter                         | two histories   | wrJ | two: 1-10, 100-129 |           | 1-10, 100-129          |
| longer                          | another history | WRJ | two: 1-10, 500-529 | 1, 10, 1  | 1-10, 100-109, 500-529 |
| equal                           | another history | WRJ | two: 1-10, 500-509 | 1, 10, 1  | 1-10, 100-109, 500-509 |
| equal, where it lacks           | two histories   | wrJ | two: 1-10, 100-109 |           | 1-10, 100-109          |
"""
ROWS = {
    row[0]: row[1:]
    for line in OUTCOMES.strip().splitlines()[1:]
    for row in [[cell.strip() for cell in line[1:-1].split("|")]]
}


@dataclass(frozen=True)
class Outcome:
    """A row of the table: what is said of a restore, and what is kept. The last rows are of another site,
    whose history is shorter, longer or equal, and was synced over the storage in any way.

    - `said`: words of the error. `who` says it: W: a writer that opens the root, L: its life cycle, before the file
      counts as published, R: readers that know the root, J: jobs that know the root. All others find the entries
      `remaining`; w and r: they warn, and delete nothing of the other history.
    - `storage`: the entries that a reader of the storage alone has; ``bad``: it is refused because of an object;
      ``two``: it is refused, as new writers are, because there are two histories, and a copy has these entries.
    - `sent`: what `recover` reports: the numbers of files and entries that it sent, and of files that the storage has.
      Sources then continue behind the last entry of the storage.
    - `remaining`: the entries of the index in the end.
    """

    said: str
    who: str
    storage: str
    sent: str
    remaining: str

    @property
    def stops_writers(self) -> bool:
        """Whether a writer of the root can't go on."""
        return not {"W", "L"}.isdisjoint(self.who)

    @property
    def error(self) -> type[TieredIndexError]:
        of_storage = "earlier state", "another history", "two histories"
        return StorageBehind if self.said in of_storage else RootBehind

    @property
    def stored(self) -> set[int]:
        """The entries in the storage."""
        return numbers(self.storage.removeprefix("two: ").removeprefix("bad: "))

    def check_storage(self, life: Life) -> None:
        """Compare what readers, new writers and copies of the storage alone have."""
        if not self.storage.startswith(("two", "bad")):
            assert life.offsets_found() == self.stored
            return
        with pytest.raises(TieredIndexError) as caught:
            life.offsets_found()
        if self.storage.startswith("two"):
            error = caught.value
            assert isinstance(error, StorageBehind) and error.expected and error.found
            with pytest.raises(StorageBehind, match="two histories"):
                IndexService.open(root=life.folder / "new", storage=life.uri)
            with contextlib.closing(open_storage(life.uri)) as storage:
                with pytest.raises(StorageBehind, match="two histories"):
                    StorageLog(storage, life.clock).open()
                # a copy uses the history of the newest checkpoint, which one of the roots has, too
                saved = MemoryStorage(clock=life.clock)
                copier = Copier(storage, saved, life.clock)
                copier.open()
                copier.run_once()
            assert read(saved, life) == self.stored


def numbers(ranges: str) -> set[int]:
    """Return the numbers of inclusive ranges, as in a row."""
    return entries(*(tuple(map(int, span.split("-"))) for span in ranges.split(", ")))


def files_of(life: Life) -> list[Path]:
    """Return all files and folders, without the locks of roots, a database's journal, and the root of a new writer."""
    paths = sorted(path for path in life.folder.rglob("*") if "new" not in path.relative_to(life.folder).parts)
    return [path for path in paths if path.name != "lock" and not path.name.endswith(("-wal", "-shm"))]


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


def test_the_table_has_all_restores_and_one_module_judges_them() -> None:
    assert {name if name in ROWS else name.partition(",")[0] for name in RESTORES} == {*ROWS}
    package = Path(tiered_index.__file__).parent
    makes = re.compile(r"(?<!class )\b(Root|Storage)Behind\(")
    judges = [path for path in package.rglob("*.py") if makes.search(path.read_text())]
    assert [path.relative_to(package).as_posix() for path in judges] == ["service/log/identity.py"]


@pytest.mark.parametrize(
    "restored", [pytest.param(name, marks=[pytest.mark.long] * name.endswith("database")) for name in RESTORES]
)
def test_what_was_restored_is_said_and_its_entries_are_kept(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, restored: str
) -> None:
    outcome = Outcome(*(ROWS.get(restored) or ROWS[restored.partition(",")[0]]))
    remaining, where = numbers(outcome.remaining), ("--root", life.root, "--storage")
    RESTORES[restored](life, monkeypatch)
    before, is_mixed = files_of(life), outcome.storage.startswith("two")
    outcome.check_storage(life)
    if "R" in outcome.who:
        with pytest.raises(TieredIndexError), IndexReader.open(life.uri, root=life.root, clock=life.clock) as reader:
            life.offsets_found(reader)
    else:
        with IndexReader.open(life.uri, root=life.root, clock=life.clock) as reader:
            assert life.offsets_found(reader) == remaining
        assert ("r" in outcome.who) == ("a root continues with its own history" in caplog.text)
    if "J" in outcome.who:
        for job in ("merge", "orphans --yes", "erase --topic t --key k --yes", "expire --set retention.age_s=9d --yes"):
            refused = run_here(*job.split(), *where, life.uri, "--json")
            assert (job, refused.code, refused.error["type"]) == (job, 4, outcome.error.__name__)
        told = run_here("verify", "--deep", *where, life.uri, "--json")
        assert told.code == 1
        assert {"log", "checkpoint"} & {finding["part"] for finding in told.document["findings"]}
    if not outcome.stops_writers:
        assert files_of(life) == before
        if "w" in outcome.who:
            with life.open() as index:
                assert [problem for problem in index.health()["problems"] if outcome.said in problem]
                stored = {path for path in files_of(life) if "data%" in str(path)}
                life.clock.advance(40 * 86400)
                with pytest.raises(StorageBehind, match=outcome.said):
                    index.run_lifecycle()
                assert stored <= {*files_of(life)}
        assert life.reopened() == remaining
        assert not list((life.root / "unsealed").glob("*.journal"))
        return
    with pytest.raises(outcome.error, match=outcome.said) as caught:
        life.open() if "W" in outcome.who else life.publish_all()
    assert "tiered-index recover" in str(caught.value)
    if "J" in outcome.who:
        repaired = run_here("verify", "--deep", "--repair", "--yes", *where, life.uri, "--json")
        problems = [finding["problem"] for finding in repaired.document["findings"] if finding["part"] == "log"]
        assert repaired.code == 1
        # a log whose records contradict each other can't be compared with the root
        assert any("tiered-index recover" in problem or "two histories" in problem for problem in problems)
        assert files_of(life) == before
    else:
        # the opening has claimed the storage before it compared files
        files = [path for path in before if path.suffix in (".index", ".journal")]
        if "W" in outcome.who:
            assert {*files} <= {*files_of(life)}
        # a life cycle has compacted them
        assert {path.stem for path in files} <= {path.stem for path in files_of(life)}
    outcome.check_storage(life)
    done = life.begin_anew()
    assert ((done.sent, done.entries, done.stored), done.kept) == (tuple(map(int, outcome.sent.split(", "))), {})
    with life.open() as index:
        assert index.durable_position("s") == max(outcome.stored)
    life.publish_all()
    if outcome.storage.startswith("bad"):
        with life.open() as index:
            assert {item.offset for item in index.query("t", "k", max_count=1000, allow_partial=True)} == remaining
    else:
        assert (life.reopened() if is_mixed else life.offsets_found()) == remaining
    assert not [path for path in life.root.iterdir() if path.name.startswith(("aside", "sent"))]


@pytest.mark.parametrize("place", ["unsealed", "compacted"])
def test_an_earlier_form_of_a_file_is_dropped_only_if_the_later_one_has_its_entries(life: Life, place: str) -> None:
    leave_two_copies(life)
    faulty = FaultStorage(LocalStorage(life.folder / "storage"))
    if place == "unsealed":
        faulty.fail("put", name_prefix="data/", times=None)
    with life.open(storage_backend=faulty) as index:
        life.ingest(index, 5, upload=False)
        index.seal()
        with contextlib.suppress(StorageUnavailable):
            index.run_lifecycle()
        (file,) = [handle.file_id for handle in index.files()]
    other = FaultStorage(LocalStorage(life.folder / "storage.kept"))
    other.fail("put", name_prefix="data/", times=None)
    life.end_lease("storage.kept")
    life.put = 20
    with life.open(life.folder / "copy", storage_backend=other) as copy:
        life.ingest(copy, 3, upload=False)
        if place == "compacted":
            copy.seal()
            with pytest.raises(StorageUnavailable):
                copy.run_lifecycle()
    for path in (life.folder / "copy" / place).glob(f"{file}*"):
        shutil.copy(path, life.root / place)
    with (
        IndexReader.open(life.uri, root=life.root, clock=life.clock) as reader,
        pytest.raises(RootBehind, match="another file"),
    ):
        life.offsets_found(reader)
    with pytest.raises(RootBehind, match="another file"):
        life.open()
    assert [path.stem for path in (life.root / place).glob(f"{file}*")]
    assert life.begin_anew().kept == {}
    assert life.reopened() == entries((1, 15), (21, 23))


def test_a_writer_beside_another_history_deletes_none_of_its_uploads(life: Life) -> None:
    another_history(life, (3, 1), "keeping times", "a")
    storage = LocalStorage(life.folder / "a")
    faulty = FaultStorage(storage)
    faulty.fail("put", name_prefix="data/", times=None)
    with life.open(storage_backend=faulty) as index:
        life.ingest(index, 5, upload=False)
        index.seal()
        with pytest.raises(StorageUnavailable):
            index.run_lifecycle()
        (file,) = [handle.file_id for handle in index.files() if handle.place == "compacted"]
    left = [data_name(file, "0" * 16), segment_name("s", 0, 1, SEGMENT_SUFFIX)]
    for name in left:
        storage.put(name, b"of the other history")
    with life.open() as index:
        assert index.archive("s", 100, 10, lambda position, length: b"y" * length)
        index.run_lifecycle()
        assert [storage.get(name) for name in left] == [b"of the other history"] * 2


class _Forgetful(FaultDisk):
    """A folder sync that fails drops its changes: no later one writes them."""

    failing: str | None = None

    def sync_folder(self, folder: Path) -> None:
        if self.failing is not None and folder.name == self.failing:
            self.failing = None
            self._take(lambda change: hasattr(change, "touches") and change.touches(folder))
            raise OSError(5, "the sync failed")
        super().sync_folder(folder)


@pytest.mark.parametrize("again", ["next round", "next start"])
def test_a_record_whose_folder_sync_failed_is_published_when_durable(life: Life, again: str) -> None:
    disk = _Forgetful()
    storage = LocalStorage(life.folder / "storage", disk=disk)
    index = life.open(storage_backend=storage, disk=disk, local_keep_s=0)
    life.ingest(index, 20, upload=False)
    index.seal()
    disk.failing = "log%"
    with pytest.raises(StorageUnavailable):
        index.run_lifecycle()
    assert disk.failing is None
    if again == "next start":
        index.abandon()
        index = life.open(storage_backend=storage, disk=disk, local_keep_s=0)
    else:
        index.run_lifecycle()
    life.clock.advance(10)
    index.run_lifecycle()
    index.abandon()
    disk.lose_unsynced()
    assert len(life.reopened(storage_backend=LocalStorage(life.folder / "storage"), local_keep_s=0)) == 20


def test_a_reader_that_was_open_notices_an_older_root(life: Life) -> None:
    life.write(100, upload=False)
    life.keep("root")
    life.write(200, upload=True)
    with IndexReader.open(root=life.root, clock=life.clock) as reader:
        assert life.offsets_found(reader) == entries((1, 300))
        life.restore("root")
        life.clock.advance(100)
        with pytest.raises(RootBehind, match="tiered-index recover"):
            life.offsets_found(reader)


def test_a_reader_reports_another_history_and_opens_it_again(life: Life) -> None:
    life.write(10, upload=True)
    life.keep("storage", "root")
    life.write(10, upload=True)
    storage = LocalStorage(life.folder / "storage")
    with IndexReader.open(f"file://{life.folder}/storage", clock=life.clock, refresh_interval_s=1) as reader:
        assert len(life.offsets_found(reader)) == 20
        life.restore("storage", "root")
        life.put = 100
        life.write(10, upload=True)
        assert StorageLog(storage, life.clock).open().number == reader.log_state.number
        life.clock.advance(5)
        with pytest.raises(TieredIndexError, match="another"):
            life.offsets_found(reader)
        life.clock.advance(5)
        assert life.offsets_found(reader) == {*range(1, 11), *range(101, 111)}


def test_a_copy_stops_if_its_source_has_another_history(life: Life) -> None:
    life.write(10, upload=True)
    life.keep("storage", "root")
    life.write(10, upload=True)
    source, target = LocalStorage(life.folder / "storage"), LocalStorage(life.folder / "target")
    following = Copier(source, target, life.clock)
    following.open()
    following.run_once()
    life.restore("storage", "root")
    life.write(10, upload=True)
    for copier in (following, Copier(source, target, life.clock)):
        with pytest.raises(StorageBehind):
            copier.open() if copier is not following else copier.run_once()
    # the command does not try again
    done = run_here("copy", "--from", source.uri, "--to", target.uri, "--follow", "--json")
    assert (done.code, done.error["type"]) == (StorageBehind.exit_code, "StorageBehind")


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "others"])
def test_a_file_that_another_publishes_meanwhile_is_compared(life: Life, is_same: bool) -> None:
    stored, copy, storage = as_many_in_a_copy(life, is_same=is_same)
    copy.seal()
    with pytest.raises(StorageUnavailable):
        copy.run_lifecycle()
    storage.clear()
    storage.put(stored.name, LocalStorage(life.folder / "storage").get(stored.name))
    publish(StorageLog(storage, life.clock), copy.log_state.epoch, (stored,))
    if is_same:
        copy.run_lifecycle()
        assert [handle.place for handle in copy.files()] == ["uploaded"]
    else:
        with pytest.raises(RootBehind, match="another file with this id"):
            copy.run_lifecycle()
        assert life.offsets_found(copy) >= entries((21, 25))
    copy.abandon()


@pytest.mark.parametrize("rounds", [(2, 1), (1, 2)], ids=["a broken log", "a whole log"])
def test_verify_says_which_log_is_whole_and_repairs_its_checkpoints(life: Life, rounds: tuple[int, int]) -> None:
    sites = Sites(life, "file")
    sites.write("b", rounds[1], 500)
    sites.write("a", rounds[0], 100)
    sites.merge("b", "a", "keeping times")
    report = Report()
    config = IndexConfig(storage=sites.storage("a").uri)
    check_index(config, report, lambda *_: None, lambda *_: None, deep=False)
    parts = {finding.part for finding in report.findings}
    if rounds == (2, 1):
        assert "log" in parts
        return
    assert parts == {"checkpoint"}
    log = StorageLog(sites.storage("a"), life.clock)
    log.open(checks=False)
    Repairs(sites.storage("a"), log).run(report, yes=True)
    assert read(sites.storage("a"), life) == {*range(1, 11), *range(500, 520)}
