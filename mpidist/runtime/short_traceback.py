"""Make a traceback short: where a program called mpidist is news, the way inside to an error of its own is not."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_FRAME = re.compile(r'  File "(.+)", line \d+')
_BEGIN = "Traceback (most recent call last):"
_ERROR = "mpidist.errors."

#: The folder of the package, with which the paths of its files begin.
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def shorten(lines: Sequence[str], package: str = _PACKAGE) -> list[str]:
    """Return the lines of tracebacks without the frames in which mpidist raises an error of its own (Local, pure).

    Of every traceback that ends with such an error, the frames after the program's last one give way to a line that
    says how many there were.  Other tracebacks stay as they are.
    """
    short: list[str] = []
    rest = list(lines)
    while _BEGIN in rest:
        begin = rest.index(_BEGIN) + 1
        end = next((place for place in range(begin, len(rest)) if not rest[place].startswith(" ")), len(rest))
        frames = rest[begin:end]
        if end < len(rest) and rest[end].startswith(_ERROR):
            frames = _without_last(frames, package)
        short += [*rest[:begin], *frames]
        rest = rest[end:]
    return short + rest


def _without_last(lines: list[str], package: str) -> list[str]:
    """Return the lines of frames without the last ones, as far as they are in `package`."""
    begins = [place for place, line in enumerate(lines) if _FRAME.match(line)]
    paths = [match[1] for match in map(_FRAME.match, lines) if match]
    outside = [place for place, path in enumerate(paths) if not path.startswith(package)]
    inside = len(paths) - 1 - outside[-1] if outside else 0
    if inside < 2:  # nothing to win, or a program that is all mpidist's own
        return lines
    return [*lines[: begins[-inside]], f"  ... {inside} frames inside mpidist"]
