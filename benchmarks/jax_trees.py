"""What `mpidist.jax.reduce_tree` adds to a bare training step of JAX.

    mpidist run -n 2 -m benchmarks.jax_trees
    mpidist run -n 2 -m benchmarks.jax_trees --save benchmarks/results    # adds to .../jax_trees-2.json

One step is the gradient and SGD's update, each jitted, of a perceptron with tanh; each rank has a batch of its own.
Four steps take turns, so that all see the same machine: *bare* without communication, *ours* with `reduce_tree`,
*weighted* with rows that differ between ranks, and *Horovod's pattern*, one ``Allreduce`` through mpi4py of a packed
buffer, whose sums are copied for JAX.  Shown are the medians over turns, in milliseconds, and a plain copy of the
gradients.  One thread a rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import jax  # noqa: E402 - the flags have to be there first
import jax.numpy as jnp  # noqa: E402
import numpy  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpidist.jax  # noqa: E402
from benchmarks.suite.saved import add_launch  # noqa: E402

#: Widths of the layers, and rows of a rank's batch, by name.
MODELS = {
    "150 thousand, 6 tensors": ([128, 256, 384, 32], 64),
    "2.2 million, 6 tensors": ([256, 1024, 1536, 256], 64),
    "25 million, 20 tensors, 4 rows": ([1024, *[1664] * 9, 1024], 4),
}


def initial(widths: list[int]) -> list[dict[str, Any]]:
    """Return parameters, the same on all ranks."""
    rng = numpy.random.default_rng(0)
    pairs = zip(widths[:-1], widths[1:], strict=True)
    return [{"w": jnp.asarray(rng.normal(0, m**-0.5, (m, n)), "f4"), "b": jnp.zeros(n)} for m, n in pairs]


def loss(parameters: list[dict[str, Any]], x: Any, y: Any) -> Any:
    """Return the mean squared error."""
    for layer in parameters:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return ((x - y) ** 2).mean()


gradient_fn = jax.jit(jax.grad(loss))
apply = jax.jit(lambda p, g: jax.tree.map(lambda a, b: a - 0.01 * b, p, g), donate_argnums=0)


def horovod(tree: Any) -> Any:
    """Return the mean by one packed ``Allreduce``, with results that JAX may keep."""
    leaves, structure = jax.tree.flatten(tree)
    packed = numpy.concatenate([numpy.asarray(leaf).ravel() for leaf in leaves])
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, packed)
    packed *= 1 / MPI.COMM_WORLD.size
    ends = numpy.cumsum([leaf.size for leaf in leaves])
    parts = [packed[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]
    return jax.tree.unflatten(structure, [jax.device_put(part.copy()) for part in parts])


def reductions() -> dict[str, Callable[[Any], Any]]:
    """Return what a step does with its gradients, by name."""
    rows = 64 + MPI.COMM_WORLD.rank
    return {
        "bare": lambda tree: tree,
        "ours": mpidist.jax.reduce_tree,
        "weighted": lambda tree: mpidist.jax.reduce_tree(tree, weight=rows),
        "Horovod's pattern": horovod,
    }


def timed(name: str, turns: int) -> dict[str, float]:
    """Return the median milliseconds of each kind of step of a model, and of a plain copy of the gradients."""
    widths, rows = MODELS[name]
    rng = numpy.random.default_rng(MPI.COMM_WORLD.rank)
    x, y = (jnp.asarray(rng.normal(size=(rows, width)), "f4") for width in (widths[0], widths[-1]))
    kinds = reductions()
    models = {kind: initial(widths) for kind in kinds}
    found: dict[str, list[float]] = {kind: [] for kind in [*kinds, "copy"]}
    copies = [numpy.asarray(leaf).copy() for leaf in jax.tree.leaves(models["bare"])]
    for turn in range(turns + 3):
        for kind, reduce in kinds.items():
            MPI.COMM_WORLD.Barrier()
            begun = time.perf_counter()
            models[kind] = jax.block_until_ready(apply(models[kind], reduce(gradient_fn(models[kind], x, y))))
            found[kind].append(time.perf_counter() - begun if turn >= 3 else float("nan"))
        begun = time.perf_counter()
        for copy, leaf in zip(copies, jax.tree.leaves(models["bare"]), strict=True):
            numpy.copyto(copy, numpy.asarray(leaf))
        found["copy"].append(time.perf_counter() - begun)
    return {kind: 1e3 * statistics.median(seconds[3:]) for kind, seconds in found.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--case", default="", help="only models with this in their name")
    parser.add_argument("--save", metavar="FOLDER", help="add the launch to the results there")
    options = parser.parse_args()
    rows = {}
    for name in [each for each in MODELS if options.case in each]:
        rows[name] = shown = timed(name, options.turns if "25" not in name else max(1, options.turns // 4))
        if MPI.COMM_WORLD.rank == 0:
            cells = ", ".join(f"{kind} {value:.3f}" for kind, value in shown.items())
            print(f"{name} on {MPI.COMM_WORLD.size} ranks: {cells} ms", flush=True)
    if options.save and MPI.COMM_WORLD.rank == 0:
        add_launch(options.save, "jax_trees", "jax", {"milliseconds": rows})


if __name__ == "__main__":
    main()
