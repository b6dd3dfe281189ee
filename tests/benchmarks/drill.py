"""`python -m tests.benchmarks drill`: what goes back in time, is cloned or is lost, drilled as an operator would.

Each incident is a small index of one key and the commands of an operator, in this process. Entries count as declared
durable once `ingest` has ended with exit code 0. At the end of an incident every declared entry is looked up: one that
is gone is lost. An incident is told where a command ended with another exit code than 0, or an answer said that it is
not complete. Lost or foreign entries that nobody told of are the program's finding, and so is an incident that ends
with a command that failed: the operator is stuck. One thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer

from tests.benchmarks.machine.setting import scratch
from tests.benchmarks.running import Out, RootDir
from tests.integration.cli.command_lines import Outcome, clean_environment, run_here
from tiered_index import IndexReader
from tiered_index.cli.session import Session, command
from tiered_index.clock import ManualClock, SystemClock
from tiered_index.errors import InvalidArgument, ObjectArchived, TieredIndexError
from tiered_index.service.log.session import Lease
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.opening import open_storage

_BEGIN_MS = 1_700_000_000_000
_GEOMETRY = ("--slots", 16, "--items", 4000)
_DAY_MS = 86_400_000
_LEASE_TTL_S = 1
_LIMIT_S = 60


@dataclass
class Drill:
    """One incident in a folder of its own: names of roots and storages are folders in it."""

    folder: Path
    commands: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    declared: set[int] = field(default_factory=set)
    is_stuck: bool = False
    _next: int = 0

    def uri(self, storage: str) -> str:
        """Return the URI of a storage."""
        return f"file://{self.folder / storage}"

    def run(self, *arguments: object, stdin: bytes = b"") -> Outcome:
        """Run a command; a failure is told."""
        given = [str(one) for one in arguments]
        done = run_here(*given, stdin=stdin, environment={"TIERED_INDEX_LEASE_TTL_S": f"{_LEASE_TTL_S}"})
        self.commands.append(" ".join(given).replace(f"{self.folder}/", ""))
        if given[0] != "query":
            self.is_stuck = done.code != 0
        if done.code:
            self.told.append(f"exit code {done.code}: {(done.err.strip().splitlines() or [''])[-1]}")
        return done

    def ingest(
        self,
        count: int = 0,
        *more: object,
        root: str = "root",
        storage: str = "store",
        source: str = "source.ndjson",
        stdin: bool = False,
    ) -> Outcome:
        """Add messages to a source and ingest it; what is new is declared durable where that succeeds."""
        fresh = range(self._next, self._next + count)
        self._next += count
        lines = "".join(
            json.dumps(
                {"topic": "t", "queue_id": 0, "keys": ["k"], "offset": n, "size": 9, "timestamp_ms": _BEGIN_MS + n}
            )
            + "\n"
            for n in fresh
        )
        place = self.folder / source
        if not stdin:
            with place.open("a") as file:
                file.write(lines)
        where = ("--root", self.folder / root, "--storage", self.uri(storage), *_GEOMETRY, *more)
        done = self.run("ingest", "-" if stdin else place, *where, stdin=lines.encode() if stdin else b"")
        if done.code == 0:
            self.declared |= set(fresh) if stdin else _offsets(place)
        return done

    def keep(self, name: str, kept: str) -> None:
        """Take a copy of a folder, as a backup or a snapshot."""
        shutil.copytree(self.folder / name, self.folder / kept)
        self.commands.append(f"cp -a {name} {kept}")

    def restore(self, kept: str, name: str) -> None:
        """Put a copy in the place of a folder."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        shutil.copytree(self.folder / kept, self.folder / name)
        self.commands.append(f"rm -r {name}; cp -a {kept} {name}")

    def found(self, *places: str, root: str | None = None) -> set[int]:
        """Return what the answers of storages, and of a root, hold; one that is not complete is told."""
        found: set[int] = set()
        asked = [("--storage", self.uri(place)) for place in places]
        asked += [("--root", str(self.folder / root))] if root is not None else []
        for where in asked:
            done = self.run("query", "t", "k", *where, "--max", 100_000, "--json")
            if done.code == 0:
                if done.document["status"] != "complete":
                    self.told.append(f"status {done.document['status']}")
                found |= {item["offset"] for item in done.document["items"]}
        return found


def _offsets(place: Path) -> set[int]:
    return {json.loads(line)["offset"] for line in place.read_text().splitlines()}


# Incidents. Each returns what is found in the end.


def root_from_a_backup(drill: Drill) -> set[int]:
    """A root is restored from a backup, after uploads and a merge."""
    drill.ingest(100)
    drill.keep("root", "backup")
    drill.ingest(200, "--wait")
    drill.run("merge", "--storage", drill.uri("store"), "--tiers", "1d")
    drill.restore("backup", "root")
    drill.ingest(400, "--wait")
    drill.run("recover", "--root", drill.folder / "root")
    drill.ingest(0, "--wait")
    return drill.found("store")


def bucket_behind_its_root(drill: Drill, *, stdin: bool = False) -> set[int]:
    """A bucket is restored to an earlier state, beside a root that survives."""
    drill.ingest(300, "--wait", stdin=stdin)
    drill.keep("store", "backup")
    drill.ingest(700, "--wait", stdin=stdin)
    drill.restore("backup", "store")
    drill.ingest(0, "--wait", stdin=stdin)
    drill.run("recover", "--root", drill.folder / "root")
    drill.ingest(10, "--wait", stdin=stdin)
    return drill.found("store")


def bucket_behind_entries_without_a_source(drill: Drill) -> set[int]:
    """The same, with entries that no source can send again."""
    return bucket_behind_its_root(drill, stdin=True)


def older_root_without_its_storage(drill: Drill) -> set[int]:
    """An older root is started while the storage is down, and fills a file that is published already."""
    drill.ingest(100)
    drill.keep("root", "backup")
    drill.ingest(200, "--wait")
    drill.restore("backup", "root")
    away = drill.folder / "away"
    (drill.folder / "store").rename(away)
    drill.ingest(100, stdin=True)
    away.rename(drill.folder / "store")
    drill.ingest(100, "--wait", stdin=True)
    drill.run("recover", "--root", drill.folder / "root")
    drill.ingest(0, "--wait")
    return drill.found("store")


def cloned_machine(drill: Drill) -> set[int]:
    """A machine is cloned, and both write: the clone first."""
    drill.ingest(100)
    drill.keep("root", "clone")
    drill.ingest(100, "--wait", root="clone", stdin=True)
    drill.ingest(100, "--wait", stdin=True)
    drill.run("recover", "--root", drill.folder / "root")
    drill.ingest(50, "--wait", stdin=True)
    return drill.found("store")


def reader_over_a_restored_bucket(drill: Drill) -> set[int]:
    """A reader stays open while its bucket is restored and written on."""
    drill.ingest(100, "--wait")
    drill.keep("store", "backup")
    drill.ingest(100, "--wait")
    found: set[int] = set()
    with IndexReader.open(drill.uri("store")) as reader:
        assert len(reader.query("t", "k", max_count=100_000)) == 200
        drill.restore("backup", "store")
        drill.run("recover", "--root", drill.folder / "root")
        drill.ingest(100, "--wait")
        for _ in range(3):
            try:
                reader.refresh()
                found = {item.offset for item in reader.query("t", "k", max_count=100_000)}
            except TieredIndexError as error:
                drill.told.append(f"{type(error).__name__}: {error}")
    return found


def standby_of_a_restored_bucket(drill: Drill) -> set[int]:
    """A bucket with a standby is restored, and written on until its log is as long as before."""
    copy = ("copy", "--from", drill.uri("store"), "--to", drill.uri("standby"))
    drill.ingest(100, "--wait")
    drill.keep("store", "backup")
    drill.ingest(100, "--wait")
    drill.run(*copy)
    drill.restore("backup", "store")
    drill.run("recover", "--root", drill.folder / "root")
    for _ in range(3):
        drill.ingest(50, "--wait")
    if drill.run(*copy).code:
        # the standby is not changed any more: a new one begins
        drill.run(*copy[:-1], drill.uri("standby-2"))
        return drill.found("standby-2")
    return drill.found("standby")


def dead_host_with_a_fast_clock(drill: Drill) -> set[int]:
    """A host dies whose clock is a day fast; another host takes over."""
    drill.ingest(100, "--wait")
    with open_storage(drill.uri("store")) as storage:
        Lease(storage, 2, "dead", ManualClock(SystemClock().now_ms() + _DAY_MS), float(_LEASE_TTL_S))
    for _ in range(5):
        if drill.ingest(100, "--wait", root="other").code == 0:
            break
        time.sleep(_LEASE_TTL_S)
    return drill.found("store")


def dead_host_that_nobody_waits_for(drill: Drill) -> set[int]:
    """A host dies, and a person who knows it takes over at once. The host was alive after all: it is fenced."""
    drill.ingest(100, "--wait")
    with open_storage(drill.uri("store")) as storage:
        Lease(storage, 2, "dead", SystemClock(), 600.0)
    drill.ingest(100, root="other")
    drill.run("recover", "--take-over", "--root", drill.folder / "other", "--storage", drill.uri("store"))
    drill.ingest(100, "--wait", root="other")
    return drill.found("store")


def histories_merged_by_a_sync(drill: Drill) -> set[int]:
    """Two sites go on from one bucket, and the shorter one is synced over the longer without deletes."""
    return _synced(drill, longer=4)


def older_history_merged_by_a_sync(drill: Drill) -> set[int]:
    """The same, where the shorter site wrote first: the sync keeps the times of files, and none of them tells."""
    return _synced(drill, longer=4, is_older=True)


def history_replaced_by_a_sync(drill: Drill) -> set[int]:
    """The same, where all records of the first site are overwritten: its checkpoints and its root tell."""
    return _synced(drill, longer=1)


def _synced(drill: Drill, *, longer: int, is_older: bool = False) -> set[int]:
    drill.ingest(100, "--wait")
    drill.keep("store", "site-b")
    drill.keep("root", "root-b")

    def write() -> None:
        drill.run("recover", "--root", drill.folder / "root-b", "--storage", drill.uri("site-b"))
        drill.ingest(300, "--wait", root="root-b", storage="site-b", stdin=True)

    if is_older:
        write()
    for _ in range(longer):
        drill.ingest(100, "--wait")
    if not is_older:
        write()
    shutil.copytree(drill.folder / "site-b", drill.folder / "store", dirs_exist_ok=True)
    drill.commands.append("cp -a site-b/. store/")
    drill.run("query", "t", "k", "--storage", drill.uri("store"))
    drill.run("verify", "--storage", drill.uri("store"))
    drill.ingest(0, "--wait")
    drill.run("recover", "--root", drill.folder / "root")
    drill.ingest(50, "--wait")
    if drill.run("verify", "--deep", "--repair", "--yes", "--storage", drill.uri("store")).code:
        # the log is broken: a copy takes the history of the newest checkpoint
        drill.run("copy", "--from", drill.uri("store"), "--to", drill.uri("saved"))
        # the other site's entries lie in its own bucket
        return drill.found("saved", "site-b")
    return drill.found("store")


def orphans_by_a_fast_clock(drill: Drill) -> set[int]:
    """`orphans --yes` runs on a host whose clock is three days fast, beside an upload that is not yet published."""
    drill.ingest(100, "--wait")
    objects = sorted(path for path in (drill.folder / "store/data%").rglob("*") if path.is_file())
    sent = drill.folder / "store/data%/sending%/1.index"
    sent.parent.mkdir()
    shutil.copyfile(objects[0], sent)
    fast = ManualClock(SystemClock().now_ms() + 3 * _DAY_MS)
    with mock.patch("tiered_index.cli.session.SystemClock", lambda: fast):
        drill.run("orphans", "--storage", drill.uri("store"), "--yes")
    return drill.found("store") if sent.exists() else set()


def checkpoint_ahead_of_the_log(drill: Drill) -> set[int]:
    """Log and objects are restored, and newer checkpoints stay."""
    drill.ingest(100, "--wait")
    drill.keep("store", "backup")
    drill.ingest(100, "--wait")
    shutil.copytree(drill.folder / "store/checkpoint%", drill.folder / "backup/checkpoint%", dirs_exist_ok=True)
    drill.restore("backup", "store")
    drill.run("query", "t", "k", "--storage", drill.uri("store"))
    drill.run("recover", "--root", drill.folder / "root")
    drill.ingest(50, "--wait")
    return drill.found("store")


def oldest_records_deleted(drill: Drill) -> set[int]:
    """A bucket's life-cycle rule deletes the oldest log records."""
    drill.ingest(100, "--wait")
    drill.ingest(100, "--wait")
    for path in sorted((drill.folder / "store/log%").iterdir())[:2]:
        path.unlink()
    drill.run("verify", "--storage", drill.uri("store"))
    # which ends with exit code 4, and has all entries
    drill.run("copy", "--from", drill.uri("store"), "--to", drill.uri("saved"))
    drill.run("verify", "--storage", drill.uri("saved"))
    return drill.found("saved")


def storage_lost(drill: Drill) -> set[int]:
    """The storage is lost, and the root is alive."""
    drill.ingest(100, "--wait")
    drill.ingest(100)
    shutil.rmtree(drill.folder / "store")
    export = drill.folder / "entries.parquet"
    drill.run("export", "--root", drill.folder / "root", "--out", export)
    new = ("--root", drill.folder / "new", "--storage", drill.uri("new-store"), *_GEOMETRY)
    drill.run("import", export, *new, "--wait")
    drill.ingest(50, "--wait", root="new", storage="new-store")
    return drill.found("new-store")


def region_lost_and_back(drill: Drill) -> set[int]:
    """A region is lost, its standby is promoted, and the index fails back."""
    drill.ingest(100, "--wait")
    drill.run("copy", "--from", drill.uri("store"), "--to", drill.uri("standby"))
    drill.ingest(100)
    for gone in ("store", "root"):
        shutil.rmtree(drill.folder / gone)
    drill.ingest(100, "--wait", root="root-b", storage="standby")
    # onto the old place, which is empty again
    drill.run("copy", "--from", drill.uri("standby"), "--to", drill.uri("store"))
    drill.ingest(100, "--wait")
    return drill.found("store")


def unmounted_target(drill: Drill) -> set[int]:
    """A backup is copied to a disk that is not mounted."""
    drill.ingest(100, "--wait")
    copy = ("copy", "--from", drill.uri("store"), "--to", drill.uri("disk"), "--must-exist")
    drill.run(*copy[:-1])
    (drill.folder / "disk").rename(drill.folder / "unplugged")
    drill.run(*copy)
    (drill.folder / "unplugged").rename(drill.folder / "disk")
    drill.run(*copy)
    return drill.found("disk")


def followed_bucket_that_is_restored(drill: Drill) -> set[int]:
    """`copy --follow` keeps a standby while its bucket is restored; it stops, and a new standby is promoted."""
    drill.ingest(100, "--wait")
    drill.keep("store", "backup")
    follow = ["copy", "--from", drill.uri("store"), "--to", drill.uri("standby"), "--follow", "--interval", "1s"]
    drill.commands.append(" ".join(follow).replace(f"{drill.folder}/", ""))
    follower = subprocess.Popen(
        [sys.executable, "-m", "tiered_index.cli", *follow, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    with follower:
        assert follower.stdout is not None and follower.stderr is not None
        follower.stdout.readline()
        drill.ingest(100, "--wait")
        while json.loads(follower.stdout.readline())["records"] == 0:
            pass
        drill.restore("backup", "store")
        drill.run("recover", "--root", drill.folder / "root")
        drill.ingest(100, "--wait")
        _, err = follower.communicate(timeout=_LIMIT_S)
    if follower.returncode:
        drill.told.append(f"exit code {follower.returncode}: {err.strip().splitlines()[-1]}")
    drill.run("copy", "--from", drill.uri("store"), "--to", drill.uri("standby-2"))
    drill.ingest(50, "--wait", root="new", storage="standby-2")
    return drill.found("standby-2")


def objects_in_an_archive(drill: Drill) -> set[int]:
    """A bucket's life-cycle rule moves objects to an archive, from which they are restored."""
    drill.ingest(100, "--wait")

    def archived(name: str) -> None:
        if name.startswith("data/"):
            raise ObjectArchived(f"reading {name!r}: the object is archived: restore it first")

    with contextlib.ExitStack() as patched:
        for operation in ("get", "get_range", "get_suffix"):
            read = getattr(LocalStorage, operation)

            def refused(storage: Any, name: str, *more: Any, _read: Any = read, **named: Any) -> Any:
                archived(name)
                return _read(storage, name, *more, **named)

            patched.enter_context(mock.patch.object(LocalStorage, operation, refused))
        drill.run("query", "t", "k", "--storage", drill.uri("store"))
        drill.run("verify", "--storage", drill.uri("store"))
    drill.commands.append("aws s3api restore-object ...")
    drill.run("verify", "--deep", "--storage", drill.uri("store"))
    return drill.found("store")


INCIDENTS: tuple[Callable[[Drill], set[int]], ...] = (
    root_from_a_backup,
    bucket_behind_its_root,
    bucket_behind_entries_without_a_source,
    older_root_without_its_storage,
    cloned_machine,
    reader_over_a_restored_bucket,
    standby_of_a_restored_bucket,
    dead_host_with_a_fast_clock,
    dead_host_that_nobody_waits_for,
    histories_merged_by_a_sync,
    older_history_merged_by_a_sync,
    history_replaced_by_a_sync,
    orphans_by_a_fast_clock,
    checkpoint_ahead_of_the_log,
    oldest_records_deleted,
    storage_lost,
    region_lost_and_back,
    unmounted_target,
    followed_bucket_that_is_restored,
    objects_in_an_archive,
)


def drilled(incident: Callable[[Drill], set[int]], folder: Path) -> dict[str, Any]:
    """Run one incident; return what it was, took and lost."""
    folder.mkdir()
    drill, begun_s = Drill(folder), time.monotonic()
    found = incident(drill)
    lost, foreign = drill.declared - found, found - drill.declared
    silent = bool(lost or foreign) and not drill.told
    return {
        "incident": incident.__name__,
        "what": (incident.__doc__ or "").partition("\n")[0],
        "commands": drill.commands,
        "seconds": round(time.monotonic() - begun_s, 2),
        "declared": len(drill.declared),
        "lost": len(lost),
        "foreign": len(foreign),
        "told": drill.told,
        "status": "lost without a word" if silent else "stuck" if drill.is_stuck else "ok",
    }


@command
def drill(
    session: Session,
    only: Annotated[list[str] | None, typer.Option(help="Only this incident; several times.")] = None,
    root_dir: RootDir = None,
    out: Out = None,
) -> int:
    """Drill what goes back in time, is cloned or is lost: by incident the commands, seconds, and entries lost.

    Exit code 1: an incident lost entries that were declared durable, or answered with foreign ones, and nothing told;
    or its last command failed.

    [bold]Examples[/bold]

      python -m tests.benchmarks drill

      python -m tests.benchmarks drill --only cloned_machine --json
    """
    if session.root is not None or session.storage is not None:
        raise InvalidArgument("drill makes its own roots and storages in --root-dir: leave --root and --storage out")
    names = [incident.__name__ for incident in INCIDENTS]
    if unknown := [name for name in only or () if name not in names]:
        raise InvalidArgument(f"--only {unknown[0]}: the incidents are {', '.join(names)}")
    base = (root_dir or Path(os.environ.get("TMPDIR", "/var/tmp"))).absolute()
    base.mkdir(parents=True, exist_ok=True)
    chosen = [incident for incident in INCIDENTS if not only or incident.__name__ in only]
    with scratch(base) as folder:
        rows = [drilled(incident, folder / incident.__name__) for incident in chosen]
    document = {"status": "ok" if all(row["status"] == "ok" for row in rows) else "failed", "incidents": rows}
    if out is not None:
        out.write_text(json.dumps(document, indent=2) + "\n")
    session.out.answer(document)
    columns = ("incident", "commands", "seconds", "declared", "lost", "foreign", "told", "status")
    cells = [
        (
            *(row["incident"], len(row["commands"]), f"{row['seconds']:.1f}", row["declared"], row["lost"]),
            *(row["foreign"], len(row["told"]) or "no", row["status"]),
        )
        for row in rows
    ]
    session.out.table(columns, cells, right="commands seconds declared lost foreign told")
    return 0 if document["status"] == "ok" else 1
