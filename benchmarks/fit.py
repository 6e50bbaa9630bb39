"""What `Trainer.fit` costs: against a loop by hand on the same ranks, and on several ranks against one.

    mpidist run -n 1 benchmarks/fit.py --save results            # the step on one rank, written down
    mpidist run -n 2 benchmarks/fit.py --save results            # on two ranks, and how much faster that is

Two models: one of 5 ms of compute a step on one rank, of which each of n ranks has an n-th, and one that computes
nothing, whose gradients are ready.  Per model: seconds of a step by hand (`strategy.run` of a function that calls
`apply_gradients`), seconds of a step in `fit`, and the difference in microseconds.  By hand and in `fit` take turns,
and medians over the rounds are shown, of the slowest rank in each, so that a machine whose speed drifts favours none.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores among them; before NumPy is loaded

import argparse  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy  # noqa: E402

import mpidist  # noqa: E402
from mpidist.commands.machine import machine  # noqa: E402

#: Rows of a global batch, inputs, and shapes of the variables: 0.9 MB of float32 in 20 arrays.
BATCH, INPUTS, LAYERS = 256, 64, 10
SHAPES = [(INPUTS, INPUTS) if number % 2 == 0 else (INPUTS,) for number in range(2 * LAYERS)]
COMPUTE_SECONDS = 0.005
ROUNDS = 15

Row = dict[str, Any]


class Job:
    """A model, its data, and the two ways to train it.

    Parameters
    ----------
    strategy : Strategy
    repetitions : int
        How often a step computes the same: sets how long it takes, a time in proportion to the rows.
    steps : int
        Of an epoch.
    """

    def __init__(self, strategy: Any, repetitions: int, steps: int) -> None:
        self.strategy, self.repetitions, self.steps = strategy, repetitions, steps
        random = numpy.random.default_rng(0)
        rows = random.normal(size=(BATCH * steps, INPUTS)).astype("float32")
        self.data = mpidist.data.Dataset.from_arrays((rows, rows)).batch(BATCH)
        with strategy.scope():
            self.variables = [mpidist.Variable(random.normal(0, 0.1, shape).astype("float32")) for shape in SHAPES]
            self.optimizer = mpidist.optimizers.SGD(0.0)
        self.gradients = [numpy.ones(shape, "float32") for shape in SHAPES]
        self.trainer = mpidist.Trainer(self.value_and_grad, self.variables, self.optimizer)
        self.batches = strategy.experimental_distribute_dataset(self.data)
        self.parameters = [variable.value for variable in self.variables]

    def value_and_grad(self, parameters: Any, x: Any, y: Any) -> tuple[float, list[Any]]:
        """Compute, and return gradients that are ready: what is measured does not depend on their values."""
        for number in range(self.repetitions):
            x = numpy.tanh(x @ parameters[number % LAYERS * 2])
        return 1.0, self.gradients

    def train_step(self, batch: Any) -> float:
        """Make a step by hand."""
        loss, gradients = self.value_and_grad(self.parameters, *batch)
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))
        return loss

    def by_hand(self) -> None:
        """Train an epoch by hand."""
        for batch in self.batches:
            self.strategy.run(self.train_step, args=(batch,))

    def by_fit(self) -> None:
        """Train an epoch with `fit`."""
        self.trainer.fit(self.batches, verbose=0)


def main() -> None:
    """Measure both models, and compare with one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the times there, and compare with one rank's")
    options = parser.parse_args()
    strategy = mpidist.MultiWorkerMirroredStrategy()
    alone = options.save / "fit-1.json" if options.save else None
    before = json.loads(alone.read_text())["rows"][0] if alone is not None and alone.exists() else None
    if strategy.num_replicas_in_sync == 1:
        before = None
    count = repetitions(strategy) if before is None else before["repetitions"]
    rows = [measured("compute of 5 ms", Job(strategy, count, steps=80)), measured("no compute", Job(strategy, 0, 400))]
    if strategy.extended.replica_id == 0:
        report(rows, strategy.num_replicas_in_sync, before)
        if options.save:
            save(options.save, rows, strategy.num_replicas_in_sync)


def repetitions(strategy: Any) -> int:
    """Return how often to compute so that one rank takes as long as it should; the chief's answer.  Collective."""
    job = Job(mpidist.OneDeviceStrategy("/cpu:0"), 10, steps=1)
    (x, y), seconds = next(iter(job.data)), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        job.value_and_grad(job.parameters, x, y)
        seconds.append(time.perf_counter() - start)
    found = max(1, round(10 * COMPUTE_SECONDS / float(numpy.median(seconds))))
    return int(strategy.gather(numpy.array([found]), axis=0)[0])


def measured(name: str, job: Job) -> Row:
    """Return a model's seconds a step.  Collective."""
    times: dict[str, list[float]] = {"by_hand": [], "fit": []}
    for round_ in range(ROUNDS + 2):
        for key, run in (("by_hand", job.by_hand), ("fit", job.by_fit)):
            seconds = slowest(job.strategy, run) / job.steps
            if round_ >= 2:  # the first two warm up
                times[key].append(seconds)
    more = numpy.median(numpy.array(times["fit"]) - numpy.array(times["by_hand"]))
    row = {key: float(numpy.median(values)) for key, values in times.items()}
    return {"model": name, "repetitions": job.repetitions, **row, "more_us": float(more) * 1e6}


def slowest(strategy: Any, run: Callable[[], None]) -> float:
    """Return the seconds that the slowest rank takes.  Collective."""
    strategy.reduce("sum", numpy.zeros(1), axis=None)
    start = time.perf_counter()
    run()
    mine = numpy.array([time.perf_counter() - start])
    return float(strategy.gather(mine, axis=0).max())


def report(rows: list[Row], ranks: int, before: Row | None) -> None:
    """Print the table, and how much faster than one rank it is."""
    print(f"{ranks} ranks, {os.cpu_count()} cores")
    print(f"{'model':>16} {'by hand (ms)':>13} {'fit (ms)':>9} {'more (us)':>10}")
    for row in rows:
        print(f"{row['model']:>16} {row['by_hand'] * 1e3:>13.3f} {row['fit'] * 1e3:>9.3f} {row['more_us']:>10.1f}")
    if before is not None:
        print(f"fit on {ranks} ranks is {before['fit'] / rows[0]['fit']:.2f} times as fast as on one")


def save(folder: Path, rows: list[Row], ranks: int) -> None:
    """Write the rows, with what they were measured on."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"machine": {"ranks": ranks, **machine()}, "rows": rows}
    (folder / f"fit-{ranks}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
