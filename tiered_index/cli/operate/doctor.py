"""`tiered-index doctor`: checks whether a storage, and a disk for a root, have the abilities that the engine needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tiered_index.cli.exit_codes import FINDING
from tiered_index.cli.session import Session
from tiered_index.errors import InvalidArgument, NotAnIndex
from tiered_index.storage.disk import local_path
from tiered_index.storage.opening import split_uri
from tiered_index.storage.probe import AbilityFinding, probe, probe_folder


def doctor(session: Session, *, uri: str | None) -> int:
    """Check that a storage and a disk have the abilities that the engine needs."""
    config = session.config(storage=uri)
    root = session.root
    if config.storage is None and root is None:
        raise InvalidArgument("nothing to check: give the URI of a storage, --root DIR, or both")
    document: dict[str, Any] = {"status": "ok"}
    findings: list[tuple[str, AbilityFinding]] = []
    if config.storage is not None:
        with config.open_storage() as storage:
            _check_there(storage.uri)
            document["storage"] = storage.uri
            with _no_more_folders(storage.uri):
                findings += [("storage", finding) for finding in probe(storage)]
    if root is not None:
        document["root"] = str(root)
        findings += [("root", finding) for finding in probe_folder(root)]
    rows = [
        {
            "of": place,
            "what": finding.what,
            "needed_for": finding.needed_for,
            "state": finding.state,
            "result": finding.result,
        }
        for place, finding in findings
    ]
    missing = [row for row in rows if row["state"] == "missing"]
    document |= {"status": "missing" if missing else "ok", "abilities": rows}
    session.out.answer(document)
    session.out.rows("", [{name: value for name, value in row.items() if name != "state"} for row in rows])
    session.out.line(f"missing: {len(missing)} of {len(rows)} abilities" if missing else "nothing is missing")
    return FINDING if missing else 0


@contextlib.contextmanager
def _no_more_folders(uri: str) -> Iterator[None]:
    """Remove the empty folders that the block makes in a storage's folder."""
    parts = split_uri(uri)
    folder = local_path(parts, "file:///path") if parts.scheme == "file" else None
    before = set(folder.iterdir()) if folder is not None else set()
    try:
        yield
    finally:
        for path in set(folder.iterdir()) - before if folder is not None else ():
            # a writer may use it by now
            with contextlib.suppress(OSError):
                path.rmdir()


def _check_there(uri: str) -> None:
    """Raise `NotAnIndex` for a folder or database that does not exist: the probe would make it, also a misspelt one."""
    parts = split_uri(uri)
    if parts.scheme in ("file", "sqlite") and not (path := local_path(parts, f"{parts.scheme}:///path")).exists():
        folder = path if parts.scheme == "file" else path.parent
        raise NotAnIndex(
            f"nothing is at {uri}: check the URI. To check the disk for a new index, make the folder first, or pass "
            f"--root {folder}"
        )
