"""Sizes, times and rates as people write them on a command line, and tables."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from mpidist.reporting.quantities import show_bytes as show_bytes
from mpidist.reporting.quantities import show_seconds as show_seconds

if TYPE_CHECKING:
    from mpidist.schedules.cost import Level

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/]*)\s*")

_BYTES = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "K": 2**10, "M": 2**20, "G": 2**30}
_SECONDS = {"": 1, "h": 3600, "m": 60, "s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_RATES = {"B/s": 1, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
_RATES |= {"bit/s": 1 / 8, "Kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}


def count(text: str) -> int:
    """Return a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def nbytes(text: str) -> int:
    """Return a number of bytes: ``4096``, ``100MB`` (10^6), ``64KiB`` or ``64K`` (2^10)."""
    return round(_scaled(text, _BYTES, "a size such as 4096, 100MB or 64KiB"))


def seconds(text: str) -> float:
    """Return a time in seconds: ``600ns``, ``2us``, ``0.5``, ``5m``, ``2h``."""
    return _scaled(text, _SECONDS, "a time such as 600ns, 2us, 0.5 or 5m")


def duration(text: str) -> float:
    """Return a time in seconds that is more than none."""
    found = seconds(text)
    if found == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time above 0")
    return found


def seconds_per_byte(text: str) -> float:
    """Return the reciprocal of a rate such as ``25GB/s`` or ``200Gbit/s``; a plain number is seconds a byte."""
    expected = "a rate such as 25GB/s or 200Gbit/s, or seconds a byte"
    if "/" not in text:
        return _scaled(text, {"": 1}, expected)
    rate = _scaled(text, _RATES, expected)
    if rate == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}, above 0")
    return 1 / rate


def _scaled(text: str, units: dict[str, float], expected: str) -> float:
    match = _NUMBER.fullmatch(text)
    found = float(match[1]) * units[match[2]] if match and match[2] in units else math.inf
    if found == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
    return found


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Return rows of text as columns, those of the numbers `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = ["<" if place in left else ">" for place in range(len(widths))]
    cells = "  ".join(f"{{:{align}{width}}}" for align, width in zip(aligns, widths, strict=True))
    return "\n".join(cells.format(*row).rstrip() for row in rows)


def show_level(level: Level) -> str:
    """Return the figures of a level as text."""
    rate = f"{show_bytes(1 / level.beta)}/s" if level.beta else "no seconds a byte"
    points = f" beyond {len(level.exchange)} measured points" if level.exchange else ""
    return f"{show_seconds(level.alpha)} a message, {rate}{points}"
