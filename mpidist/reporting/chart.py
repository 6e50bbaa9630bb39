"""A chart of some series of numbers by step, as SVG for a page whose style sheet has the colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

#: From this ratio of the greatest to the least number on, logarithms are drawn.
_FAR = 100.0
#: Numbers beyond it are drawn there, and those below its reciprocal at 0: an axis has ticks on both sides of all.
_MOST = 1e300

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 360, 210, 52, 12, 10, 34


def chart(series: Mapping[str, Points], most_points: int) -> str:
    """Return the chart; every point has its numbers as a tooltip.  Points that are not finite are left out.

    Of more than `most_points` some are drawn, evenly, the last one included.  Numbers above 0 that are far apart are
    drawn by their logarithms.
    """
    drawn = {name: _thinned([p for p in points if math.isfinite(p[1])], most_points) for name, points in series.items()}
    flat = [point for points in drawn.values() for point in points]
    if not flat:
        return ""
    values = [_drawn(y) for _, y in flat]
    is_log = min(values) > 0 and max(values) > _FAR * min(values)
    xs, ys = _ticks([x for x, _ in flat]), _powers(values) if is_log else _ticks(values)
    across = _scale(xs, _LEFT, _WIDTH - _RIGHT)
    up = _scale(ys, _HEIGHT - _BOTTOM, _TOP, math.log10 if is_log else float)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(", ".join(drawn))} by step">']
    for y in ys:
        parts.append(f'<path class="grid" d="M{_LEFT} {up(y):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in xs:
        parts.append(f'<text x="{across(x):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">step</text>')
    for number, (name, points) in enumerate(drawn.items()):
        places = [(f"{across(x):.1f}", f"{up(_drawn(y)):.1f}") for x, y in points]
        line = "L".join(f"{x} {y}" for x, y in places)
        parts.append(f'<path class="line s{number % 3}" d="M{line}"/>' if len(places) > 1 else "")
        parts += [
            f'<circle class="s{number % 3}" cx="{px}" cy="{py}" r="{3 if len(places) < 60 else 1.5}">'
            f"<title>step {x:g}: {escape(name)} {y:.5g}</title></circle>"
            for (px, py), (x, y) in zip(places, points, strict=True)
        ]
    return "".join([*parts, "</svg>"])


def _drawn(value: float) -> float:
    """Return where on its axis a number is drawn."""
    return 0.0 if abs(value) < 1 / _MOST else max(-_MOST, min(value, _MOST))


def _thinned(points: Points, most: int) -> Points:
    stride = -(-len(points) // max(most, 1))
    return points if stride < 2 else [*points[:-1:stride], points[-1]]


def _scale(
    ticks: Sequence[float], first: float, last: float, by: Callable[[float], float] = float
) -> Callable[[float], float]:
    low, high = by(ticks[0]), by(ticks[-1])
    return lambda value: first + (by(value) - low) / (high - low) * (last - first)


def _powers(values: Sequence[float]) -> list[float]:
    """Return powers of ten, from below the least value to above the greatest, at most seven."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    stride = -(-(last - first) // 6)
    return [10.0**power for power in range(first, last + stride, stride)]


def _ticks(values: Sequence[float]) -> list[float]:
    """Return three to seven round numbers, from below the least value to above the greatest."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]
