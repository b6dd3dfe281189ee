"""`tiered-index doctor`: checks whether a storage, a disk for a root, and a source have what the engine needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tiered_index.cli.exit_codes import FINDING
from tiered_index.cli.options import refuse_others
from tiered_index.cli.others import groups_of, options_of
from tiered_index.cli.session import Session
from tiered_index.config import IndexConfig
from tiered_index.connectors.contract import SourceRun, checked
from tiered_index.connectors.kafka.spec import KafkaClientOptions, KafkaOptions
from tiered_index.connectors.registry import CONNECTORS, ConnectorSpec
from tiered_index.errors import InvalidArgument, NotAnIndex, StorageMisconfigured
from tiered_index.storage.disk import local_path
from tiered_index.storage.opening import split_uri
from tiered_index.storage.probe import AbilityFinding, probe, probe_folder


def doctor(
    session: Session, *, uri: str | None, source: str | None, kafka: KafkaClientOptions, others: Any = None
) -> int:
    """Check that a storage, a disk and a source have the abilities that the engine needs. `others`: see `ingest`."""
    config = session.config(storage=uri)
    root = session.root
    if config.storage is None and root is None and source is None:
        raise InvalidArgument("nothing to check: give the URI of a storage, --root DIR, --source SOURCE, or several")
    spec = None if source is None else CONNECTORS.of_address(source)
    kind = "no source" if spec is None else spec.title
    refuse_others(str(source), kind, ("Kafka", kafka), *groups_of(others))
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
    if source is not None and spec is not None:
        document["source"] = source
        findings += [("source", finding) for finding in _of_source(session, source, spec, kafka, others)]
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


def _of_source(
    session: Session, source: str, spec: ConnectorSpec, kafka: KafkaClientOptions, others: Any
) -> list[AbilityFinding]:
    """Return what a source has, and what it lacks. Raises as `SourceConnector.doctor`."""
    connector = CONNECTORS.connector(spec.name)
    of_client = KafkaOptions(kafka=kafka.kafka, kafka_config=kafka.kafka_config)
    options = options_of(spec, [of_client], others)
    run = SourceRun(addresses=(source,), options=options, note=session.out.note)
    # without a root: that of an index says nothing of the source
    config = IndexConfig(storage=session.config().storage)
    with connector.watch(lambda problem: session.out.error("StorageUnavailable", problem)):
        try:
            if (examine := getattr(connector, "doctor", None)) is not None:
                findings: list[AbilityFinding] = examine(run, config)
                return findings
            with checked(connector, run, config):
                return [AbilityFinding("source", "reading messages", "ok", "yes")]
        except StorageMisconfigured as error:
            return [AbilityFinding("source", "reading messages", "missing", str(error), error)]


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
