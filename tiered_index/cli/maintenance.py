"""What an operator runs on an index: `tiered-index verify`, `recover` and `orphans`.

What changes anything is a dry run unless --yes.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typer import Argument, Option

from tiered_index.cli.asking import asked_service, verified_by
from tiered_index.cli.contents import contents_of, opened
from tiered_index.cli.options import FileItems, FileSlots, TokenFile, Url, duration_option
from tiered_index.cli.output import Output, counted, human_bytes, states
from tiered_index.cli.repairing import check_options, check_places, left_over, mend, repairs_document, write_repairs
from tiered_index.cli.session import Session, command, open_stored_index
from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument, NotAnIndex, StorageUnavailable
from tiered_index.format.names import COMPACTED, UPLOADED
from tiered_index.service.checks.index import check_index
from tiered_index.service.checks.repair import Repair
from tiered_index.service.checks.report import Missing, Report
from tiered_index.service.files.compacted import CompactedFile, DamagedFile
from tiered_index.service.index import IndexService
from tiered_index.service.lifecycle.lost import give_up, named
from tiered_index.service.lifecycle.orphans import delete_orphans, find_orphans
from tiered_index.service.log.records import StoredObject
from tiered_index.service.lookup.inventory import describe_handle
from tiered_index.service.reader import IndexReader
from tiered_index.service.root import Root
from tiered_index.storage.base import ObjectInfo
from tiered_index.storage.disk import Disk
from tiered_index.types import format_time

_FOUND = 1
_NAMES = {
    "files": "file",
    "log_records": "log record",
    "checkpoints": "checkpoint",
    "objects": "object",
    "segments": "archived segment",
    "tables": "window table",
}


@command
def verify(
    session: Session,
    files: list[str] | None = Argument(
        None, metavar="[FILE]...", help="Paths, ids or their ends, objects' names; none: all."
    ),
    deep: bool = Option(False, "--deep", help="Read every byte of every object, and compare it with the local copy."),
    repair: bool = Option(False, "--repair", help="With --deep: say what restores what is damaged or missing."),
    source: Path | None = Option(
        None, metavar="STORE", help="With --repair: the RocketMQ store, which still has messages.", show_default=False
    ),
    store_name: str | None = Option(None, help="What that store is called in the index; by default its path."),
    standby: str | None = Option(
        None,
        "--copy",
        metavar="URI",
        help="With --repair: a copy of the index (`tiered-index copy`).",
        show_default=False,
    ),
    give_up_segments: bool = Option(
        False,
        "--give-up-segments",
        help="With --repair: give up archived segments that have no good copy, too: their messages are missing then.",
    ),
    yes: bool = Option(False, "--yes", help="With --repair: do it."),
    slots: FileSlots = None,
    items: FileItems = None,
    url: Url = None,
    token_file: TokenFile = None,
) -> int:
    """Check every checksum: local files, log records and checkpoints, the log against the objects, local copies against
    remote ones.

    Exit code 1: something is wrong, each finding is printed. 3: the storage did not answer. Without --deep an object's
    size and trailer are checked, with it every byte. Objects that the log does not name are notes.

    --repair says what can be done, and with --yes does it: an object is put back from the root's copy (--root), another
    upload of it or a copy of the index (--copy), else made anew of the messages of archived segments or of --source,
    where these are exactly what it held; else what verifies of it is written anew. An archived segment is put back from
    another upload, --copy or --source, without messages that were erased; one that has no good copy stays, since what
    is whole of it is still read, until --give-up-segments removes it by a log record. A damaged local copy is fetched
    from its object. Of an object without a good copy it says which topics and times answers will miss; with --yes a log
    record gives it up, for good, and answers say so from then on. What was sent is verified before a log record names
    it. Writers, readers and jobs may be at work, but for the writer of a root whose files are repaired. The exit code
    is 0 once nothing is left to be repaired.

    [bold]Examples[/bold]

      tiered-index verify --root /data/index

      tiered-index verify --deep --storage s3://bucket/index --json

      tiered-index verify --deep --repair --root /data/index --source /home/rocketmq/store

      tiered-index verify --deep --repair --yes --root /data/index

      tiered-index verify /data/index/uploaded/001700000000000-0123456789ab.index

      tiered-index verify --deep --url http://localhost:8080 --token-file token
    """
    given = [one for one in (source, standby, give_up_segments or None) if one is not None]
    check_options(files, given, deep=deep, repair=repair, yes=yes)
    report = Report()
    repairs: list[Repair] = []
    config = session.config()
    client = asked_service(session, url, token_file, files=files, repair=repair, slots=slots, items=items)
    check_places(config, source, store_name, standby)
    if client is not None:
        # loaded when asked for, as the client is
        from tiered_index.client.answers import report_of

        with client:
            report = report_of(verified_by(session, client, deep=deep))
    elif files:
        for file in files:
            _check_one(session, file, slots, items, report)
    else:
        local, is_readable = _check_index(session, config, report, deep=deep)
        if repair and is_readable:
            places = source, store_name, standby
            repairs = mend(session, config, report, local, *places, give_up=give_up_segments, yes=yes)
    left = left_over(report, repairs)
    more = repairs_document(repairs, left, yes=yes) if repair else {}
    session.out.answer(report.to_dict() | more)
    write_findings(session.out, report)
    if repair:
        write_repairs(session.out, repairs, left, _of, yes=yes, has_root=config.root is not None)
    counts = [counted(report.checked[name], text) for name, text in _NAMES.items() if report.checked[name]]
    read = report.checked["bytes"] + report.checked["object_bytes"]
    session.out.line(
        f"{report.status}: {', '.join(counts) or 'nothing'} checked, {human_bytes(read)} read, "
        f"{counted(len(report.findings), 'finding')}"
    )
    if left if yes else report.findings:
        return _FOUND
    return report.unchecked[0][1].exit_code if report.unchecked else 0


def _check_one(session: Session, file: str, slots: int | None, items: int | None, report: Report) -> None:
    with opened(session, file) as data:
        report.count("files")
        report.count("bytes", data.size_bytes)
        try:
            contents = contents_of(data, slots, items)
        except CorruptFile as error:
            report.add_error(data.name, "file", error)
            return
        report.add_all(data.name, contents.findings())
        if not contents.checksummed:
            report.note(f"{data.name}: has no checksums (RocketMQ's own format); its structure was checked")


def _check_index(
    session: Session, config: IndexConfig, report: Report, *, deep: bool
) -> tuple[dict[str, CompactedFile], bool]:
    """Check an index; return the root's compacted files, and whether the log can be read."""
    if config.root is None and config.storage is None:
        raise ConfigError("nothing to verify: give files, --root, --storage, or both")
    with session.progress("verifying files", None) as files, session.progress("verifying objects", None) as objects:
        return check_index(config, report, files.update, objects.update, deep=deep)


def write_findings(out: Output, report: Report, most: int = sys.maxsize) -> None:
    """Write what was found, noted and left unchecked, `most` of each."""
    findings = [
        f"FINDING {defect.file}: {defect.part}: {defect.problem}"
        + (f" at byte {defect.offset:,}" if defect.offset is not None else "")
        for defect in report.findings
    ]
    out.first(most, findings, lambda rest: f"and {counted(rest, 'further finding')}")
    for what, gone in (("MISSING", report.missing), ("given up", report.lost)):
        texts = [f"{what} {one.object}: answers miss {_of(one)}" for one in gone]
        out.first(most, texts, lambda rest: f"and {counted(rest, 'further object')}")
    notes = [f"note: {note}" for note in report.notes]
    out.first(most, notes, lambda rest: f"and {counted(rest, 'further note')}", remark=True)
    unchecked = [f"NOT CHECKED {what}: {error}" for what, error in report.unchecked]
    out.first(most, unchecked, lambda rest: f"and {rest:,} further not checked")


def _of(one: Missing) -> str:
    """Return what is missing: ``98 entries of FILE from T to T (topics: orders, payments)``."""
    known = f"topics: {', '.join(one.topics)}" if one.topics else "topics not known"
    entries = counted(one.entries, "entry", "entries")
    copy = f"; {one.copy} is a copy of it" if one.copy else ""
    return f"{entries} of {one.file} from {format_time(one.begin_ms)} to {format_time(one.end_ms)} ({known}{copy})"


@command
def recover(
    session: Session,
    lost: list[str] | None = Option(
        None, "--lost", metavar="FILE", help="Give up what the storage lost of this file; several times."
    ),
    dry_run: bool = Option(False, "--dry-run", help="With --lost: show what would be given up; change nothing."),
) -> int:
    """Recover a root after a crash: drop half-made work, move files to the state they reached, rebuild hash chains.

    Every command that writes does this when it starts; here it is done alone and reported. A root that is gone is begun
    anew where --storage names an index. Exit code 4: a file is damaged and kept as it is; 3: the storage did not
    answer.

    With --lost nothing of that is done. The storage has lost an object (`verify` names it): FILE is its file's id, its
    own name, or a window table's id. A log record gives up what is gone of it, for good; from then on answers are
    complete except for what that held, and say so for ever. First put back what you can: with --root a file of which
    the root has a copy is refused, without it a writer drops its copy.

    [bold]Examples[/bold]

      tiered-index recover --storage s3://bucket/index --lost 001700000000000-0123456789ab --dry-run

      tiered-index recover --storage s3://bucket/index --lost 001700000000000-0123456789ab

      tiered-index recover --root /data/index

      tiered-index recover --root /data/new --storage s3://bucket/index --json
    """
    config = session.config(background=False)
    if lost:
        return _give_up(session, config, lost, dry_run=dry_run)
    if dry_run:
        raise InvalidArgument("--dry-run is for --lost: a recovery without it loses nothing")
    if config.root is None:
        raise ConfigError("root is not set: give --root")
    if Root(config.root, Disk()).read_marker() is None:
        if config.storage is None:
            raise NotAnIndex(f"{config.root} holds no tiered index; to begin it anew give --storage too")
        # raises where the storage holds no index either: recovery creates none
        IndexReader.open(config=config.model_copy(update={"root": None})).close()
    with IndexService.open(config) as index:
        handles = index.files()
        damaged = [handle for handle in handles if isinstance(handle, DamagedFile)]
        health = index.health()
        document: dict[str, Any] = {
            "index_id": index.index_id,
            "status": "damaged" if damaged else "recovered",
            "storage": "reached" if health["writer_epoch"] else "not reached",
            "notes": list(index.recovery_notes),
            "files": health["files"],
            "sources": index.durable_positions(),
            "problems": [*(str(handle.error) for handle in damaged), *health["problems"]],
            "damaged": [describe_handle(handle) for handle in damaged],
        }
    session.out.answer(document)
    for note in document["notes"]:
        session.out.line(f"recovered: {note}")
    for problem in document["problems"]:
        session.out.line(f"problem: {problem}")
    session.out.fields(
        {
            "index": document["index_id"],
            "status": document["status"],
            "storage": document["storage"],
            "files": states(document["files"]) or "none",
            **{f"position of {source}": position for source, position in document["sources"].items()},
        }
    )
    if damaged:
        return CorruptFile.exit_code
    return 0 if document["storage"] == "reached" else StorageUnavailable.exit_code


def _give_up(session: Session, config: IndexConfig, files: list[str], *, dry_run: bool) -> int:
    with open_stored_index(config) as index:
        for file in files:
            for stored in named(index.log.state, file):
                _check_copy(config, file, stored)
        given_up = [Missing.of(one) for one in give_up(index.storage, index.log, files, dry_run=dry_run)]
        log_number = index.log.state.number
    status = "planned" if dry_run else "given up"
    session.out.answer({"status": status, "lost": [asdict(one) for one in given_up], "log_number": log_number})
    for one in given_up:
        what, misses = ("would be given up", "would miss") if dry_run else ("given up", "miss")
        session.out.line(f"{what} {one.object}: answers {misses} {_of(one)}, and say so")
    if dry_run:
        session.out.remark("nothing was changed: without --dry-run it is given up")
    return 0


def _check_copy(config: IndexConfig, file: str, stored: StoredObject) -> None:
    """Raise `InvalidArgument` where the root has a copy of an object's file."""
    if config.root is not None:
        root = Root(config.root, Disk())
        for path in (root.index_path(state, stored.file_id) for state in (COMPACTED, UPLOADED)):
            if path.exists():
                raise InvalidArgument(f"--lost {file}: {path} is a copy of it; put that back as {stored.name}")


@command
def orphans(
    session: Session,
    older_than: int = Option(
        86400,
        parser=duration_option,
        metavar="1d",
        help="Only what is older; below a day, see above.",
        show_default="1d",
    ),
    yes: bool = Option(False, "--yes", help="Delete them; without it they are only listed."),
) -> int:
    """Find objects that the log does not name: what crashes left, and what merges have replaced.

    Unfinished uploads, too.

    Nothing younger than --older-than is touched, nor what a merge removed since: an upload may be under way, and a
    reader may still stand at the log position before the merge.

    Neither jobs nor writers publish what they began to upload 23 hours ago, so a day is safe beside any. Take less only
    where no merge, build, write or compaction runs, and no writer waits for the storage, for that long: it would fail,
    or lose what it publishes.

    Objects in the index's folders (log/, data/ ...) that no index makes, such as log/note.txt, are listed as foreign,
    whatever their age. The index ignores them, and --yes leaves them to whoever put them there. What no object's name
    can be (a blank, a % sign) is not seen at all.

    [bold]Examples[/bold]

      tiered-index orphans --storage s3://bucket/index

      tiered-index orphans --storage s3://bucket/index --older-than 7d --yes --json
    """
    with open_stored_index(session.config()) as index:
        found = find_orphans(index.storage, index.log, index.clock, older_than_s=older_than)
        if yes:
            found = delete_orphans(index.storage, found)
        requests, cost_usd = index.storage.total.requests_by_kind, index.storage.total.cost_usd
    document: dict[str, Any] = {
        "status": "deleted" if yes else "found",
        "objects": [_described(info) for info in found.objects],
        "uploads": [handle.name for handle in found.uploads],
        "foreign": [_described(info) for info in found.foreign],
        "bytes": found.size_bytes,
        "requests": requests,
        "cost_usd": cost_usd,
    }
    session.out.answer(document)
    for info in found.objects:
        session.out.line(_line(info))
    for info in found.foreign:
        session.out.line(f"{_line(info)}  foreign")
    for handle in found.uploads:
        session.out.line(f"{handle.name}  unfinished upload")
    what = (
        f"{counted(len(found.objects), 'object')} ({human_bytes(found.size_bytes)}), "
        f"{counted(len(found.uploads), 'unfinished upload')}"
    )
    session.out.line(f"{what} {'deleted' if yes else 'found'}")
    if found.foreign:
        session.out.line(f"{counted(len(found.foreign), 'foreign object')} left alone")
    if not yes and (found.objects or found.uploads):
        session.out.remark("nothing was deleted: --yes does that")
    return 0


def _described(info: ObjectInfo) -> dict[str, Any]:
    return {"object": info.name, "bytes": info.size_bytes, "modified_ms": info.modified_ms}


def _line(info: ObjectInfo) -> str:
    return f"{info.name}  {human_bytes(info.size_bytes)}  {format_time(info.modified_ms)}"
