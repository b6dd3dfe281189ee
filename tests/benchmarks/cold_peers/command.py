"""`python -m tests.benchmarks cold-peers`: the command of `make bench SUITE=cold`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tests.benchmarks.cold_peers.figures import FIGURES, GREATEST
from tests.benchmarks.cold_peers.run import COLUMNS, Amounts, run, versions
from tests.benchmarks.comparing import heading, table
from tests.benchmarks.machine.figures import facts
from tests.benchmarks.machine.setting import scratch
from tests.benchmarks.running import Out, RootDir, Rounds, base_folder, write_document
from tiered_index.cli.session import Session, command
from tiered_index.errors import InvalidArgument


@command
def cold_peers(
    session: Session,
    entries: Annotated[list[int] | None, typer.Option(min=10_000, help="Number of entries; several times.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this column; several times.")] = None,
    rounds: Rounds = 3,
    delay: Annotated[float, typer.Option(min=0, help="Delay of each request in milliseconds.")] = 30.0,
    peers_python: Annotated[
        Path | None, typer.Option(help="Python with the other stores' packages. Default: this one.")
    ] = None,
    root_dir: RootDir = None,
    out: Out = None,
) -> int:
    """Look keys up in object storage: by this index, SlateDB, Lance, pyarrow and DuckDB, over one S3 server.

    The server runs here, counts requests, and delays each by 30 ms. All stores get the same entries. Every answer is
    checked, and a wrong one ends the run. A store without its package is named and left out. Default: 5 and 20 million
    entries.

    [bold]Examples[/bold]

      python -m tests.benchmarks cold-peers --entries 200000

      python -m tests.benchmarks cold-peers --entries 5000000 --rounds 5 --out build/cold.json

      python -m tests.benchmarks cold-peers --entries 200000 --only month --only slatedb --json
    """
    if session.root is not None or session.storage is not None:
        raise InvalidArgument("cold-peers starts its own storage: leave out --root and --storage")
    if unknown := [name for name in only or () if name not in COLUMNS]:
        raise InvalidArgument(f"--only {unknown[0]}: the columns are {', '.join(COLUMNS)}")
    python = str(peers_python or sys.executable)
    # a column may start from another column's objects
    wanted = {part for name in only or COLUMNS for part in (COLUMNS[name].base, name)}
    found, skipped = versions(python, [name for name in COLUMNS if name in wanted])
    chosen = [name for name in found if COLUMNS[name].base is None or COLUMNS[name].base in found]
    base = base_folder(root_dir)
    amounts = Amounts(rounds=rounds, delay_ms=delay)
    document = {
        "machine": facts(base),
        "amounts": asdict(amounts),
        "columns": {name: {"title": COLUMNS[name].title, "version": found[name]} for name in chosen},
        "skipped": skipped,
        "sizes": [],
    }
    for title, reason in skipped.items():
        session.out.note(f"{title} is left out: {reason}")
    for size in entries or [5_000_000, 20_000_000]:
        title, steps = f"{size:,} entries", 1 + len(chosen) * (1 + rounds)
        with scratch(base) as folder, session.out.progress(title, steps) as progress:
            document["sizes"].append(run(chosen, size, amounts, python, folder, progress.update))
        write_document(out, document)
    session.out.answer(document)
    for each in document["sizes"]:
        session.out.line(f"{heading(each)}, medians of {rounds} rounds")
        for line in table(document, each, FIGURES, GREATEST).splitlines():
            session.out.line(line)
    return 0
