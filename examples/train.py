"""Train a classifier of handwritten digits on as many ranks as there are.

The same script runs alone and on many ranks; the numbers are the same:

    python examples/train.py
    mpirun -n 8 python examples/train.py
    srun --mpi=pmix python examples/train.py      (with MPICH: --mpi=pmi2)

With --checkpoint DIR --resume a job that is told to end (SIGTERM, SIGUSR1) saves, leaves DIR/requeue for its batch
script, and exits with 42.  The same command goes on from there.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores among them; before NumPy is loaded

import argparse  # noqa: E402
import importlib  # noqa: E402
import math  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import digits  # noqa: E402
import display  # noqa: E402
import numpy  # noqa: E402

import mpidist  # noqa: E402

STRATEGIES: dict[str, Callable[[str], mpidist.Strategy]] = {
    "default": lambda device: mpidist.get_strategy(),
    "one_device": lambda device: mpidist.OneDeviceStrategy(f"/{device}:0"),
    "mirrored": lambda device: mpidist.MirroredStrategy(),
    "multi_worker": lambda device: mpidist.MultiWorkerMirroredStrategy(),
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="multi_worker")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="gpu: the arrays are CuPy's")
    parser.add_argument("--model", choices=["cnn", "mlp"], help="default: cnn, which needs autograd; mlp on a GPU")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=128, help="rows of a global batch, over all ranks together")
    parser.add_argument("--checkpoint", metavar="DIR", help="save a checkpoint there after every epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint; save when told to end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", type=int, default=0, help="which rows are kept for the test")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps; 0: after all epochs")
    parser.add_argument("--save-parameters", metavar="FILE", help="write the trained parameters to a .npz file")
    parser.add_argument("--report", metavar="DIR", help="write DIR/report.html, a page about the training")
    arguments = parser.parse_args(argv)
    arguments.model = arguments.model or ("cnn" if arguments.device == "cpu" else "mlp")
    if (arguments.device, arguments.model) == ("gpu", "cnn"):
        parser.error("--device gpu needs --model mlp: autograd, which differentiates the cnn, knows no CuPy arrays")
    if arguments.resume and not arguments.checkpoint:
        parser.error("--resume needs --checkpoint DIR")
    return arguments


class Training:
    """A model, its optimizer, and this replica's part of the data."""

    def __init__(self, arguments: argparse.Namespace, strategy: Any) -> None:
        self.arguments, self.strategy = arguments, strategy
        self.handler: Any = None
        self.rows_trained, self.seconds = 0, 0.0  # of this rank; those of an epoch in which it computes
        self.model = importlib.import_module(arguments.model)
        is_on_gpu = arguments.device == "gpu"
        if is_on_gpu and "GPU" not in strategy.extended.device_name:
            raise SystemExit(
                f"--device gpu: strategy {arguments.strategy} works on {strategy.extended.device_name}: this rank sees "
                "no GPU, or has no CuPy (`mpidist info` tells); and the default strategy has none"
            )
        library = importlib.import_module("cupy" if is_on_gpu else "numpy")
        self.input_options = mpidist.InputOptions() if is_on_gpu else None  # with these, batches are copied to the GPU
        self.train_rows, self.test_rows = digits.load(arguments.split)
        numbered = (*self.train_rows, numpy.arange(len(self.train_rows.images)))
        dataset = mpidist.data.Dataset.from_arrays(numbered).shuffle(seed=arguments.seed).batch(arguments.batch_size)
        self.batches = strategy.experimental_distribute_dataset(dataset, self.input_options)
        with strategy.scope():
            first = self.model.initial(arguments.seed)
            self.variables = {name: mpidist.Variable(library.asarray(first[name]), name=name) for name in first}
            self.optimizer = mpidist.optimizers.SGD(self.learning_rate, momentum=0.9)

    def learning_rate(self, step: int) -> float:
        """Half a cosine, from the model's rate to 0 after the last epoch."""
        done = step / (self.arguments.epochs * len(self.batches))
        rate: float = self.model.LEARNING_RATE
        return rate * (1 + math.cos(math.pi * min(done, 1))) / 2

    def parameters(self) -> list[Any]:
        return [variable.value for variable in self.variables.values()]

    def train_step(self, batch: Any) -> Any:
        """Run once per replica, on that replica's part of the batch; returns its share of the loss."""
        images, labels, rows = batch
        self.rows_trained += len(rows)
        began = time.perf_counter()
        if self.model.SHIFTS:
            images = digits.shifted(images, self.moves()[rows])
        loss, gradients = self.model.value_and_grad(self.parameters(), images, labels, self.arguments.batch_size)
        self.seconds += time.perf_counter() - began
        self.optimizer.apply_gradients(zip(gradients, self.variables.values(), strict=True))
        return loss

    def moves(self) -> Any:
        """How far each training image moves in this epoch: alike on however many ranks it is trained."""
        random = numpy.random.default_rng((self.arguments.seed, self.batches.epoch))
        return random.integers(0, 3, (len(self.train_rows.images), 2))

    def train_epoch(self) -> float:
        """Go through the training rows, or what is left of them after a restart; returns the mean loss."""
        loss, steps = numpy.float32(0), 0
        for batch in self.batches:
            loss += self.strategy.run(self.train_step, args=(batch,))
            steps += 1
            if self.handler is not None:  # the step is over, and the next batch not yet taken out of the data set
                self.handler.save_checkpoint_if_preempted()
            if self.is_stopped():
                break
        return float(self.strategy.reduce("sum", loss, axis=None)) / max(steps, 1)

    def slowest(self) -> str:
        """Return which rank has computed for longer than the others, since the last call; "" on GPUs.  Collective."""
        if self.arguments.device == "gpu":
            return ""  # a step only enqueues the GPU's work, so its time on the host does not tell
        seconds, self.seconds = self.seconds, 0.0
        return display.slowest(self.strategy.gather(numpy.array([seconds]), axis=0))

    def is_stopped(self) -> bool:
        """Return whether the number of steps asked for has been made."""
        return self.optimizer.iterations == (self.arguments.steps or -1)

    def checkpoints(self) -> Any:
        """Return the manager of the checkpoints, None if there shall be none."""
        if not self.arguments.checkpoint:
            return None
        parts = {"model": self.variables, "optimizer": self.optimizer, "dataset": self.batches}
        return mpidist.CheckpointManager(mpidist.Checkpoint(**parts), self.arguments.checkpoint)

    def resume(self, manager: Any) -> Any:
        """Go on from the newest checkpoint, and return its path, or None; save and exit when the job is told to end."""
        self.handler = mpidist.experimental.PreemptionCheckpointHandler(self.strategy.cluster_resolver, manager)
        self.handler.steps_fn = lambda: self.optimizer.iterations  # the number of its checkpoint, as of all others
        return self.handler.restored

    def test_accuracy(self) -> float:
        """Return the share of test rows that are classified correctly, each rank looking at its part."""
        dataset = mpidist.data.Dataset.from_arrays(tuple(self.test_rows)).batch(len(self.test_rows.images))
        correct = 0
        for images, labels in self.strategy.experimental_distribute_dataset(dataset, self.input_options):
            scores = self.model.logits(self.parameters(), images)
            correct += int((scores.argmax(axis=1) == labels.argmax(axis=1)).sum())
        return int(self.strategy.reduce("sum", correct, axis=None)) / len(self.test_rows.images)


def save_parameters(path: str, variables: dict[str, Any]) -> None:
    """Write the values to a .npz file."""
    with open(path, "wb") as file:
        numpy.savez(file, **{name: variable.numpy() for name, variable in variables.items()})


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    strategy = STRATEGIES[arguments.strategy](arguments.device)
    training = Training(arguments, strategy)
    is_chief = strategy.extended.replica_id == 0
    ranks = display.who_is_who(strategy)
    if is_chief:
        display.print_table(ranks)
        per_replica = math.ceil(arguments.batch_size / strategy.num_replicas_in_sync)
        print(f"global batch {arguments.batch_size} rows, {per_replica} per replica", flush=True)
    report = mpidist.callbacks.Report(arguments.report) if arguments.report else None
    if report is not None:
        report.begin(strategy, training.variables.values())
    manager = training.checkpoints()
    if arguments.resume:
        restored = training.resume(manager)
        if is_chief:
            print(f"resumed from {restored}" if restored else "no checkpoint yet: starting anew", flush=True)

    start, rows, steps = time.perf_counter(), len(training.train_rows.images), training.optimizer.iterations
    with display.Progress(arguments.epochs, rows, arguments.batch_size, steps, is_chief) as progress:
        while training.batches.epoch < arguments.epochs and not training.is_stopped():
            epoch, loss = training.batches.epoch, training.train_epoch()
            progress.show(training.optimizer.iterations, loss, training.slowest())
            if report is not None:
                report.note(epoch, training.optimizer.iterations, training.rows_trained, {"loss": loss})
            if manager is not None:
                manager.save(training.optimizer.iterations)
    seconds = time.perf_counter() - start

    page = report.end() if report is not None else None
    accuracy = training.test_accuracy()
    if is_chief:
        if arguments.save_parameters:
            save_parameters(arguments.save_parameters, training.variables)
        steps, replicas = training.optimizer.iterations, strategy.num_replicas_in_sync
        result = [("model", arguments.model), ("replicas", replicas), ("steps", steps), ("seconds", f"{seconds:.1f}")]
        display.print_table([*result, ("test accuracy", f"{accuracy:.4f}")], gap=" ")
        if crowd := display.shared_cores(ranks, os.cpu_count() or 1):
            print(crowd)
        if page is not None:
            print(f"report: {page}")


if __name__ == "__main__":
    main()
