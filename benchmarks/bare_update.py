"""What a sharded update takes without anything around it: the limit that `apply_gradients` is held against.

    mpidist run -n 2 -m benchmarks.bare_update --json bare_update.json

Gradients go through shared segments (`bare_segments.py`, *shares* and *direct*): each rank adds up its part, updates
its part of the parameters by it in blocks that stay in cache, and puts the new parameters where the others copy them
from.  Nothing is checked, and parameters and slots are flat arrays.  Beside it, in the loop of ``step``:
`apply_gradients`, a reduction followed by a textbook's update, and the update in blocks alone.  `--json` adds the
launch to a file, which ``python -m benchmarks show`` reads.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from benchmarks.bare_segments import Pairs, Segments, launch, write
from benchmarks.suite import step
from benchmarks.suite.measured import Measured, show
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.rows import all_reduce_factor
from benchmarks.suite.tensor_lists import shapes_of
from benchmarks.suite.tensors import TensorList
from benchmarks.suite.turns import Budget
from benchmarks.suite.update_rules import BLOCK, RULES, Rule

#: How, and in segments of how many KiB.
WAYS = (("direct", 512), ("direct", 1024), ("shares", 512))


class BareSharded(step.Update):
    """The sharded update through segments of `kib` KiB."""

    kind = "reference"

    def __init__(self, ranks: Ranks, tensors: TensorList, rule: Rule, how: str, kib: int) -> None:
        super().__init__(ranks, tensors, rule)
        self.name = f"bare, {how}, {kib} KiB"
        self._segments = (Pairs if how == "direct" else Segments)(ranks, tensors, kib)
        self._sums = numpy.empty(self._segments.step, tensors.dtype)
        self._flat = numpy.ones(tensors.elements, tensors.dtype)
        self._slots = [numpy.zeros_like(self._flat) for _ in range(rule.slots)]  # used where this rank owns
        self._scratch = [numpy.zeros(BLOCK, tensors.dtype) for _ in range(rule.scratch)]
        self._step = 0

    @property
    def parameters(self) -> list[Any]:
        return self.tensors.cut(self._flat)

    def prepare(self, gradients: list[Any]) -> Any:
        return self._segments.parts(super().prepare(gradients))

    def run(self, prepared: Any) -> Any:
        self._step += 1
        if isinstance(self._segments, Pairs):
            self._segments.directly(prepared, lambda start, stop: self._sums[: stop - start], self._update, self._take)
        else:
            self._segments.in_shares(prepared, self._update, self._take)

    def _update(self, start: int, values: Any) -> None:
        span = slice(start, start + len(values))
        mine, slots = self._flat[span], [each[span] for each in self._slots]
        self._rule.in_blocks(mine, values, slots, self._scratch, self._step)
        values[...] = mine

    def _take(self, start: int, values: Any) -> None:
        self._flat[start : start + len(values)] = values


def main() -> None:
    """Measure; rank 0 prints.  Collective."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each optimizer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ranks, measured = Ranks(), Measured()
    tensors = TensorList(shapes_of("resnet50"), "float32", ranks.rank, ranks.size)
    budget, factor = Budget(options.seconds, options.rounds), all_reduce_factor(ranks.size)
    for name, rule in RULES.items():
        makers = [*step.makers(rule, False), *(partial(BareSharded, rule=rule, how=how, kib=kib) for how, kib in WAYS)]
        show(measured.add(f"resnet50 {name}", makers, tensors, ranks, budget, step.REFERENCE, factor), ranks)
    ranks.say(f"# cache mode: {ranks.probe.describe()}")
    if options.json is not None and ranks.rank == 0:
        write(options.json, launch("step", ranks, measured, ["benchmarks/bare_update.py"]))


if __name__ == "__main__":
    main()
