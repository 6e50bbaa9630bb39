"""What it costs to compare hyperparameters and parameters between ranks, and to look for new parameters.

    mpidist run -n 2 -m benchmarks.torch_comparison

A model of 161 parameters of ResNet-50's shapes, beside the reduction of its gradients.  Told is, from rank 0, the
median over turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import torch  # noqa: E402

import mpidist.torch  # noqa: E402
from benchmarks.suite.tensor_lists import shapes_of  # noqa: E402
from mpidist.frameworks.torch.comparison import _Groups, _sums_of  # noqa: E402
from mpidist.frameworks.torch.unowned_parameters import UnownedParameters  # noqa: E402

#: As `DistributedOptimizer` compares parameters unless it is told otherwise.
_EVERY = 50


def seconds(run: Callable[[], object], times: int, turns: int = 15) -> float:
    """Return the median of a call's seconds."""
    found = []
    for _ in range(turns):
        mpidist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            run()
        found.append((time.perf_counter() - began) / times)
    return median(found)


def groups_of(parameters: list[torch.Tensor], number: int) -> torch.optim.Optimizer:
    """Return an optimizer with so many groups."""
    return torch.optim.SGD([{"params": parameters[first::number]} for first in range(number)], lr=0.1, momentum=0.9)


def digest_seconds(parameters: list[torch.Tensor], number: int, changes: bool) -> float:
    """Return what the digest of so many groups takes, where a scheduler has changed all rates since, or nothing has."""
    optimizer = groups_of(parameters, number)
    groups = _Groups(optimizer)

    def run() -> None:
        for group in optimizer.param_groups if changes else ():
            group["lr"] *= 0.999
        groups.digest()

    return seconds(run, 200)


def main() -> None:
    """Measure on all ranks; rank 0 prints."""
    parameters = [torch.ones(shape, requires_grad=True) for shape in shapes_of("resnet50")]
    size = sum(each.numel() * each.element_size() for each in parameters)
    lines = [f"{len(parameters)} parameters, {size / 1e6:.0f} MB, {mpidist.size()} ranks"]
    for number in (1, 10):
        same, changed = (digest_seconds(parameters, number, changes) * 1e6 for changes in (False, True))
        lines.append(f"digest of {number} groups: {same:.1f} us; rates changed: {changed:.1f} us")
    module = torch.nn.ModuleList(torch.nn.ParameterList([each]) for each in parameters)
    unowned = UnownedParameters(module, "", lambda parameter: True)
    lines.append(f"new parameters in {len(module)} modules: {seconds(unowned.found, 200) * 1e6:.1f} us")
    gradients = [torch.ones_like(each).numpy() for each in parameters]
    reduced = seconds(lambda: mpidist.all_reduce(gradients, "mean"), 3)
    summed = seconds(lambda: _sums_of(parameters), 1)
    share = summed / _EVERY / reduced
    lines.append(f"sums of parameters: {summed * 1e3:.1f} ms, {size / summed / 1e9:.2f} GB/s")
    lines.append(f"reduction of gradients: {reduced * 1e3:.1f} ms; sums every {_EVERY} steps: 1/{1 / share:.0f} of it")
    if mpidist.rank() == 0:
        print("\n".join(lines))


main()
