"""Suite `upload`: from sealed files to a storage of folders, and the end of their local copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tiered_index.cli.bench.figures import Spec
from tiered_index.cli.bench.machine import settle
from tiered_index.cli.bench.meter import Meter
from tiered_index.cli.bench.setting import Setting, WatchedDisk, fill, plain_copy, require, scratch
from tiered_index.format.layout import Layout
from tiered_index.service.index import IndexService

__all__ = ["Upload"]

_RATE, _BYTES, _COPY = "upload of a full file", "upload rate", "times a plain durable copy"
_CYCLE, _SMALL_CYCLE, _SMALL_RETIRE = (
    "compaction, upload and retirement",
    "small files: compaction and upload",
    "small files: retirement",
)
_UPLOADING, _LIFE_CYCLE, _SMALL_LIFE, _RETIRING = "upload", "life cycle", "small files", "retirement"
_SMALL = 1_000
_SMALL_SHARE = 10


class Upload:
    """A full file, and a number of small ones, through the life cycle once a round; a local copy goes as soon as it is
    uploaded.
    """

    name = "upload"
    passes = 1

    def specs(self, setting: Setting) -> Sequence[Spec]:
        """As `Suite.specs`."""
        return (
            Spec(_RATE, "s"),
            Spec(_BYTES, "MiB/s"),
            Spec(_COPY, "ratio"),
            Spec(_CYCLE, "entries/s"),
            Spec(_SMALL_CYCLE, "files/s"),
            Spec(_SMALL_RETIRE, "files/s"),
        )

    def run(self, setting: Setting, folder: Path, meter: Meter) -> None:
        """As `Suite.run`."""
        for _ in meter.rounds():
            with scratch(folder) as place:
                _full_file(setting, place, meter)
            with scratch(folder) as place:
                _small_files(setting, place, meter)


def _full_file(setting: Setting, place: Path, meter: Meter) -> None:
    uploading, whole = meter.section(_UPLOADING), meter.section(_LIFE_CYCLE)

    def reached(state: str) -> None:
        if state == "compacted":
            uploading.start()
        elif state == "uploaded":
            uploading.stop()

    with setting.open(place, disk=WatchedDisk(reached), local_keep_s=0) as index:
        fill(index, 0, setting.entries)
        index.seal()
        settle()
        with whole:
            index.run_lifecycle()
        require(_states(index), {"storage": 1}, "states of the files")
        (stored,) = index.log_state.objects.values()
        (source,) = (
            path
            for path in (place / "storage").rglob("*")
            if path.is_file() and path.stat().st_size == stored.size_bytes
        )
        settle()
        with meter.section("copy") as copy:
            plain_copy(source, place / "copy")
    meter.record(_RATE, uploading.elapsed_s)
    meter.record(_BYTES, stored.size_bytes / uploading.elapsed_s / (1 << 20))
    meter.record(_COPY, uploading.elapsed_s / copy.elapsed_s)
    meter.record(_CYCLE, setting.entries / whole.elapsed_s)


def _small_files(setting: Setting, place: Path, meter: Meter) -> None:
    files = max(2, setting.small_files // _SMALL_SHARE)
    layout = setting.layout
    small = replace(setting, layout=Layout(layout.preset, layout.schema, _SMALL, _SMALL + 1))
    living, retiring = meter.section(_SMALL_LIFE), meter.section(_RETIRING)
    disk = WatchedDisk()

    def reached(state: str) -> None:
        if state == "uploaded" and disk.counts["uploaded"] == files:
            living.stop()
            retiring.start()

    disk = WatchedDisk(reached)
    with small.open(place, disk=disk, local_keep_s=0) as index:
        fill(index, 0, files * _SMALL)
        settle()
        with living:
            index.run_lifecycle()
        retiring.stop()
        require(_states(index), {"storage": files}, "states of the small files")
    meter.record(_SMALL_CYCLE, files / living.elapsed_s)
    meter.record(_SMALL_RETIRE, files / retiring.elapsed_s)


def _states(index: IndexService) -> dict[str, int]:
    places = [file.place for file in index.files()]
    return {place: places.count(place) for place in places}
