"""What ``python -m benchmarks ps`` has everybody do: variables, steps, and how long a turn of them is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

#: The learning rate, and what a gradient is: half of the variable, so that each step reads all of it.
RATE, SLOPE = 1e-3, 0.5


class Work(NamedTuple):
    """One kind of step.

    Attributes
    ----------
    title : str
        In tables.
    elements : tuple of int
        Of its variables, float32.
    computes : bool
        Whether a gradient is made from the variable's values; else it is ready, and the step only pulls and pushes.
    rule : str
        ``"plain"`` for SGD without momentum, or a name of `update_rules.RULES`.
    """

    title: str
    elements: tuple[int, ...]
    computes: bool = True
    rule: str = "plain"

    @property
    def nbytes(self) -> int:
        """Of all its variables."""
        return 4 * sum(self.elements)


ONE, LARGE = "1 float", "4 MB"
MOMENTUM, ADAM = "1 float, momentum", "1 float, Adam"
MANY, SAME = "200 variables of 1 KB", "1 variable of 200 KB"
MODEL = "64 MB"

#: By title.  The last is a model of layers of three sizes, 64 MB in all.
WORKS = {
    work.title: work
    for work in (
        Work(ONE, (1,)),
        Work(MOMENTUM, (1,), rule="sgd"),
        Work(ADAM, (1,), rule="adam"),
        Work(LARGE, (1 << 20,)),
        Work(MANY, (256,) * 200, computes=False),
        Work(SAME, (256 * 200,), computes=False),
        Work(MODEL, (1 << 19,) * 16 + (1 << 18,) * 16 + (1 << 16,) * 64, computes=False),
    )
}

#: Steps of the first try, from which is worked out how many make a turn.
_FEWEST = 8


def timed(run: Callable[[int], None], seconds: float) -> tuple[float, int]:
    """Return the seconds of a step, and how many were made, in a turn of about so many seconds.  Local.

    Parameters
    ----------
    run : callable
        Makes so many steps, and returns when all are done.
    seconds : float
    """
    steps, took = _FEWEST, 0.0
    made = 0
    while True:
        start = time.perf_counter()
        run(steps)
        took = time.perf_counter() - start
        made += steps
        if took >= seconds / 4:
            break
        steps = int(steps * min(16.0, max(2.0, 0.3 * seconds / max(took, 1e-9))))
    steps = max(_FEWEST, int(steps * seconds / took))
    start = time.perf_counter()
    run(steps)
    return (time.perf_counter() - start) / steps, made + steps
