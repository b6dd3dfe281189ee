"""Suite `recovery`: opening a root that a crash left with a full unsealed file, and one of many files. The page cache
is warm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tiered_index.cli.bench.figures import Spec, at_most
from tiered_index.cli.bench.machine import settle
from tiered_index.cli.bench.meter import Meter
from tiered_index.cli.bench.setting import Setting, UnsyncedDisk, fill, require, scratch
from tiered_index.format.layout import Layout
from tiered_index.service.index import IndexService
from tiered_index.storage.local.storage import LocalStorage

__all__ = ["Recovery"]

_FULL, _FULL_RATE = "opening a full unsealed file", "recovery rate"
_OPENING, _OPENING_MANY = "opening", "opening many"
_MANY_FILES = 1_000
_SMALL = 100
_AT_ONCE = 50
"""Files that are unsealed at the same time while many are made: each holds two descriptors."""


class Recovery:
    """Two roots, each opened once a round."""

    name = "recovery"
    passes = 2

    def specs(self, setting: Setting) -> Sequence[Spec]:
        """As `Suite.specs`."""
        return (
            Spec(_FULL, "s", at_most(6) if setting.is_full else None, (_OPENING,)),
            Spec(_FULL_RATE, "entries/s"),
            Spec(_many(setting), "s", at_most(2) if setting.small_files >= _MANY_FILES else None, (_OPENING_MANY,)),
        )

    def run(self, setting: Setting, folder: Path, meter: Meter) -> None:
        """As `Suite.run`."""
        with scratch(folder) as place:
            _full_file(setting, place, meter)
        with scratch(folder) as place:
            _many_files(setting, place, meter)


def _many(setting: Setting) -> str:
    return f"opening a root with {setting.small_files:,} files"


def _full_file(setting: Setting, place: Path, meter: Meter) -> None:
    count = setting.entries - 1  # one more and the file would be sealed
    index = setting.open(place)
    fill(index, 0, count)
    index.abandon()
    settle()
    for _ in meter.rounds():
        with meter.section(_OPENING) as opening:
            index = setting.open(place)
        require(
            [(file.place, getattr(file, "count", None)) for file in index.files()],
            [("unsealed", count)],
            "files after recovery",
        )
        index.flush()  # reserves the next file, so that every round begins with what a crash leaves
        index.abandon()
        meter.record(_FULL, opening.elapsed_s)
        meter.record(_FULL_RATE, count / opening.elapsed_s)


def _many_files(setting: Setting, place: Path, meter: Meter) -> None:
    """Open a root of small files that are all uploaded and kept locally; they are made without syncs."""
    layout = setting.layout
    small = replace(setting, layout=Layout(layout.preset, layout.schema, _SMALL, _SMALL + 1))
    files = setting.small_files
    with small.open(place, disk=UnsyncedDisk(), storage=LocalStorage(place / "storage", disk=UnsyncedDisk())) as index:
        for first in range(0, files, _AT_ONCE):
            fill(index, first * _SMALL, min(_AT_ONCE, files - first) * _SMALL)
            index.run_lifecycle()
    settle()
    for _ in meter.rounds():
        with meter.section(_OPENING_MANY) as opening:
            index = small.open(place)
        require(_census(index), (files, files * _SMALL), "files and entries after opening")
        index.close()
        meter.record(_many(setting), opening.elapsed_s)


def _census(index: IndexService) -> tuple[int, int]:
    counts = [getattr(file, "count", 0) for file in index.files() if file.place == "uploaded"]
    return len(counts), sum(counts)
