"""`tiered-index verify`: check files, a root, a storage, or both, against checksums and log; changes nothing."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tiered_index.cli.contents import contents_of, opened
from tiered_index.cli.options import FileItems, FileSlots
from tiered_index.cli.output import Output, counted, human_bytes
from tiered_index.cli.session import Session, command
from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError, CorruptFile, NotAnIndex, StorageError
from tiered_index.service.checks.checks import check_root, check_storage
from tiered_index.service.checks.report import Report
from tiered_index.service.files.compacted import CompactedFile
from tiered_index.service.root.root import Root
from tiered_index.storage.disk import Disk
from tiered_index.storage.opening import open_storage

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
    files: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]...", help="Paths, file ids, objects' names; none: all.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte of every object, and compare it with the local copy.")
    ] = False,
    slots: FileSlots = None,
    items: FileItems = None,
) -> int:
    """Check every checksum: local files, log records and checkpoints, the log against the objects, local copies against
    remote ones.

    Exit code 1: something is wrong, each finding is printed. 3: the storage did not answer. Without --deep an object's
    size and trailer are checked, with it every byte. Objects that the log does not name are notes.

    [bold]Examples[/bold]

      tiered-index verify --root /data/index

      tiered-index verify --deep --storage s3://bucket/index --json

      tiered-index verify /data/index/uploaded/001700000000000-0123456789ab.index
    """
    report = Report()
    if files:
        for file in files:
            _check_one(session, file, slots, items, report)
    else:
        _check_index(session, session.config(), report, deep=deep)
    session.out.answer(report.to_dict())
    write_findings(session.out, report)
    counts = [counted(report.checked[name], text) for name, text in _NAMES.items() if report.checked[name]]
    read = report.checked["bytes"] + report.checked["object_bytes"]
    session.out.line(
        f"{report.status}: {', '.join(counts) or 'nothing'} checked, {human_bytes(read)} read, "
        f"{counted(len(report.findings), 'finding')}"
    )
    if report.findings:
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


def _check_index(session: Session, config: IndexConfig, report: Report, *, deep: bool) -> None:
    local: dict[str, CompactedFile] = {}
    uri = config.storage
    if config.root is None and uri is None:
        raise ConfigError("nothing to verify: give files, --root, --storage, or both")
    if config.root is not None:
        root = Root(config.root, Disk())
        marker = root.read_marker()
        if marker is None:
            raise NotAnIndex(f"{config.root} holds no tiered index")
        uri = uri or marker.storage
        with session.progress("verifying files", None) as progress:
            local = check_root(root, report, progress.update)
    assert uri is not None
    storage = open_storage(uri, options=config.s3)
    try:
        with session.progress("verifying objects", None) as progress:
            check_storage(storage, local, report, progress.update, deep=deep, threads=config.query_threads)
    except StorageError as error:
        report.unchecked.append((uri, error))
    finally:
        storage.close()


def write_findings(out: Output, report: Report, most: int = sys.maxsize) -> None:
    """Write what was found, noted and left unchecked, `most` of each."""
    findings = [
        f"FINDING {defect.file}: {defect.part}: {defect.problem}"
        + (f" at byte {defect.offset:,}" if defect.offset is not None else "")
        for defect in report.findings
    ]
    out.first(most, findings, lambda rest: f"and {counted(rest, 'further finding')}")
    notes = [f"note: {note}" for note in report.notes]
    out.first(most, notes, lambda rest: f"and {counted(rest, 'further note')}", remark=True)
    unchecked = [f"NOT CHECKED {what}: {error}" for what, error in report.unchecked]
    out.first(most, unchecked, lambda rest: f"and {rest:,} further not checked")
