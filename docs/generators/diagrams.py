"""The pictures of docs/images that are made from text: the life of an entry, and the layers of the code. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

__all__ = ["PICTURES", "architecture", "life_cycle"]

DOCS = Path(__file__).parents[1]
_FONT = "font-family='system-ui, sans-serif'"
# both themes show pictures on white
_INK, _LINE, _FILLS = "#1f2933", "#62727b", ("#e3f2fd", "#e8f5e9", "#fff8e1")
LIFE = (
    ("write buffer", "memory", "searchable at once", "flush"),
    ("unsealed file", "local disk", "hash chains, journal", "seal, compact"),
    ("compacted file", "local disk", "an array per slot, CRCs", "upload"),
    ("uploaded file", "object store", "named by a log record", "merge"),
    ("window table", "object store", "few objects, for years", "expire, erase"),
)
"""The states of an entry: name, place, form, and the step to the next one."""
_LAYER = re.compile(r"^(\w+)/ +→((?: \w+)*)  +(.*)$", re.M)


def life_cycle() -> str:
    """Return the states of an entry from left to right, each with its place and form."""
    wide, high, gap, top = 168, 74, 76, 34
    places = list(dict.fromkeys(place for _, place, _, _ in LIFE))
    parts = []
    for number, (name, place, form, step) in enumerate(LIFE):
        left = 70 + number * (wide + gap)
        parts += _box(left, top, wide, high, (name, form), _FILLS[places.index(place)], note=place)
        parts.append(_arrow(left + wide, top + high / 2, left + wide + gap, top + high / 2))
        parts += [
            _text(left + wide + gap / 2, top + high / 2 + 2 - 14 * (len(step.split(", ")) - at), word, 12)
            for at, word in enumerate(step.split(", "))
        ]
    parts += [_arrow(14, top + high / 2, 70, top + high / 2), _text(38, top + high / 2 - 10, "put", 12)]
    end = 70 + len(LIFE) * (wide + gap)
    return _svg(end + 50, top + high + 16, [*parts, _text(end + 22, top + high / 2 + 5, "gone", 14)])


def architecture() -> str:
    """Return the layers of docs/architecture.md from top to bottom. An arrow leads to an imported layer."""
    diagrams = {
        name: (below.split(), text) for name, below, text in _LAYER.findall((DOCS / "architecture.md").read_text())
    }
    below = {name: set(others) for name, (others, _) in diagrams.items()}
    heights: dict[str, int] = {}
    while len(heights) < len(below):
        ready = {name for name, others in below.items() if name not in heights and others <= heights.keys()}
        heights |= {name: 1 + max((heights[other] for other in below[name]), default=-1) for name in ready}
    rows = [[name for name in diagrams if heights[name] == height] for height in range(max(heights.values()), -1, -1)]
    wide, high, gap, drop = 250, 58, 30, 52
    width = max(map(len, rows)) * (wide + gap) + gap
    places, parts = {}, []
    for number, row in enumerate(rows):
        left = (width - len(row) * (wide + gap) + gap) / 2
        for at, name in enumerate(row):
            places[name] = left + at * (wide + gap), 14 + number * (high + drop)
    for name, others in below.items():
        implied = set().union(*(below[other] for other in others))
        for other in sorted(others - implied):
            (x, y), (to_x, to_y) = places[name], places[other]
            parts.append(_arrow(x + wide / 2, y + high, to_x + wide / 2, to_y))
    for name, (x, y) in places.items():
        fill = _FILLS[min(heights[name], 2)]
        parts += _box(x, y, wide, high, (f"{name}/", diagrams[name][1].strip()), fill)
    return _svg(width, 14 + len(rows) * (high + drop) - drop + 14, parts)


def _box(
    x: float, y: float, wide: float, high: float, lines: Sequence[str], fill: str, note: str = ""
) -> Iterable[str]:
    yield f"<rect x='{x:g}' y='{y:g}' width='{wide}' height='{high}' rx='6' fill='{fill}' stroke='{_LINE}'/>"
    yield _text(x + wide / 2, y + high / 2 - 4, lines[0], 16, "bold")
    yield _text(x + wide / 2, y + high / 2 + 17, lines[1], 12)
    if note:
        yield _text(x + wide / 2, y - 10, note, 12)


def _text(x: float, y: float, text: str, size: int, weight: str = "normal") -> str:
    look = f"font-size='{size}' font-weight='{weight}' text-anchor='middle' fill='{_INK}' {_FONT}"
    return f"<text x='{x:g}' y='{y:g}' {look}>{escape(text)}</text>"


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f"<line x1='{x:g}' y1='{y:g}' x2='{to_x:g}' y2='{to_y:g}' stroke='{_LINE}' marker-end='url(#head)'/>"


def _svg(wide: float, high: float, parts: Iterable[str]) -> str:
    head = (
        "<defs><marker id='head' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='8' markerHeight='8' orient='auto'>"
        f"<path d='M0 0L8 4L0 8z' fill='{_LINE}'/></marker></defs><rect width='100%' height='100%' fill='#fff'/>"
    )
    body = "\n".join((head, *parts))
    return f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {wide:g} {high:g}'>\n{body}\n</svg>\n"


PICTURES: Mapping[str, Callable[[], str]] = {"architecture.svg": architecture, "life-cycle.svg": life_cycle}
"""The pictures of docs/images by name."""
