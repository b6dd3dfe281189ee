"""Small multiples with logarithmic axes, as one SVG: a panel per figure, a line per name, one legend. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

__all__ = ["Panel", "svg"]

_COLOURS = ("#d62728", "#7f7f7f", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_ACROSS = 3
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 250, 150, 55, 24, 36
_LEGEND = 30


class Panel(NamedTuple):
    """A title, and (x, y) points by name, in order of x. A y of 0 or less has no place on the axis and is left out."""

    title: str
    lines: dict[str, list[tuple[float, float]]]


def svg(panels: Sequence[Panel]) -> str:
    """Return the picture. The first line has the strongest colour."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(names)}
    width = _ACROSS * (_WIDTH + _LEFT) + 20
    height = _LEGEND + math.ceil(len(panels) / _ACROSS) * (_TOP + _HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for at, name in enumerate(names):
        x = 20 + at * (width - 40) / len(names)
        parts.append(f'<rect x="{x:.0f}" y="10" width="10" height="10" fill="{colours[name]}"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="19">{escape(name)}</text>')
    for at, panel in enumerate(panels):
        left = _LEFT + at % _ACROSS * (_WIDTH + _LEFT)
        parts += _panel(panel, colours, left, _LEGEND + _TOP + at // _ACROSS * (_TOP + _HEIGHT + _GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, colours: dict[str, str], left: float, top: float) -> list[str]:
    points = [(x, y) for line in panel.lines.values() for x, y in line if y > 0]
    parts = [f'<text x="{left}" y="{top - 8}" font-weight="bold">{escape(panel.title)}</text>']
    parts.append(f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>')
    if not points:
        return parts
    (x_low, x_high), (y_low, y_high) = (_decades([point[axis] for point in points]) for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log10(x) - x_low) / (x_high - x_low) * _WIDTH
        up = (math.log10(y) - y_low) / (y_high - y_low) * _HEIGHT
        return left + right, top + _HEIGHT - up

    for decade in range(x_low, x_high + 1):
        x, _ = place(10.0**decade, 10.0**y_low)
        parts.append(f'<text x="{x:.1f}" y="{top + _HEIGHT + 13}" text-anchor="middle">{_short(decade)}</text>')
        parts.append(f'<path d="M{x:.1f} {top}v{_HEIGHT}" stroke="#ddd"/>')
    for decade in range(y_low, y_high + 1):
        _, y = place(10.0**x_low, 10.0**decade)
        parts.append(f'<text x="{left - 4}" y="{y + 3:.1f}" text-anchor="end">{_short(decade)}</text>')
        parts.append(f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#ddd"/>')
    for name, line in panel.lines.items():
        places = [place(x, y) for x, y in line if y > 0]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{colours[name]}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[name]}"/>' for x, y in places]
    return parts


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the exponents of ten around values, at least a decade apart."""
    low = math.floor(math.log10(min(values)))
    return low, max(low + 1, math.ceil(math.log10(max(values))))


def _short(decade: int) -> str:
    """Return a power of ten as axes show it."""
    if decade >= 6:
        return f"{10 ** (decade - 6)} M"
    return f"{10**decade:,}" if decade >= 0 else f"{10.0**decade:g}"
