"""`tiered-index verify --deep --repair`: what was found is restored from good copies, or given up; told, or done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tiered_index.cli.output import Output
from tiered_index.cli.session import Session, open_stored_index
from tiered_index.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.rocketmq.archive.entries import entries_of_messages
from tiered_index.rocketmq.archive.repair import SegmentRepairs
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.service.checks.repair import Repair, Repairs
from tiered_index.service.checks.report import Defect, Missing, Report
from tiered_index.service.files.compacted import CompactedFile
from tiered_index.service.lifecycle.copying import COPY_OF
from tiered_index.service.lifecycle.segment_archive import SegmentArchive
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.state import LogState
from tiered_index.service.root import Root
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import Disk
from tiered_index.storage.opening import open_storage, probe_put_if_absent

_DOING = {
    "restore": "put back from {source}",
    "rebuild": "made anew of the source's messages",
    "salvage": "written anew of what verifies of it",
    "fetch": "fetched again from {source}",
    "recompact": "dropped; the writer's next start compacts {source} again",
    "drop": "deleted: the log says the same, and the next record makes one anew",
    "give up": "given up, it has no good copy: messages at {source} are missing from now on",
}


def mend(
    session: Session,
    config: IndexConfig,
    report: Report,
    local: Mapping[str, CompactedFile],
    store: Path | None,
    store_name: str | None,
    standby: str | None,
    *,
    give_up: bool,
    yes: bool,
) -> list[Repair]:
    """Return what is done about the findings of a report, or with `yes` do it. Raises as `Repairs.run`."""
    source = StoreDirectory.open(store, store_name) if store is not None else None
    with open_stored_index(config) as index, contextlib.ExitStack() as stack:
        if yes:
            # whose put-if-absent isn't one would let a writer's record and this one have the same number
            probe_put_if_absent(index.storage)
        archive = SegmentArchive(index.storage, lambda: index.log.state, index.log.refresh)
        root = Root(config.root, Disk()) if config.root is not None else None
        copied = stack.enter_context(opened_copy(config, standby, index.log.state)) if standby is not None else None
        progress = stack.enter_context(session.progress("repairing", None))
        # first, since files are made anew of their messages
        segments = SegmentRepairs(index.storage, index.log, copied, source, give_up)
        done = segments.run(report, yes=yes)
        # a dry run judges by what the segments will be
        archive, state = segments.mended(archive, index.log.refresh())
        return done + Repairs(
            index.storage,
            index.log,
            root,
            local,
            partial(entries_of_messages, archive, state, source) if state.stores or source is not None else None,
            copied,
            progress.update,
        ).run(report, yes=yes)


@contextlib.contextmanager
def opened_copy(config: IndexConfig, uri: str, state: LogState | None) -> Iterator[Storage]:
    """Yield the storage of a copied index. Raises `NotAnIndex` where there is none, `InvalidArgument` where it is no
    copy of the index whose log has reached `state` (None: not known), nor that one of it, nor both of another.
    """
    with contextlib.ExitStack() as stack:
        try:
            storage = stack.enter_context(contextlib.closing(open_storage(uri, options=config.s3)))
            other = StorageLog(storage, SystemClock()).open()
        except ConfigError as error:
            raise type(error)(f"--copy {uri}: {error}") from error
        if state is not None and not _origins(state) & _origins(other):
            raise InvalidArgument(f"--copy {uri}: it holds another index, neither a copy of this one nor its origin")
        yield storage


def _origins(state: LogState) -> set[str]:
    """Return the ids of the index and of those that it is a copy of."""
    own = {state.genesis.index_id} if state.genesis is not None else set()
    return own | {name.removeprefix(COPY_OF) for name in state.positions if name.startswith(COPY_OF)}


def check_options(files: object, given: Sequence[object], *, deep: bool, repair: bool, yes: bool) -> None:
    """Raise `InvalidArgument` where the options of `verify` contradict each other."""
    if repair and (files or not deep):
        raise InvalidArgument(
            "--repair needs " + ("an index, not files" if files else "--deep: every byte is read first")
        )
    if not repair and (yes or given):
        raise InvalidArgument(f"{'--yes is' if yes else '--source, --copy and --give-up-segments are'} for --repair")


def check_places(config: IndexConfig, store: Path | None, store_name: str | None, standby: str | None) -> None:
    """Raise before anything is read where a place that was given is none: `InvalidArgument`, `NotAnIndex`."""
    if store is not None:
        StoreDirectory.open(store, store_name)
    elif store_name is not None:
        raise InvalidArgument("--store-name is the name of the store at --source, which is not given")
    if standby is not None:
        with opened_copy(config, standby, None):
            pass


def left_over(report: Report, repairs: Sequence[Repair]) -> list[Defect]:
    """Return the findings that no repair is about."""
    done = {one.object for one in repairs} | {one.object.removesuffix(".index") for one in repairs}
    files = set(map(_file_id, done))
    return [
        one
        for one in report.findings
        if one.file not in done and (one.part != "copy" or _file_id(one.file) not in files)
    ]


def write_repairs(
    out: Output,
    repairs: Sequence[Repair],
    left: Sequence[Defect],
    describe: Callable[[Missing], str],
    *,
    yes: bool,
    has_root: bool,
) -> None:
    """Tell people what was done, or would be."""
    would = "" if yes else "would be "
    for one in repairs:
        if one.action == "give up" and one.missing is not None:
            out.line(f"{one.object}: {would}given up, it has no good copy: answers miss {describe(one.missing)}")
            continue
        name = f", as {one.replaced_by}" if one.replaced_by is not None else ""
        rest = "" if one.missing is None else f"; answers miss {describe(one.missing)}"
        out.line(f"{one.object}: {would}{_DOING[one.action].format(source=one.source)}{name}{rest}")
    for defect in left:
        out.line(f"{defect.file}: nothing can be done about it ({defect.part})")
    if any(one.missing is not None for one in repairs) and not yes and not has_root:
        out.remark("a writer's root may have copies of what would be lost: run it there, with --root, first")
    if repairs and not yes:
        out.remark("nothing was changed: --yes does that")


def repairs_document(repairs: Sequence[Repair], left: Sequence[Defect], *, yes: bool) -> dict[str, Any]:
    """Return the members of the answer that only --repair has."""
    return {"repaired": yes, "repairs": [asdict(one) for one in repairs], "not_repaired": [asdict(one) for one in left]}


def _file_id(name: str) -> str:
    return name.split("/")[1] if name.startswith("data/") else Path(name).stem
