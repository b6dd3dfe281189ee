"""`tiered-index verify`: checks every checksum. With --repair it replaces damaged objects by good copies. Without --yes
it prints the plan.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered_index.cli.exit_codes import DONE, FINDING
from tiered_index.cli.look_up.contents import contents_of, opened
from tiered_index.cli.operate.commands import RepairOptions
from tiered_index.cli.options import ServiceOptions
from tiered_index.cli.output import Output, counted, human_bytes
from tiered_index.cli.session import Session, StoredIndex, asked_service, open_stored_index
from tiered_index.config import IndexConfig
from tiered_index.connectors.contract import Repairing, SourceRun
from tiered_index.connectors.registry import CONNECTORS, OF_OTHERS
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument, NotAnIndex, error_named
from tiered_index.format.names import CATALOG_PREFIX, DATA_PREFIX, SEGMENTS_PREFIX
from tiered_index.service.jobs.copying import COPY_OF
from tiered_index.service.jobs.repair import Repair, Repairs
from tiered_index.service.jobs.verify import check_index
from tiered_index.service.jobs.verify_report import Defect, Report
from tiered_index.service.log.state import LogState
from tiered_index.service.read.files.compacted import CompactedFile
from tiered_index.service.root import Root
from tiered_index.storage.disk import Disk
from tiered_index.storage.probe import probe_put_if_absent

if TYPE_CHECKING:
    from tiered_index.client import IndexClient


_LOOK_S = 0.2
_NOTES = 20
_NAMES = {
    "files": "file",
    "log_records": "log record",
    "checkpoints": "checkpoint",
    "objects": "object",
    "segments": "archived segment",
    "catalogs": "catalog of segments",
    "tables": "window table",
}
_PLURALS = {"catalogs": "catalogs of segments"}


def verify(session: Session, *, files: list[str] | None, options: RepairOptions, service: ServiceOptions) -> int:
    """Check all checksums of an index: local files, log records, checkpoints and objects."""
    options.check(files or ())
    config = session.config()
    client = asked_service(session, service, files=files, repair=options.repair)
    if client is not None:
        with client:
            document = _verified_by(session, client, deep=options.deep)
        return _write(session.out, document)
    report = Report()
    if files:
        for file in files:
            _check_one(session, config, file, report)
        return _write(session.out, report.to_dict())
    if config.root is None and config.storage is None:
        raise ConfigError("nothing to verify: give files, --root, --storage, or both")
    if options.repair:
        return Mending(session, config, report, options).run()
    _check_all(session, config, report, deep=options.deep)
    code = _write(session.out, report.to_dict())
    if report.findings:
        session.out.remark("to print the repairs, run it again with --deep --repair")
    return code


def _check_all(
    session: Session, config: IndexConfig, report: Report, *, deep: bool
) -> tuple[Mapping[str, CompactedFile], bool]:
    """Check the index of `config`, as `check_index`, with a display of the progress."""
    with (
        session.out.progress("verifying files", None) as of_files,
        session.out.progress("verifying objects", None) as of_objects,
    ):
        return check_index(config, report, of_files.update, of_objects.update, deep=deep)


def _verified_by(session: Session, client: IndexClient, *, deep: bool) -> dict[str, Any]:
    """Have a service verify its index; return the report's document. Raises as the service's job."""
    # imported here, as the client is, because most commands need neither
    from tiered_index.client.answers import error_of

    job = client.verify(deep=deep)
    with session.out.progress("verifying", None) as progress:
        while job["state"] == "running":
            progress.update(job["checked"], job["doing"])
            time.sleep(_LOOK_S)
            job = client.verification(job["id"])
    if job["problem"] is not None:
        raise error_of(job["problem"])
    return job["report"]  # type: ignore[no-any-return]


def _check_one(session: Session, config: IndexConfig, file: str, report: Report) -> None:
    with opened(session, file) as data:
        report.count("files")
        report.count("bytes", data.size_bytes)
        try:
            contents = contents_of(data, config)
        except CorruptFile as error:
            report.add_error(data.name, "file", error)
            return
        report.add_all(data.name, contents.findings())
        if not contents.checksummed:
            report.note(f"{data.name}: has no checksums (RocketMQ's own format); its structure was checked")


def write_findings(out: Output, report: dict[str, Any], most: int | None = None) -> None:
    """Write a report's document for people, at most `most` rows of each kind."""
    for name, title in (
        ("findings", "findings"),
        ("missing", "missing from answers"),
        ("lost", "given up"),
        ("unchecked", "not checked"),
    ):
        out.rows(title, report[name], most=len(report[name]) if most is None else most)
    for note in report["notes"][:_NOTES]:
        out.remark(f"note: {note}")
    if (rest := len(report["notes"]) - _NOTES) > 0:
        out.remark(f"and {rest:,} more notes")


def _write(out: Output, document: dict[str, Any]) -> int:
    """Write a report's document, and return the exit code."""
    out.answer(document)
    write_findings(out, document)
    _write_sums(out, document, counted(len(document["findings"]), "finding"))
    return _code(document, len(document["findings"]))


def _write_sums(out: Output, document: dict[str, Any], findings: str) -> None:
    checked = Counter(document["checked"])
    counts = [counted(checked[name], text, _PLURALS.get(name, "")) for name, text in _NAMES.items() if checked[name]]
    read = human_bytes(checked["bytes"] + checked["object_bytes"])
    out.line(f"{document['status']}: {', '.join(counts) or 'nothing'} checked, {read} read, {findings}")


def _code(document: dict[str, Any], findings: int) -> int:
    if findings:
        return FINDING
    unchecked = document["unchecked"]
    return error_named(unchecked[0]["type"]).exit_code if unchecked else DONE


class Mending:
    """A run of `verify --deep --repair`: it checks an index, and restores what is damaged or missing."""

    def __init__(self, session: Session, config: IndexConfig, report: Report, options: RepairOptions) -> None:
        self._session, self._config, self._report, self._options = session, config, report, options
        self._repairs: list[Repair] = []

    def run(self) -> int:
        """Check the index, plan the repairs, with `yes` apply them, write the report, and return the exit code.

        Raises as `Repairs.run`, and `InvalidArgument` if the index and the copy have no common origin.
        """
        options = self._options
        with contextlib.ExitStack() as stack:
            # opened before the check: a wrong place is reported at once
            repairing = self._repairing()
            standby = options.standby
            copied = stack.enter_context(_opened_copy(self._config, standby)) if standby is not None else None
            local, is_readable = _check_all(self._session, self._config, self._report, deep=True)
            if is_readable:
                self._repair(local, repairing, copied)
        return self._write()

    def _repairing(self) -> Repairing:
        """Return what restores archived segments. Raises `InvalidArgument` for a source that can't, or is wrong."""
        name, run = OF_OTHERS, None
        if (source := self._options.source) is not None:
            name = CONNECTORS.of_messages(source).name
            note = self._session.out.note
            run = SourceRun(addresses=(source,), name=self._options.store_name, note=note)
        repairs = getattr(CONNECTORS.connector(name), "repairs", None)
        if repairs is None:
            raise InvalidArgument(f"--source {source} restores no segments: it is {CONNECTORS.spec(name).title}")
        repairing: Repairing = repairs(run)
        return repairing

    def _repair(self, local: Mapping[str, CompactedFile], repairing: Repairing, copied: StoredIndex | None) -> None:
        config, report, yes = self._config, self._report, self._options.yes
        with (
            open_stored_index(config, checks=False) as index,
            self._session.out.progress("repairing", None) as progress,
        ):
            if copied is not None and not _origins(index.log.state) & _origins(copied.log.state):
                raise InvalidArgument(
                    f"--from {copied.storage.uri}: this is another index; give a copy of this one that `tiered-index "
                    "copy` made"
                )
            if yes:
                # without an atomic put-if-absent a writer's record and this one could get the same number
                probe_put_if_absent(index.storage)
            root = Root(config.root, Disk()) if config.root is not None else None
            other = copied.storage if copied is not None else None
            source = repairing(index.storage, index.log)
            if (problem := source.lacks()) is not None:
                report.note(f"--source {problem}")
            repairs = Repairs(index.storage, index.log, root, local, other, progress.update, source)
            self._repairs = repairs.run(report, yes=yes)

    def _write(self) -> int:
        out, yes, repairs = self._session.out, self._options.yes, self._repairs
        left = self._left()
        document = self._report.to_dict() | {"repaired": yes, "repairs": repairs, "not_repaired": left}
        if yes and not left and self._report.findings:
            document["status"] = "incomplete" if self._report.unchecked else "repaired"
        out.answer(document)
        write_findings(out, document)
        out.fields({"repairs": repairs, "not_repaired": left}, most=len(repairs) + len(left))
        if any(defect.file.startswith((DATA_PREFIX, SEGMENTS_PREFIX, CATALOG_PREFIX)) for defect in left):
            more = ", the writer's root with --root" if self._config.root is None else ""
            out.remark(
                f"no good copy was found of what is not repaired: pass a copy of the index with --from{more}, or give "
                f"it up by `tiered-index recover --lost NAME` (with --dry-run it says how many entries are lost)"
            )
        if repairs and not yes:
            out.remark("nothing was changed: pass --yes to apply")
        findings = len(left) if yes else len(document["findings"])
        after = f" left after {counted(len(repairs), 'repair')}" if yes else ""
        _write_sums(out, document, f"{counted(findings, 'finding')}{after}")
        return _code(document, findings)

    def _left(self) -> list[Defect]:
        """Return the findings without a repair."""
        objects = {repair.object for repair in self._repairs}
        done = objects | {name.removesuffix(".index") for name in objects}
        files = set(map(_file_id, done))
        return [
            finding
            for finding in self._report.findings
            if finding.file not in done and (finding.part != "copy" or _file_id(finding.file) not in files)
        ]


@contextlib.contextmanager
def _opened_copy(config: IndexConfig, uri: str) -> Iterator[StoredIndex]:
    """Yield a copied index. Raises `NotAnIndex` if there is none."""
    with contextlib.ExitStack() as stack:
        try:
            index = stack.enter_context(open_stored_index(config.changed(storage=uri, root=None)))
        except ConfigError as error:
            hint = ": give a copy that `tiered-index copy` made" if isinstance(error, NotAnIndex) else ""
            # without the URI, which may hold a secret
            raise type(error)(f"--from: {error}{hint}") from error
        yield index


def _origins(state: LogState) -> set[str]:
    """Return the ids of the index and of the indexes that it is a copy of."""
    own = {state.genesis.index_id} if state.genesis is not None else set()
    return own | {name.removeprefix(COPY_OF) for name in state.positions if name.startswith(COPY_OF)}


def _file_id(name: str) -> str:
    return name.split("/")[1] if name.startswith("data/") else Path(name).stem
