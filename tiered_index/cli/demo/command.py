"""`tiered-index demo`: a live store of two million messages through all states, two crashes, every answer checked."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_index.cli.demo.server import Place, place_of
from tiered_index.cli.demo.stages import Stages
from tiered_index.cli.output import Printer, human_bytes, human_count, human_seconds
from tiered_index.cli.session import Session, command
from tiered_index.config import IndexConfig
from tiered_index.storage.opening import open_storage

__all__ = ["demo"]

_WRONG = 1
_PART_BYTES = 5 << 20
_SETTINGS, _S3_SETTINGS = "TIERED_INDEX_", "TIERED_INDEX_S3__"
_LOOKUP_COLUMNS = ("place", "files by state", "look-ups", "answers", "wrong", "p50 ms", "p99 ms", "requests", "bytes")


@command
def demo(
    session: Session,
    messages: Annotated[int, typer.Option(min=10_000, help="Messages of the stream.")] = 2_000_000,
    lookups: Annotated[int, typer.Option(min=1, help="Look-ups in each local state.")] = 1_000,
    cold_lookups: Annotated[int, typer.Option(min=2, help="Look-ups straight from the storage.")] = 200,
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 1,
    keep: Annotated[Path | None, typer.Option(help="Work in this folder and leave it, and the storage, as they are.")] = None,
) -> int:
    """Show all of it: a RocketMQ store, followed while it is written, through every state into an object store; killed twice, all checked.

    The storage is an embedded S3 server unless --storage names another one, where a fresh prefix is used (and deleted afterwards unless
    --keep). Without the extra "demo" it is a folder. Exit code 1 where an entry is lost or an answer is wrong.

    [bold]Examples[/bold]

      tiered-index demo

      tiered-index demo --messages 200000 --json

      tiered-index demo --storage s3://bucket/scratch --keep ./demo
    """
    started_s = time.monotonic()

    def say(text: str) -> None:
        session.out.note(f"[{time.monotonic() - started_s:5.1f} s] {text}")

    with (
        _folder(keep) as folder, place_of(session.storage, folder) as place, _environment(place), contextlib.ExitStack() as closing,
    ):  # fmt: skip
        say(f"storage: {place.label}")
        config = IndexConfig.load(session.config_file, root=folder / "root", storage=place.uri, background=False)
        stages = Stages(config, folder, messages, lookups, cold_lookups, seed, say, closing, session.config_file)
        try:
            stages.generate()
            stages.follow_and_die()
            stages.walk_the_states()
            census = stages.read_without_state()
        finally:
            if keep is None and session.storage is not None:
                _delete_all(config)
    wrong = bool(census.lost or census.strange or stages.figures["wrong_answers"])
    figures = {"status": "wrong" if wrong else "ok", "storage": place.label, **stages.figures}
    figures["elapsed_s"] = round(time.monotonic() - started_s, 1)
    if session.out.as_json:
        session.out.document(figures)
    else:
        _print(session.out, figures)
    return _WRONG if wrong else 0


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="tiered-index-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _environment(place: Place) -> Iterator[None]:
    """Let this process and its children see the demo's settings, and none that are meant for the user's own index."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(_SETTINGS) and not name.startswith(_S3_SETTINGS):
            del os.environ[name]
    os.environ |= {**place.environment, f"{_SETTINGS}UPLOAD_PART_BYTES": str(_PART_BYTES)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _delete_all(config: IndexConfig) -> None:
    with open_storage(str(config.storage), options=config.s3) as storage:
        storage.abort_uploads()
        storage.delete_many([info.name for info in storage.list()])


def _print(out: Printer, figures: dict[str, Any]) -> None:
    rows = [
        (
            f["place"], _states(f["files"]), human_count(f["lookups"]), human_count(f["answers"]), f["wrong"],
            f"{f['p50_ms']:.2f}", f"{f['p99_ms']:.2f}", human_count(f["requests_per_lookup"]), human_bytes(f["bytes_per_lookup"]),
        )
        for f in figures["lookups"]
    ]  # fmt: skip
    out.line(f"storage: {figures['storage']}")
    out.table(_LOOKUP_COLUMNS, rows, right="look-ups answers wrong p50 p99 ms requests bytes")
    facts: dict[str, object] = {
        "messages": f"{human_count(figures['messages'])} in {figures['topics']} topics over {figures['days']} days",
        "entries": human_count(figures["entries"]),
        "commit log": f"{human_bytes(figures['log_bytes'])} in {figures['log_segments']} segments",
        "dispatch and flush": f"{human_count(figures['ingest_entries_per_s'])} entries/s",
        "compaction rate": f"{human_count(figures['compact_entries_per_s'])} entries/s",
        "uploaded": human_bytes(figures["upload_bytes"]),
        "kills survived": f"{len(figures['kills'])} ({', '.join(kill['moment'] for kill in figures['kills']) or 'none'})",
        "entries put twice": human_count(figures["entries_repeated"]),
        "entries lost": human_count(figures["entries_lost"]),
        "entries of nobody": human_count(figures["entries_strange"]) if figures["entries_strange"] else None,
        "wrong answers": human_count(figures["wrong_answers"]),
        "time": human_seconds(figures["elapsed_s"]),
    }
    out.facts(facts)
    for text in figures["wrong"]:
        out.line(f"WRONG {text}")
    out.line("all right" if figures["status"] == "ok" else "SOMETHING IS WRONG")


def _states(files: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(files.items()))
