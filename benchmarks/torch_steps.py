"""Training steps of PyTorch models: `mpidist.torch` beside other ways to train on the same ranks, in one launch.

    mpidist run -n 2 -m benchmarks.torch_steps
    mpidist run -n 2 -m benchmarks.torch_steps --case resnet --turns 20
    mpidist run -n 2 -m benchmarks.torch_steps --save benchmarks/results    # adds to .../torch_steps-2.json

Each contender trains a copy of the model on batches of its own rank, one thread a rank.  The contenders take turns of
some steps; told is the median over turns of the time of a step on rank 0.

==============  =======================================================================================================
nothing         the step without communication: forward, backward, optimizer
mpidist         `mpidist.torch.DistributedOptimizer`
mpidist DDP     `mpidist.torch.DistributedDataParallel`
DDP             `torch.nn.parallel.DistributedDataParallel` over Gloo
fused           Horovod's pattern: gradients packed into one buffer, ``Allreduce`` of mpi4py, unpacked
naive           one ``Allreduce`` of mpi4py for each gradient
copy            no step: a plain copy of all gradients, for scale
==============  =======================================================================================================
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import numpy  # noqa: E402
import torch  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpidist.torch  # noqa: E402
from benchmarks.peers.torch import started  # noqa: E402
from benchmarks.suite.ranks import Ranks  # noqa: E402
from benchmarks.suite.saved import add_launch  # noqa: E402
from benchmarks.torch_models import CASES, Case  # noqa: E402
from mpidist.world import world_communicator  # noqa: E402

_cross_entropy = torch.nn.functional.cross_entropy


class TrainSteps:
    """A contender: trains a model of its own."""

    name = "nothing"

    def __init__(self, case: Case, optimizer: str) -> None:
        self.model, self.x, self.y = copy.deepcopy(case.model), case.x, case.y
        self.optimizer: Any = _OPTIMIZERS[optimizer](self.model.parameters())
        self.bare = self.model

    def step(self) -> None:
        """Make one step."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.reduce()
        self.optimizer.step()

    def loss(self) -> torch.Tensor:
        """Return the loss of a forward pass."""
        return _cross_entropy(self.model(self.x), self.y)

    def reduce(self) -> None:
        """Reduce the gradients, where nothing else does."""


class OurOptimizer(TrainSteps):
    """With `mpidist.torch.DistributedOptimizer`."""

    name = "mpidist"

    def __init__(self, case: Case, optimizer: str) -> None:
        super().__init__(case, optimizer)
        self.optimizer = mpidist.torch.DistributedOptimizer(self.optimizer)


class OurModule(TrainSteps):
    """With `mpidist.torch.DistributedDataParallel`."""

    name = "mpidist DDP"

    def __init__(self, case: Case, optimizer: str) -> None:
        super().__init__(case, optimizer)
        self.model = mpidist.torch.DistributedDataParallel(self.model, broadcast_buffers=False)


class StockModule(TrainSteps):
    """With PyTorch's own class over Gloo."""

    name = "DDP"

    def __init__(self, case: Case, optimizer: str) -> None:
        super().__init__(case, optimizer)
        self.model = torch.nn.parallel.DistributedDataParallel(self.model, broadcast_buffers=False)


class Fused(TrainSteps):
    """With one fused buffer and mpi4py, as Horovod has it."""

    name = "fused"

    def __init__(self, case: Case, optimizer: str) -> None:
        super().__init__(case, optimizer)
        self._buffer = torch.empty(sum(each.numel() for each in self.model.parameters()))

    def reduce(self) -> None:
        gradients = [each.grad for each in self.model.parameters()]
        torch.cat([each.reshape(-1) for each in gradients], out=self._buffer)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, self._buffer.numpy())
        self._buffer.div_(MPI.COMM_WORLD.size)
        for gradient, part in zip(gradients, self._buffer.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


class Naive(TrainSteps):
    """With one call of mpi4py for each gradient."""

    name = "naive"

    def reduce(self) -> None:
        for each in self.model.parameters():
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, each.grad.numpy())
            each.grad.div_(MPI.COMM_WORLD.size)


class Copy(TrainSteps):
    """No step, but a copy of as many bytes."""

    name = "copy"

    def __init__(self, case: Case, optimizer: str) -> None:
        super().__init__(case, optimizer)
        self._from = [each.detach().numpy().copy() for each in self.model.parameters()]
        self._to = [numpy.empty_like(each) for each in self._from]

    def step(self) -> None:
        for target, source in zip(self._to, self._from, strict=True):
            target[...] = source


_OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
}

_CONTENDERS = (TrainSteps, OurOptimizer, OurModule, StockModule, Fused, Naive, Copy)


def measured(case: Case, optimizer: str, turns: int, steps: int, names: list[str] | None) -> dict[str, float]:
    """Return by contender the median over turns of the seconds of a step.  Collective."""
    communicator = world_communicator()
    contenders = [each(case, optimizer) for each in _CONTENDERS if names is None or each.name in names]
    seconds: dict[str, list[float]] = {each.name: [] for each in contenders}
    for turn in range(turns + 1):
        for each in contenders:
            each.step()  # its caches
            communicator.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                each.step()
            if turn:
                seconds[each.name].append((time.perf_counter() - begin) / steps)
    check(contenders)
    return {name: float(numpy.median(found)) for name, found in seconds.items()}


def check(contenders: list[TrainSteps]) -> None:
    """Raise unless those that reduce have come to the same parameters."""
    found = {
        each.name: numpy.concatenate([part.detach().reshape(-1) for part in each.bare.parameters()])
        for each in contenders
        if each.name not in ("nothing", "forward", "copy")
    }
    first = next(iter(found.values()), None)
    for name, parameters in found.items():
        if not numpy.allclose(parameters, first, rtol=1e-2, atol=1e-3):
            raise AssertionError(f"{name} has come to other parameters, by {abs(parameters - first).max()}")


def line(name: str, found: dict[str, float]) -> str:
    """Return a row of the table, in milliseconds, and what D / C and ours / C are."""
    cells = [f"{name:22s}"] + [f"{found.get(each.name, numpy.nan) * 1e3:11.3f}" for each in _CONTENDERS]
    bare = found.get("nothing", numpy.nan)
    ratios = [found.get(each, numpy.nan) / bare for each in ("mpidist", "DDP")]
    return " ".join([*cells, *(f"{each:8.2f}" for each in ratios)])


def main() -> None:
    """Measure the cases; rank 0 prints a table.  Collective."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="only cases with this in their name")
    parser.add_argument("--optimizer", choices=sorted(_OPTIMIZERS), default="sgd")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--only", help="only these contenders, with commas between them")
    parser.add_argument("--save", metavar="FOLDER", help="add the launch to the results there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    communicator = world_communicator()
    started(Ranks())
    if communicator.rank == 0:
        print(
            " ".join([f"{'ms':22s}", *(f"{each.name:>11s}" for each in _CONTENDERS), "  ours/C    DDP/C"]), flush=True
        )
    rows = {}
    for name, (make, steps) in CASES.items():
        if options.case is None or options.case.lower() in name.lower():
            names = options.only.split(",") if options.only else None
            rows[name] = measured(make(), options.optimizer, options.turns, steps, names)
            if communicator.rank == 0:
                print(line(name, rows[name]), flush=True)
    if options.save and communicator.rank == 0:
        add_launch(options.save, "torch_steps", "torch", {"optimizer": options.optimizer, "seconds": rows})


if __name__ == "__main__":
    main()
