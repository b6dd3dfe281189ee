"""Bytes with right checksums and wrong content, for every format. Their readers must raise only typed errors.

- `python -m tests.reliability.mutations --all`: 1,000,000 changes
- `python -m tests.reliability.mutations --codec journal --first 4711 --count 1 --deep`: one change again

The engine makes a tree of real files (`hostile_tree`). The campaign changes one of them and corrects the checksums
(`mutated_formats`, `resealed`), and sometimes only flips bytes. It decodes each changed file. It also puts each
`--every`-th one into its place, and runs the programs that read that format: a reader, a writer, a merge, `verify`,
`inspect`, `recover`, `orphans` or a follower.

The campaign checks these promises:

- Every error is a `TieredIndexError`. There is no warning.
- No call takes longer than `_MOST_S`, or more memory than `_MOST_BYTES`.
- An answer that is `complete` has only entries that were put under its topic and key.
- Nothing is written or deleted outside the tree, and no log record is deleted.

The engine does not promise to detect a writer that writes consistent wrong data. Such a writer may leave out entries
and put others. So an answer may lack entries. If items themselves were changed (RocketMQ's files have no checksums), it
has the changed fields.
"""

import argparse
import contextlib
import fcntl
import io
import itertools
import json
import logging
import os
import resource
import shutil
import sqlite3
import struct
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.reliability import resealed
from tests.reliability.hostile_tree import (
    KEYS,
    NOW_MS,
    grow,
    merge_all,
    open_index,
    open_reader,
    small_parts,
    storage_uri,
)
from tests.reliability.mutated_formats import Codec, codecs, object_of
from tests.reliability.tally import Hang, Tally, bounded, fast_folder, main
from tests.rocketmq.followed import SteppedDispatcher
from tests.support.log_records import open_log
from tiered_index import Lookup
from tiered_index.base.clock import ManualClock
from tiered_index.cli.main import run as run_command
from tiered_index.connectors.rocketmq.archive.archive import ArchivedLog
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.classic import classic_file_names, read_entries
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.errors import TieredIndexError
from tiered_index.format.journal import parse_journal
from tiered_index.format.trailer import TAIL_SIZE
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.rows import encode_cursor, query_digest
from tiered_index.service.read.lookups import Lookups
from tiered_index.storage.opening import open_storage

_MOST_S = 20
_MOST_BYTES = 1 << 30
_TOTAL, _MOST_FAILURES = 1_000_000, 40
# the share of mutants with plain flips, which checksums detect
_FLIPS = 0.1
_CHANGES = ("open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link")
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class OutsideError(Exception):
    """A call wrote or deleted a file outside the tree."""

    kind = "wrong"


class UntypedError(Exception):
    """A command ended with the exit code of an unexpected error."""


class Campaign:
    """The tree and the programs that read it. One thread, because its guards affect the whole process."""

    def __init__(self, base: Path) -> None:
        self.tree = base / "tree"
        self.tree.mkdir()
        (base / "tmp").mkdir()
        tempfile.tempdir = str(base / "tmp")
        self.put = grow(self.tree)
        (self.tree / "cursors").mkdir()
        for number in range(4):
            cursor = encode_cursor((NOW_MS // 1000 - number, number, 0), query_digest("t", "hot", 0, 10))
            (self.tree / "cursors" / str(number)).write_text(cursor)
        self.whole = {
            str(p.relative_to(self.tree)): p.read_bytes() for p in sorted(self.tree.rglob("*")) if p.is_file()
        }
        self.codecs = codecs()
        for codec in self.codecs:
            codec.files = sorted(str(p.relative_to(self.tree)) for p in self.tree.glob(codec.pattern) if p.is_file())
            codec.files = [path for path in codec.files if self._is_read(path)]
            assert codec.files, codec.name
        self.name, self.path, self.honest = "", "", True

    def _is_read(self, path: str) -> bool:
        """Return whether a program reads a file: no temporary file, no merged object, only the newest checkpoints."""
        if "/storage/data%/" in path or "/storage/checkpoint%/" in path:
            folder = f"{path.split('/')[0]}/storage/checkpoint%/"
            newest = max(known for known in self.whole if known.startswith(folder))
            named = LogState.decode(self.whole[newest], newest).objects if "data%" in path else {}
            return path == newest or object_of(path) in named
        return not Path(path).name.startswith(".tmp")

    def restore(self) -> None:
        shutil.rmtree(self.tree)
        for path, data in self.whole.items():
            target = self.tree / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def place(self, codec: Codec, path: str, data: bytes) -> None:
        """Put a mutant into its place, and correct the fields of other files that describe it."""
        self.name, self.path = path.split("/")[0], path
        end = _items_end(self.whole[path])
        self.honest = not codec.items or data[:end] == self.whole[path][:end]
        (self.tree / path).write_bytes(data)
        if codec.name == "objects" and len(data) >= TAIL_SIZE:
            self._tell_log(path, data)
        elif codec.name == "entries":
            self._tell_journal(path, data)
        elif codec.name == "log records":
            shutil.rmtree(self.tree / self.name / "storage" / "checkpoint%")  # otherwise no reader reads old records

    def _tell_log(self, path: str, data: bytes) -> None:
        name = object_of(path)
        fields = struct.unpack(">8sIIQQQQIIII", data[-TAIL_SIZE:])[3:7]
        names = ("trailer_position", "filter_length", "directory_length", "metadata_length")
        self._tell_sizes(name, dict(zip(names, fields, strict=True)), data)

    def _tell_sizes(self, name: str, said: dict[str, int], data: bytes) -> None:
        for known, raw in self.whole.items():
            if known.startswith(f"{self.name}/storage/log") and name.encode() in raw:
                document = resealed.unsealed(raw)
                for stored in document["add"]:
                    if stored["name"] == name:
                        stored.update(said, size_bytes=len(data))
                body = json.dumps(document, separators=(",", ":")).encode()
                (self.tree / known).write_bytes(resealed.sealed(body))
            elif known.startswith(f"{self.name}/storage/checkpoint"):
                document = resealed.unpacked(raw)
                columns, file_id = document["objects"], name.split("/")[1]
                for at in [at for at, stored_id in enumerate(columns["file_id"]) if stored_id == file_id]:
                    for column, value in {**said, "size_bytes": len(data)}.items():
                        columns[column][at] = value
                (self.tree / known).write_bytes(resealed.packed(json.dumps(document).encode()))

    def _tell_journal(self, path: str, data: bytes) -> None:
        target = (self.tree / path).with_suffix(".journal")
        raw = target.read_bytes()
        journal, position = raw[:12], parse_journal(raw, "whole").layout.entry_position
        for document in map(json.loads, resealed.payloads_of(raw)):
            if document["kind"] == "batch":
                first, count = document["first"], document["count"]
                document["crc32"] = zlib.crc32(data[position(first) : position(first + count)])
            journal += resealed.journal_record(json.dumps(document).encode())
        target.write_bytes(journal)

    # programs that read

    def _check(self, index: Lookups) -> None:
        put = self.put[self.name]
        questions = sorted(put)[::9] if self.name == "follow" else list(itertools.product(("t", "u"), KEYS))
        for topic, key in questions:
            cursor = None
            for _ in range(3):
                answer = index.query(topic, key, max_count=7, cursor=cursor, allow_partial=True)
                self._judge(topic, key, answer)
                cursor = answer.cursor
                if cursor is None:
                    break
        lookups = [Lookup(topic=topic, key=key, max_count=100) for topic, key in questions]
        for lookup, answer in zip(lookups, index.query_many(lookups, allow_partial=True), strict=True):
            self._judge(lookup.topic, lookup.key, answer)

    def _judge(self, topic: str, key: str, answer: Any) -> None:
        if self.honest and answer.status == "complete":
            put = self.put[self.name].get((topic, key), set())
            if wrong := {(item.queue_id, item.offset, item.size) for item in answer} - put:
                raise AssertionError(f"{topic}/{key} was never put at {sorted(wrong)[:3]}")

    def read(self) -> None:
        with open_reader(self.tree, self.name) as reader:
            reader.files()
            self._check(reader)

    def read_root(self) -> None:
        with open_reader(self.tree, self.name, root=True, filter_after_probes=1) as reader:
            reader.files()
            self._check(reader)

    def write(self) -> None:
        index = open_index(self.tree, self.name, **({"slots": 97, "items": 5000} if self.name == "follow" else {}))
        try:
            with contextlib.suppress(TieredIndexError):
                self._check(index)
            index.put("new", 0, "new", 1, 1, NOW_MS)
            for step in (index.flush, index.seal, index.run_lifecycle, index.run_lifecycle, index.health):
                with contextlib.suppress(TieredIndexError):
                    step()
            index.close()
        finally:
            index.abandon()

    def other_writer(self) -> None:
        shutil.rmtree(self.tree / self.name / "root")
        self.write()

    def lock(self) -> None:
        with open(self.tree / self.name / "root" / "lock", "r+b") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.write()

    def merge(self) -> None:
        with small_parts():
            merge_all(self.tree, self.name, 86400)

    def orphans(self) -> None:
        storage = open_storage(storage_uri(self.tree, self.name))
        log = open_log(storage, ManualClock(NOW_MS))
        delete_orphans(storage, find_orphans(storage, log, older_than_s=0))

    def _command(self, *arguments: str) -> None:
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
        code: object = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                run_command([*arguments, "--debug"])
            except SystemExit as end:
                code = end.code
        if code == 70:
            err.flush()
            raise UntypedError(f"{' '.join(arguments)} exits 70: {err.buffer.getvalue().decode()[-1500:]}")  # type: ignore[attr-defined]

    def verify(self) -> None:
        root = str(self.tree / self.name / "root")
        self._command("verify", "--deep", "--root", root, "--storage", storage_uri(self.tree, self.name))

    def recover(self) -> None:
        self._command("recover", "--root", str(self.tree / self.name / "root"))

    def files(self) -> None:
        self._command("files", "--storage", storage_uri(self.tree, self.name), "--json")

    def inspect(self) -> None:
        self._command("files", str(self.tree / self.path), "--json" if len(self.path) % 2 else "--quiet")

    def inspect_object(self) -> None:
        self.inspect()
        self._command("verify", str(self.tree / self.path))

    def dump(self) -> None:
        self._command("files", str(self.tree / self.path), "--entries", "--json")

    def verify_file(self) -> None:
        self._command("verify", str(self.tree / self.path))

    def page(self) -> None:
        self.name, cursor = "native", (self.tree / self.path).read_bytes().decode("utf-8", "surrogateescape")
        with open_reader(self.tree, "native") as reader:
            self._judge("t", "hot", reader.query("t", "hot", 0, 10_000, cursor=cursor))

    def follow(self) -> None:
        index = open_index(self.tree, "follow", slots=97, items=5000)
        try:
            store = StoreDirectory.open(self.tree / "follow" / "store")
            dispatcher = SteppedDispatcher(index, store, skip_corrupt=True, skip_missing=True)
            for _ in range(20):
                if dispatcher.run_once().caught_up:
                    break
            dispatcher._call_damage()
            dispatcher.lag()
        finally:
            index.abandon()

    def messages(self) -> None:
        with open_reader(self.tree, "follow") as reader:
            for root in (None, self.tree / "follow" / "root"):
                source = RocketmqMessages(self.tree / "follow" / "store", reader.segment_archive, root=root, threads=2)
                for topic, key in sorted(self.put["follow"])[::5]:
                    source.fetch(list(reader.query(topic, key)), topic, key)

    def archive(self) -> None:
        with open_reader(self.tree, "follow") as reader:
            archive = reader.segment_archive
            for segment in reader.archived():
                for _ in ArchivedLog(archive, segment, skip_corrupt=True).batches(skip_corrupt=True):
                    pass
            source = RocketmqMessages(None, archive, threads=2)
            for topic, key in sorted(self.put["follow"])[::5]:
                source.fetch(list(reader.query(topic, key)), topic, key)

    def classic(self) -> None:
        folder = self.tree / "follow" / "store" / "index"
        for name in classic_file_names(folder):
            read_entries(folder / name)

    def database(self) -> None:
        """Change cells of the database's tables. SQLite checks its pages itself."""
        rng = Random(zlib.crc32((self.tree / self.path).read_bytes()))
        (self.tree / self.path).write_bytes(self.whole[self.path])
        self.honest = False
        with contextlib.closing(sqlite3.connect(self.tree / self.path, isolation_level=None)) as connection:
            for _ in range(rng.choice((1, 1, 3))):
                tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
                table = rng.choice([name for (name,) in tables])
                columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
                column, other = rng.choice(columns), rng.choice(columns)
                value: Any = rng.choice([*resealed.INTEGERS[:22], *resealed.VALUES[-30:], b"", b"\xff" * 9, 0.5, None])
                if isinstance(value, int) and not -(2**63) <= value < 2**63:
                    value = str(value)
                if isinstance(value, list | dict):
                    value = json.dumps(value)
                with contextlib.suppress(sqlite3.Error, UnicodeEncodeError):
                    row = f"(SELECT {other} FROM {table} LIMIT 1 OFFSET {rng.randrange(8)})"
                    connection.execute(f"UPDATE {table} SET {column} = ? WHERE {other} = {row}", (value,))
        for drive in rng.sample((self.read, self.write, self.orphans, self.verify, self.merge), 2):
            with contextlib.suppress(TieredIndexError):
                drive()


def _items_end(data: bytes) -> int:
    """Return the greatest possible end of the items in a file. The trailer follows them, if there is one."""
    if data[-TAIL_SIZE:].startswith(b"TIXTAIL\n"):
        return int.from_bytes(data[-TAIL_SIZE + 16 : -TAIL_SIZE + 24], "big")
    return len(data)


# guards


@contextlib.contextmanager
def _guarded(base: Path) -> Iterator[None]:
    """Bound the memory, turn warnings into errors, and watch writes."""
    own = f"{base}/"
    active = [True]

    def is_outside(path: str) -> bool:
        # devices are no files; folders of others may be in memory, too
        return not f"{path}/".startswith(own) and (path.startswith("/dev/shm/") or not path.startswith("/dev/"))

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if not active[0] or event not in _CHANGES:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _TO_WRITE):
            return
        has_folder = event in ("os.remove", "os.rmdir") and arguments[1] >= 0
        below = Path(f"/proc/self/fd/{arguments[1]}" if has_folder else "")
        for path in arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]:
            if isinstance(path, str | bytes) and is_outside(os.path.realpath(below / os.fsdecode(path))):
                raise OutsideError(f"{event} of {path!r}")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MOST_BYTES, limits[1]))
    logging.disable(logging.CRITICAL)
    sys.addaudithook(watch)  # it stays in the process, but checks only while it is active
    # a module that is imported meanwhile is not written as bytecode: that would be a file outside
    without_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        active[0] = False
        sys.dont_write_bytecode = without_bytecode
        resource.setrlimit(resource.RLIMIT_AS, limits)
        logging.disable(logging.NOTSET)


def run(total: int, **options: Any) -> Tally:
    """Make a tree, in memory if possible, and `sweep` it."""
    tempdir_before = tempfile.tempdir
    with fast_folder() as folder:
        try:
            return sweep(Campaign(folder), total, **options)
        finally:
            tempfile.tempdir = tempdir_before


def sweep(campaign: Campaign, total: int, *, first: int = 0, every: int = 50, only: Sequence[str] = ()) -> Tally:
    """Try `total` mutants of all formats by their weights, with seeds from `first` on.

    Each `every`-th one is tried end to end.
    """
    tally = Tally("mutations")
    chosen = [codec for codec in campaign.codecs if not only or codec.name in only]
    weights = sum(codec.weight for codec in chosen)
    with _guarded(campaign.tree.parent):
        for codec in chosen:
            for seed in range(first, first + max(1, round(total * codec.weight / weights))):
                _try(campaign, codec, seed, every, tally)
                if len(tally.failures) >= _MOST_FAILURES:
                    return tally
    return tally


def _try(campaign: Campaign, codec: Codec, seed: int, every: int, tally: Tally) -> None:
    rng = Random(f"{codec.name} {seed}")
    path = rng.choice(codec.files)
    whole = campaign.whole[path]
    data = resealed.flipped(rng, whole) if rng.random() < _FLIPS else codec.reseal(rng, whole)
    deep = seed % every == 0
    again = f"python -m tests.reliability.mutations --codec '{codec.name}' --first {seed} --count 1"
    again += " --deep" if deep else ""

    def attempt(what: str, act: Callable[[], object]) -> None:
        try:
            with bounded(_MOST_S):
                act()
        except TieredIndexError:
            pass
        except (Exception, Hang) as error:  # noqa: BLE001 - every exception is a finding
            tally.fail_by(error, f"{codec.name}, {what} [{again}]")

    tally.tried[f"mutations of {codec.name}"] += 1
    attempt("decoded", lambda: codec.decode(data, path))
    if deep:
        drive = rng.choice(codec.drives.split())
        tally.tried["end to end"] += 1
        try:
            campaign.place(codec, path, data)
            attempt(drive, getattr(campaign, drive))
            logs = [p for p in campaign.whole if f"{campaign.name}/storage/log%/" in p]
            if drive != "other_writer" and not all((campaign.tree / p).exists() for p in logs):
                tally.fail("lost", f"{codec.name}, {drive}: a log record is gone [{again}]")
        finally:
            campaign.restore()


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=20_000, help="mutants in all")
    parser.add_argument("--all", action="store_true", help=f"{_TOTAL:,} of them")
    parser.add_argument("--first", type=int, default=0, help="the first seed of each format")
    parser.add_argument("--every", type=int, default=100, help="each how many-th one runs end to end")
    parser.add_argument("--deep", action="store_true", help="all of them end to end")
    parser.add_argument("--codec", action="append", default=[], help="only these formats")


def _run(options: argparse.Namespace) -> Tally:
    total = _TOTAL if options.all else options.count
    every = 1 if options.deep else options.every
    return run(total, first=options.first, every=every, only=options.codec)


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", _run, _add_arguments))
