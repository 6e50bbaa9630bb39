"""How much of a test's grid is run: a part that has each value once, or, by `make test-all`, all of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


def grid(always: Sequence[Any], with_every_grid: Sequence[Any]) -> list[Any]:
    """Return the cases to run: those of the second list too where EVERY_GRID is set."""
    return [*always, *(with_every_grid if os.environ.get("EVERY_GRID") else ())]
