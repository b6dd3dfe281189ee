"""The arithmetic of deploy/SIZING.md: from the inputs in the page to the tables of results below them.

    python -m docs.generators.sizing_page        computes the tables again after you changed an input

Pure except for `main`. Every input is a row ``| name | value | unit | from |`` of the page's tables of inputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["PAGE", "SIZES", "Inputs", "computed", "inputs_of", "shown", "sizing"]

PAGE = Path(__file__).parents[2] / "deploy" / "SIZING.md"
SIZES = {"1 bn": 1e9, "10 bn": 1e10, "100 bn": 1e11}
Inputs = Mapping[str, float]
_ROW = re.compile(r"^\| ([A-Za-z][^|]*?) \| ([0-9][0-9,.]*) \| [^|]* \| [^|]+ \|$", re.MULTILINE)
_HOUR_S = 3600
_BEGIN, _END = "<!-- measured: computed -->\n", "<!-- end -->"
_GIB, _MIB = 2**30, 2**20
# Bytes of an entry before packing. Shards and slot groups are cut by this size
_PLAIN_BYTES = 32
_TIER_1_GIB, _TIER_2_GIB = 50 * 1024, 450 * 1024


def inputs_of(page: str) -> dict[str, float]:
    """Return the inputs of a page by name. Raises `ValueError` for one that appears twice."""
    totals: dict[str, float] = {}
    for name, value in _ROW.findall(page):
        if name in totals:
            raise ValueError(f"{name} is in the page twice")
        totals[name] = float(value.replace(",", ""))
    return totals


def sizing(inputs: Inputs, messages: float) -> dict[str, float]:
    """Return the needs of a year with this many messages, by the names on the page."""
    entries = messages * inputs["keys a message"]
    stored = entries * inputs["bytes an entry"]
    windows = math.ceil(365 / inputs["days a window, merged"])
    shard, part = inputs["MiB a shard"] * _MIB, inputs["MiB a part"] * _MIB
    plain = entries * _PLAIN_BYTES
    # a build makes its shards smaller, so that each core gets two
    day_plain = round(entries / 365) * _PLAIN_BYTES
    day_shard = max(inputs["least MiB a shard"] * _MIB, min(shard, day_plain // (2 * inputs["executors"])))
    shards_a_day, shards_a_window = math.ceil(day_plain / day_shard), math.ceil(plain / windows / shard)
    day_shards, objects = 365 * shards_a_day, windows * shards_a_window
    build_h = entries / inputs["build"] / _HOUR_S
    merge_h = entries / inputs["merge"] / _HOUR_S
    puts = _puts(day_shards, stored, part) + _puts(objects, stored, part)
    # One range of each day's table per piece. One directory for each task (a merged shard) and daily shard that
    # overlap. One HEAD after each upload.
    ranges = math.ceil(entries / inputs["entries a piece"]) * inputs["days a window, merged"]
    gets = ranges + 365 * (shards_a_day + shards_a_window - 1) + (day_shards + objects)
    writes_usd = puts * inputs["PUT"] / 1000 + gets * inputs["GET"] / 1000
    gib = stored / _GIB
    storage_usd = (
        min(gib, _TIER_1_GIB) * inputs["storage, first 50 TiB"]
        + min(max(0.0, gib - _TIER_1_GIB), _TIER_2_GIB) * inputs["storage, next 450 TiB"]
        + max(0.0, gib - _TIER_1_GIB - _TIER_2_GIB) * inputs["storage, above"]
    )
    compute_usd = (build_h + merge_h) * inputs["executor hour"]
    # windows that are over, and days of the present one: between none and all of them
    year_gets = 365 // inputs["days a window, merged"] + inputs["days a window, merged"] / 2
    return {
        "entries a year": entries,
        "executor hours a year, build": build_h,
        "executor hours a year, merge": merge_h,
        "minutes a day on the executors": (build_h + merge_h) / 365 * 60 / inputs["executors"],
        "GiB at the year's end": gib,
        "objects at the year's end": objects,
        "GiB of directories": entries
        * _PLAIN_BYTES
        / (inputs["KiB a slot group"] * 1024)
        * inputs["bytes a directory entry"]
        / _GIB,
        "PUTs a year": puts,
        "GETs of merges a year": gets,
        "GETs a lookup of a day": 1,
        "GETs a lookup of the year": year_gets,
        "GETs a lookup of the year, not merged": 365 * inputs["files a day, not merged"],
        "dollars a month: storage, at the year's end": storage_usd,
        "dollars a month: requests of builds and merges": writes_usd / 12,
        "dollars a month: executors": compute_usd / 12,
        "dollars a month: lookups": inputs["lookups a day"] * 365 / 12 * year_gets * inputs["GET"] / 1000,
        "dollars a month": storage_usd
        + (writes_usd + compute_usd) / 12
        + inputs["lookups a day"] * 365 / 12 * year_gets * inputs["GET"] / 1000,
    }


def _puts(objects: int, stored: float, part: float) -> float:
    """Return the PUTs of objects that have `stored` bytes together: one each, or the parts, a begin and an end."""
    size = stored / objects
    return objects * (1 if size <= part else math.ceil(size / part) + 2)


_ARITHMETIC = {
    "entries a year": "messages × keys a message",
    "executor hours a year, build": "entries ÷ build ÷ 3,600",
    "executor hours a year, merge": "entries ÷ merge ÷ 3,600",
    "minutes a day on the executors": "(build + merge hours) ÷ 365 × 60 ÷ executors",
    "GiB at the year's end": "entries × bytes an entry ÷ 2^30",
    "objects at the year's end": "windows × ⌈plain bytes ÷ windows ÷ shard⌉; windows = ⌈365 ÷ days a window⌉",
    "GiB of directories": "plain bytes ÷ slot group × bytes a directory entry ÷ 2^30",
    "PUTs a year": "for each daily shard and object: 1 up to a part, else ⌈its bytes ÷ part⌉ + 2",
    "GETs of merges a year": "ranges: ⌈entries ÷ piece⌉ × days a window; "
    "directories: 365 × (shards a day + shards a window − 1); HEAD: daily shards + objects",
    "GETs a lookup of a day": "windows in range",
    "GETs a lookup of the year": "⌊365 ÷ days a window⌋ merged tables + days a window ÷ 2 daily tables, on average",
    "GETs a lookup of the year, not merged": "365 × files a day",
    "dollars a month: storage, at the year's end": "GiB × storage, by its tiers",
    "dollars a month: requests of builds and merges": "(PUTs × PUT + GETs × GET) ÷ 1,000 ÷ 12",
    "dollars a month: executors": "(build + merge hours) × executor hour ÷ 12",
    "dollars a month: lookups": "lookups a day × 365 ÷ 12 × GETs a lookup of the year × GET ÷ 1,000",
    "dollars a month": "the sum of the four above",
}


def computed(inputs: Inputs) -> str:
    """Return the page's table of results."""
    results = {name: sizing(inputs, messages) for name, messages in SIZES.items()}
    rows = [
        (f"**{what}**" if what == "dollars a month" else what, how, *(_shown(results[name][what]) for name in SIZES))
        for what, how in _ARITHMETIC.items()
    ]
    columns = ("a year of messages", "arithmetic", *SIZES)
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ["---"] * len(columns), *rows))


def shown(text: str) -> str:
    """Return the results in the text of the page."""
    return text.split(_BEGIN)[1].split(_END)[0]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def main() -> None:
    """Rewrite the page's results."""
    text = PAGE.read_text()
    PAGE.write_text(text.replace(shown(text), computed(inputs_of(text))))


if __name__ == "__main__":
    main()
