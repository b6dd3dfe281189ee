"""Suite `cold`: what lookups of stored files cost, in requests, bytes and time, behind an injected latency or on
`--storage`.

Many small stored files, of which the 1, 10, 100, 1,000 newest are in range. Beside each lookup the very ranges that it
needs are read by plain GETs, as many at once; a lookup's time is judged by theirs. With `--storage` the tables that
need none are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiered_index.cli.bench.cold.amounts import MEDIAN_MS, SIGMA, Amounts
from tiered_index.cli.bench.cold.curve import curve_table
from tiered_index.cli.bench.cold.files import StoredFiles, copied, make_files
from tiered_index.cli.bench.cold.fingerprints import count_matches, fingerprint_table
from tiered_index.cli.bench.cold.lookups import (
    FRESH,
    KINDS,
    OPENING,
    OURS,
    PARALLEL,
    RAW,
    SERIAL,
    WITH_FILTERS,
    Cell,
    Way,
    measure_lookups,
    section_of,
)
from tiered_index.cli.bench.cold.network import Network
from tiered_index.cli.bench.figures import Spec, at_least, at_most
from tiered_index.cli.bench.meter import Meter
from tiered_index.cli.bench.setting import Setting, scratch
from tiered_index.cli.bench.table import Table
from tiered_index.cli.output import counted
from tiered_index.config import IndexConfig
from tiered_index.storage.local.storage import LocalStorage

__all__ = ["Cold"]

_MOST_TIMES = 1.2
_LEAST_SPARED = 98.0
_MOST_TO_OPEN = 3


def _times(files: int, kind: str) -> str:
    return f"key in {kind} of {counted(files, 'file')}: times the slowest plain GET, p50"


def _to_open(amounts: Amounts) -> str:
    return f"requests to open a reader on {amounts.files:,} files"


def _spared(amounts: Amounts) -> str:
    return f"absent keys, filters at hand: files of {max(amounts.lookups):,} that cost no GET"


class Cold:
    """Files made once; every round takes other keys."""

    name = "cold"
    passes = 1

    def specs(self, setting: Setting) -> Sequence[Spec]:
        """As `Suite.specs`."""
        amounts = Amounts.of(setting)
        pairs = [(files, kind) for files in amounts.lookups for kind in KINDS]
        specs = [Spec(_times(*pair), "ratio", at_most(_MOST_TIMES), (section_of(*pair),)) for pair in pairs]
        most = max(amounts.lookups)
        specs.append(Spec(_spared(amounts), "%", at_least(_LEAST_SPARED), (section_of(most, "none"),)))
        specs.append(Spec(_to_open(amounts), "count", at_most(_MOST_TO_OPEN), (section_of(most, "fresh"),)))
        return specs

    def run(self, setting: Setting, folder: Path, meter: Meter) -> None:
        """As `Suite.run`."""
        amounts = Amounts.of(setting)
        with scratch(folder) as place:
            files = make_files(setting, amounts.layout, amounts.files, place)
            with _network(setting, files) as network:
                cells: dict[Way, list[Cell]] = {}
                for measured in measure_lookups(network, files, amounts, meter):
                    _record(measured, amounts, meter)
                    for way, cell in measured.items():
                        cells.setdefault(way, []).append(cell)
            merged = {way: _merged(parts) for way, parts in cells.items()}
            where = setting.storage or f"a folder behind a latency of lognormal({MEDIAN_MS:.0f} ms, {SIGMA})"
            about = (
                f"{amounts.files:,} files of {files.layout.slots:,} slots and {files.layout.items:,} items on {where}"
            )
            for table in _lookup_tables(merged, about):
                meter.table(table)
        if setting.storage is not None:
            return
        with scratch(folder) as place:
            meter.table(
                curve_table(make_files(setting, amounts.curve_layout, amounts.curve_files, place), amounts.curve_keys)
            )
        meter.table(fingerprint_table(count_matches(amounts.fingerprint_keys)))


@contextlib.contextmanager
def _network(setting: Setting, files: StoredFiles) -> Iterator[Network]:
    if setting.storage is None:
        yield Network(LocalStorage(files.objects), injected=True)
        return
    with copied(files, setting.storage, IndexConfig.model_fields["query_threads"].default) as storage:
        yield Network(storage, injected=False)


def _record(cells: dict[Way, Cell], amounts: Amounts, meter: Meter) -> None:
    for files in amounts.lookups:
        for kind in KINDS:
            plain = cells[files, kind, RAW].percentile_ms(50)
            meter.record(_times(files, kind), cells[files, kind, OURS].percentile_ms(50) / plain)
    most = max(amounts.lookups)
    meter.record(_spared(amounts), 100 * (1 - cells[most, "none", WITH_FILTERS].requests_each / most))
    meter.record(_to_open(amounts), cells[most, OPENING, FRESH].requests_each)


def _merged(parts: Sequence[Cell]) -> Cell:
    whole = Cell()
    for cell in parts:
        whole.add(cell.samples_s, cell.requests, cell.bytes, cell.cost_usd)
    return whole


def _lookup_tables(cells: dict[Way, Cell], about: str) -> Iterator[Table]:
    columns = (
        "files",
        "key in",
        "read by",
        "lookups",
        "requests",
        "KiB",
        "USD a million",
        "p50 ms",
        "p99 ms",
        "p50 times plain GETs",
    )
    parts = {
        "lookups": (OURS, WITH_FILTERS),
        "other ways": (RAW, PARALLEL, SERIAL),
        "a reader that knows nothing": (FRESH,),
    }
    for title, ways in parts.items():
        chosen = [(way, cell) for who in ways for way, cell in cells.items() if way[2] == who]
        chosen.sort(key=lambda pair: pair[0][0])
        rows = [
            (
                *way,
                len(cell.samples_s),
                cell.requests_each,
                cell.kib_each,
                cell.usd_a_million,
                cell.percentile_ms(50),
                cell.percentile_ms(99),
                cell.percentile_ms(50) / cells[plain].percentile_ms(50) if plain in cells else None,
            )
            for way, cell in chosen
            for plain in [(way[0], way[1], RAW)]
        ]
        yield Table(f"{title}: {about}", columns, tuple(rows))
