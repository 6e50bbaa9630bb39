"""Sizes and times as tables and pages show them: three digits."""

from __future__ import annotations


def show_bytes(number: float) -> str:
    """Return ``1.5 KB``, ``100 MB``: three digits, powers of ten."""
    return _shown(number, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)), "B")


def show_seconds(number: float) -> str:
    """Return ``1.5 ms``, ``20 us``: three digits."""
    return _shown(number, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)), "ns", 1e-9)


def _shown(number: float, units: tuple[tuple[str, float], ...], smallest: str, scale: float = 1.0) -> str:
    for name, factor in units:
        if number >= 0.9995 * factor:
            return f"{_three_digits(number / factor)} {name}"
    return f"{_three_digits(number / scale)} {smallest}"


def _three_digits(number: float) -> str:
    """Return a number with three digits, and no zeros behind the point."""
    if number >= 999.5:
        return f"{number:.0f}"
    text = f"{number:.3g}"
    return text if "e" not in text else f"{number:.3f}"
