"""``gpu-steps``: training steps of PyTorch models, by mpidist's `DistributedDataParallel` and by PyTorch's over NCCL.

Every contender trains a copy of the model on batches of its own rank, by SGD with momentum.  They take turns of some
steps, timed by CUDA's events.  Those of mpidist have settled by then whether sums begin in the backward pass.  With
``--device cpu`` the host computes and Gloo is the peer: to try the benchmark, not to measure.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy

from benchmarks.suite import gpu
from benchmarks.suite.measured import Measured, show
from benchmarks.suite.ranks import Ranks, imported
from benchmarks.suite.rows import row_of
from mpidist.commands.quantities import count
from mpidist.errors import MissingDependencyError

WHAT = "training steps of PyTorch models on GPUs, against DistributedDataParallel over NCCL"

#: By name, as ``benchmarks/torch_models.py`` makes them; the last one is for trials.
MODELS = ("resnet50", "gpt", "tiny")

OURS, AFTER, SUMS = "mpidist", "mpidist, all after the pass", "mpidist, the sums alone"
STOCK, VIEWS, BARE = "DDP", "DDP, bucket views", "no communication"

#: Steps before any is timed, with a wait behind each group: mpidist times some of both kinds, and agrees twice.
_WARM_UPS = 3 * (6,)

#: What a gradient may be off, by the largest of its tensor and of all: convolutions are rounded to 10 bits.
_OF_TENSOR, _OF_ALL = 5e-2, 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this subcommand takes."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS[:2]), help="default: all but tiny")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu is for trials, with Gloo")
    parser.add_argument("--steps", type=count, default=3, metavar="N", help="of a turn")


def check(options: argparse.Namespace) -> None:
    """Raise MissingDependencyError, before ranks are started, where there is nothing to measure.  Local."""
    if options.device == "gpu":
        gpu.check(options)


def measure(options: argparse.Namespace, ranks: Ranks) -> Measured:
    """Measure in this launch.  Collective."""
    torch = imported("torch", "it needs PyTorch: pip install torch", ranks)
    device = _device(torch, options.device, ranks)
    measured = Measured()
    measured.machine = _facts(torch, device)
    ranks.say(f"# {', '.join(f'{name} {value}' for name, value in measured.machine.items())}")
    problem = _process_group(torch, device, ranks)
    if problem:
        measured.missing |= {STOCK: problem, VIEWS: problem}
        ranks.say(f"# without {STOCK}: {problem}")
    try:
        for name in options.models:
            _measure_model(name, Trial(torch, device, ranks, options), measured, not problem)
    finally:
        with suppress(Exception):  # there may be none
            torch.distributed.destroy_process_group()
    return measured


def _device(torch: Any, asked: str, ranks: Ranks) -> Any:
    import mpidist.torch

    if asked == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = mpidist.torch.device()
    problem = ranks.first_problem("" if device.type == "cuda" else "PyTorch sees no GPU; --device cpu tries it without")
    if problem:
        raise MissingDependencyError(problem)
    return device


def _facts(torch: Any, device: Any) -> dict[str, Any]:
    found = {"PyTorch": torch.__version__, "device": device.type}
    if device.type == "cuda":
        found |= gpu.facts(importlib.import_module("cupy")) | {
            "PyTorch's NCCL": ".".join(map(str, torch.cuda.nccl.version()))
        }
    return found


def _process_group(torch: Any, device: Any, ranks: Ranks) -> str:
    """Make PyTorch's process group; return why it cannot be used, empty where it can.  Collective."""
    from benchmarks.peers.torch import started

    problem = ""
    try:
        started(ranks, "nccl" if device.type == "cuda" else "gloo")
        ones = torch.ones(1, device=device)
        torch.distributed.all_reduce(ones)
        if float(ones) != ranks.size:
            problem = f"its sum of {ranks.size} ones is {float(ones)}"
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ranks.first_problem(problem)


class Trial:
    """What all models are measured with."""

    def __init__(self, torch: Any, device: Any, ranks: Ranks, options: argparse.Namespace) -> None:
        self.torch, self.device, self.ranks = torch, device, ranks
        self.steps, self.seconds, self.rounds = options.steps, options.seconds or 8.0, options.rounds or 30

    def synchronize(self) -> None:
        """Wait for the device.  Local."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def turn(self, step: Callable[[], None]) -> float:
        """Return the seconds of one of some steps, on the slowest rank.  Collective."""
        self.synchronize()
        self.ranks.comm.Barrier()
        return self.ranks.slowest(self._spent(step)) / self.steps

    def _spent(self, step: Callable[[], None]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(self.steps):
                step()
            return time.perf_counter() - start
        begun, ended = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(self.steps):
            step()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    def turns(self, contenders: Sequence[Steps]) -> dict[str, list[float]]:
        """Return the seconds of a step in each turn of each contender.  Collective."""
        for each in contenders:
            for steps in _WARM_UPS:
                for _ in range(steps):
                    each.step()
                self.synchronize()
        cost = sum(self.turn(each.step) for each in contenders) * self.steps
        rounds = max(3, min(self.rounds, int(self.seconds / max(cost, 1e-6))))
        found: dict[str, list[float]] = {each.name: [] for each in contenders}
        for number in range(rounds):
            for place in range(len(contenders)):
                each = contenders[(number + place) % len(contenders)]
                found[each.name].append(self.turn(each.step))
                each.note()
        return found


class Steps:
    """A contender: trains a model of its own, which `wrap` distributes."""

    def __init__(self, name: str, kind: str, trial: Trial, case: Any, wrap: Callable[[Any], Any] | None = None) -> None:
        self.name, self.kind, self._trial = name, kind, trial
        self._x, self._y = case.x, case.y
        self.bare = copy.deepcopy(case.model)
        self.is_reduced = wrap is not None
        self._model = self.bare if wrap is None else wrap(self.bare)
        self._optimizer = trial.torch.optim.SGD(self.bare.parameters(), lr=1e-3, momentum=0.9)
        self.overlapped: list[bool] = []

    def step(self) -> None:
        """Make one step.  Collective, where it is distributed."""
        self.backward()
        self._optimizer.step()

    def backward(self) -> None:
        """Make gradients."""
        self._optimizer.zero_grad()
        self._trial.torch.nn.functional.cross_entropy(self._model(self._x), self._y).backward()

    def note(self) -> None:
        """Take note whether the sums of the last step began in its pass."""
        self.overlapped.append(getattr(self._model, "has_overlapped", False))

    def gradients(self) -> list[Any]:
        """Return the gradients on the host."""
        return [each.grad.detach().cpu().numpy() for each in self.bare.parameters()]


class SumsAlone:
    """A contender: a backward pass that has its gradients already, and so does nothing but sum them."""

    name, kind, is_reduced = SUMS, "ours", False

    def __init__(self, trial: Trial, case: Any) -> None:
        import mpidist.torch
        from benchmarks.peers.torch import module_of

        torch, parameters = trial.torch, list(case.model.parameters())
        self._given = [torch.ones_like(each, requires_grad=False) for each in parameters]
        module = module_of(torch, [each.shape for each in parameters], torch.float32).to(trial.device)
        self._model = mpidist.torch.DistributedDataParallel(module, overlap="none")

    def step(self) -> None:
        """Sum.  Collective."""
        self._model.zero_grad(set_to_none=True)
        self._model(self._given).backward()

    def note(self) -> None:
        """Do nothing: no sum begins in a pass."""


def _contenders(trial: Trial, case: Any, with_stock: bool) -> list[Any]:
    import mpidist.torch

    def ours(overlap: str) -> Callable[[Any], Any]:
        return lambda bare: mpidist.torch.DistributedDataParallel(bare, broadcast_buffers=False, overlap=overlap)

    def stock(views: bool) -> Callable[[Any], Any]:
        distributed = trial.torch.nn.parallel.DistributedDataParallel
        return lambda bare: distributed(bare, broadcast_buffers=False, gradient_as_bucket_view=views)

    found = [
        Steps(OURS, "ours", trial, case, ours("auto")),
        Steps(AFTER, "ours", trial, case, ours("none")),
        SumsAlone(trial, case),
        Steps(BARE, "reference", trial, case),
    ]
    if with_stock:
        found += [Steps(STOCK, "peer", trial, case, stock(False)), Steps(VIEWS, "peer", trial, case, stock(True))]
    return found


def wrong_gradients(each: Steps, plain: Steps, ranks: Ranks) -> int:
    """Return how many gradients of a contender's step are not the mean over the ranks, on all of them.  Collective.

    `plain`, which reduces nothing, gets its parameters, and gives each rank's own.
    """
    plain.bare.load_state_dict(each.bare.state_dict())
    plain.backward()
    each.step()
    expected = [numpy.array(own, order="C") for own in plain.gradients()]
    for mean in expected:
        ranks.comm.Allreduce(ranks.mpi.IN_PLACE, mean)
        mean /= ranks.size
    largest = max(float(numpy.abs(mean).max()) for mean in expected)
    wrong = 0
    for mean, found in zip(expected, each.gradients(), strict=True):
        bound = _OF_TENSOR * numpy.abs(mean).max() + _OF_ALL * largest
        wrong += int((~(numpy.abs(found - mean) <= bound)).sum())
    return ranks.total(wrong)


def overlapped_part(after: float, early: float, alone: float) -> float:
    """Return how much of the sums a step hides that begins them in its pass, by the times of steps and sums alone.

    Local, pure.
    """
    return (after - early) / alone


def _measure_model(name: str, trial: Trial, measured: Measured, with_stock: bool) -> None:
    """Measure steps of a model.  Collective."""
    from benchmarks.torch_models import GPU_CASES

    ranks, case = trial.ranks, GPU_CASES[name](trial.ranks.rank)
    case = case._replace(model=case.model.to(trial.device), x=case.x.to(trial.device), y=case.y.to(trial.device))
    contenders = _contenders(trial, case, with_stock)
    plain = Steps("plain", "reference", trial, case)
    checked = [each for each in contenders if each.is_reduced]
    wrong = {each.name: wrong_gradients(each, plain, ranks) for each in checked}
    seconds = trial.turns(contenders)
    for each in checked:  # now those whose sums begin in the pass, too
        wrong[each.name] += wrong_gradients(each, plain, ranks)
    if trial.device.type != "cuda":
        name += " on the host"  # which no target is about
    nbytes = sum(each.nbytes for each in case.model.parameters())
    reference = STOCK if with_stock else BARE
    base = reference, float(numpy.median(seconds[reference]))
    rows = [
        row_of(name, nbytes, "float32", each.name, each.kind, seconds[each.name], base, wrong=wrong.get(each.name))
        for each in contenders
    ]
    measured.rows += rows
    show(rows, ranks)
    times = {row.who: row.time_us for row in rows}
    early = contenders[0].overlapped
    # where no sum began in a pass, two times of the same kind of step differ by chance
    part = overlapped_part(times[AFTER], times[OURS], times[SUMS]) if all(early) else None
    measured.machine[f"{name}: overlapped"] = {
        "part of the sums": part, "turns that overlapped": sum(early), "turns": len(early),
    }  # fmt: skip
    told = "not told" if part is None else f"{part:.0%}"
    ranks.say(
        f"# {name}: of the sums, {times[SUMS] / 1e3:.3f} ms, overlaps with the backward pass: {told}; they began there "
        f"in {sum(early)} of {len(early)} turns"
    )
