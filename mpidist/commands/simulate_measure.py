"""``mpidist simulate --measure``: calibrates the ranks of this launch, predicts schedules, and measures them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mpidist.collectives.communicator import Communicator
from mpidist.commands.machine import machine
from mpidist.commands.quantities import show_bytes, show_level, show_seconds, table
from mpidist.errors import MpidistError
from mpidist.schedules.comparison import candidates
from mpidist.schedules.cost import CostModel
from mpidist.schedules.simulator import simulate
from mpidist.tuning.calibration import Levels, Stopwatch
from mpidist.world import world_communicator

#: Sizes in bytes of the buffers.
SIZES = tuple(1 << power for power in range(10, 25, 2))

#: What the prediction may be off by.
TARGET = 0.15

#: How much of a time half of the turns may take at most before all is measured again.
_STEADY = 1.1


@dataclass(frozen=True)
class Comparison:
    """One schedule on one size of buffer: seconds by the model, and as measured."""

    algorithm: str
    bytes: int
    predicted: float
    measured: float

    @property
    def deviation(self) -> float:
        """How far the prediction is off, relative to what was measured."""
        return self.predicted / self.measured - 1


def measure(as_json: bool, most_bytes: int) -> int:
    """Calibrate, predict, measure sizes up to `most_bytes`, and print; return the exit status.  Collective."""
    try:
        communicator = world_communicator()
    except MpidistError as error:
        print(f"mpidist simulate: {error}", file=sys.stderr)
        return 1
    if communicator.size == 1:
        cure = "mpidist run -n 2 -m mpidist simulate --measure"
        print(f"mpidist simulate: --measure needs ranks: {cure}", file=sys.stderr)
        return 2
    model, found = compared(communicator, [size for size in SIZES if size <= most_bytes] or SIZES[:1])
    if communicator.rank == 0:
        print((_as_json if as_json else _page)(communicator, model, found))
    return 0


def compared(communicator: Communicator, sizes: Sequence[int] = SIZES) -> tuple[CostModel, list[Comparison]]:
    """Return the calibrated model, and every schedule on every size, predicted and measured.  Collective."""
    topology, schedules = communicator.topology, candidates("all_reduce", communicator.topology)
    levels, measured = Levels(Stopwatch(communicator), max(sizes)), {}
    for nbytes in (sizes[0], *sizes):  # the first of a launch is slow, and measured again
        runs = {schedule.name: levels.play(schedule, nbytes) for schedule in schedules}
        measured[nbytes] = levels.measure([nbytes // 2, nbytes], runs, _STEADY).seconds
    model, comparisons = levels.model(), []
    for nbytes, seconds in measured.items():
        for schedule in schedules:
            predicted = simulate(schedule, topology.size, nbytes, model, topology).seconds
            comparisons.append(Comparison(schedule.name, nbytes, predicted, seconds[schedule.name]))
    return model, comparisons


# -- what is printed ---------------------------------------------------------------------------------------------------


def _page(communicator: Communicator, model: CostModel, found: Sequence[Comparison]) -> str:
    topology = communicator.topology
    lines = [f"schedules on {topology.describe()}, predicted and measured in one launch"]
    if max(topology.local_size_of) > 1:
        lines.append(f"inside    {show_level(model.intra)}")
    if topology.node_count > 1:
        lines.append(f"between   {show_level(model.inter)}")
    return "\n".join([*lines, "", comparison_table(found), verdict(found, _is_crowded(communicator))])


def comparison_table(found: Sequence[Comparison]) -> str:
    """Return a line a size and schedule."""
    rows = [["algorithm", "bytes", "predicted", "measured", "deviation"]]
    for each in found:
        seconds = [show_seconds(each.predicted), show_seconds(each.measured)]
        rows.append([each.algorithm, show_bytes(each.bytes), *seconds, f"{100 * each.deviation:+.0f} %"])
    return table(rows)


def verdict(found: Sequence[Comparison], crowded: bool) -> str:
    """Return one line: how many predictions are on target, and which one is the worst."""
    close = sum(abs(each.deviation) <= TARGET for each in found)
    worst = max(found, key=lambda each: abs(each.deviation))
    where = f"{worst.algorithm} of {show_bytes(worst.bytes)}"
    text = f"{close} of {len(found)} within {TARGET:.0%}, the worst off by {worst.deviation:+.0%} ({where})"
    return f"{text}; ranks outnumber cores, so no prediction is meant to hold" if crowded else text


def _is_crowded(communicator: Communicator) -> bool:
    return communicator.control.pause is not None


def _as_json(communicator: Communicator, model: CostModel, comparisons: Sequence[Comparison]) -> str:
    return json.dumps(
        {
            "command": ["run", "-n", str(communicator.size), "-m", "mpidist", *sys.argv[1:]],
            "machine": {"mpi": communicator.transport.library, **machine()},
            "ranks": communicator.size,
            "topology": communicator.topology.describe(),
            "oversubscribed": _is_crowded(communicator),
            "model": asdict(model),
            "target": TARGET,
            "verdict": verdict(comparisons, _is_crowded(communicator)),
            "comparisons": [{**asdict(each), "deviation": each.deviation} for each in comparisons],
        },
        indent=2,
    )
