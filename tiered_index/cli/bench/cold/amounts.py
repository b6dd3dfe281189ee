"""How much suite `cold` measures: everything follows from the setting's items and whether it is quick. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiered_index.cli.bench.setting import Setting
from tiered_index.format.layout import Layout

__all__ = ["MEDIAN_MS", "SIGMA", "Amounts"]

MEDIAN_MS = 30.0
SIGMA = 0.3
"""The injected latency is lognormal: the median of a request, and the deviation of its logarithm."""
_FULL_FILES, _QUICK_FILES, _FEW_FILES = 1_000, 100, 10
_NATIVE = (1_000_000, 4_000_000)


@dataclass(frozen=True)
class Amounts:
    """Layouts, numbers of files, and what is asked of them.

    `lookups`: files in range -> lookups of each kind in a round; `serial`: in which of them RocketMQ's way is also
    walked file by file.
    """

    layout: Layout
    files: int
    lookups: Mapping[int, int]
    serial: tuple[int, ...]
    fingerprint_keys: int
    curve_layout: Layout
    curve_files: int
    curve_keys: tuple[int, ...]

    @classmethod
    def of(cls, setting: Setting) -> Amounts:
        """Return the amounts of a setting."""
        preset, schema, items = setting.layout.preset, setting.layout.schema, setting.layout.items
        few = items < 20_000
        small = min(items, 5_000 if setting.quick else 20_000)
        curve_slots, curve_items = (12_500, 50_000) if setting.quick else _NATIVE
        lookups = (
            {1: 2, 10: 1} if few else {1: 3, 10: 2, 100: 1} if setting.quick else {1: 30, 10: 20, 100: 8, 1_000: 2}
        )
        return cls(
            layout=Layout(preset, schema, max(1, small // 4), small),
            files=_FEW_FILES if few else _QUICK_FILES if setting.quick else _FULL_FILES,
            lookups=lookups,
            serial=tuple(n for n in lookups if n <= 10 or not setting.quick),
            fingerprint_keys=min(items, 1_000_000) if setting.quick or few else 20_000_000,
            curve_layout=Layout(preset, schema, min(curve_slots, max(1, items // 4)), min(curve_items, items)),
            curve_files=_FEW_FILES,
            curve_keys=tuple(count for count in (1, 10, 100, 1_000, 10_000) if count <= max(100, items // 10)),
        )

    @property
    def space_bytes(self) -> int:
        """Disk space of the stored files and of one life cycle's worth of local ones."""
        small, large = self.layout.unsealed_size, self.curve_layout.unsealed_size
        return 2 * max(small * self.files, large * self.curve_files)
