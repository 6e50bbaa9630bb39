"""What `mpidist.jax.reduce_tree` adds to a bare training step of JAX.

    mpidist run -n 2 -m benchmarks.jax_trees
    mpidist run -n 2 -m benchmarks.jax_trees --save benchmarks/results    # adds to .../jax_trees-2.json

One step is the gradient and SGD's update, each jitted, of a perceptron with tanh or of ResNet-18 for small images; each
rank has a batch of its own.  Four steps take turns, so that all see the same machine: *bare* without communication,
*ours* with `reduce_tree`, *weighted* with rows that differ between ranks, and *Horovod's pattern*, one ``Allreduce``
through mpi4py of a packed buffer, whose sums are copied for JAX.  Shown are the medians over turns, in milliseconds,
and a plain copy of the gradients.  One thread a rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import jax  # noqa: E402 - the flags have to be there first
import jax.numpy as jnp  # noqa: E402
import numpy  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpidist.jax  # noqa: E402
from benchmarks.suite.saved import add_launch  # noqa: E402


class Case(NamedTuple):
    """Parameters, what a model makes of them and of inputs, and the shapes of a rank's inputs and labels."""

    parameters: list[Any]
    model: Callable[[Any, Any], Any]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]


def perceptron(widths: list[int], rows: int) -> Case:
    """Return a perceptron with layers of these widths."""
    rng = numpy.random.default_rng(0)
    pairs = zip(widths[:-1], widths[1:], strict=True)
    layers = [{"w": jnp.asarray(rng.normal(0, m**-0.5, (m, n)), "f4"), "b": jnp.zeros(n)} for m, n in pairs]

    def model(parameters: Any, x: Any) -> Any:
        for layer in parameters:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return x

    return Case(layers, model, ((rows, widths[0]), (rows, widths[-1])))


def resnet18(rows: int) -> Case:
    """Return ResNet-18, as `torch_models` has it: its layers in a list, each a convolution and its norm."""
    rng = numpy.random.default_rng(0)

    def layer(inputs: int, outputs: int, size: int = 3) -> dict[str, Any]:
        kernel = rng.normal(0, (inputs * size**2) ** -0.5, (size, size, inputs, outputs))
        return {"w": jnp.asarray(kernel, "f4"), "scale": jnp.ones(outputs), "shift": jnp.zeros(outputs)}

    blocks = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    blocks += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    parameters: list[Any] = [layer(3, 64)]
    for inputs, outputs, _ in blocks:
        parameters += [layer(inputs, outputs), layer(outputs, outputs)]
        parameters += [layer(inputs, outputs, 1)] if inputs != outputs else []
    parameters.append({"w": jnp.asarray(rng.normal(0, 512**-0.5, (512, 10)), "f4"), "b": jnp.zeros(10)})

    def normed(layer: Any, x: Any, stride: int = 1) -> Any:
        x = jax.lax.conv_general_dilated(x, layer["w"], (stride, stride), "SAME", dimension_numbers=_IMAGES)
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["shift"]

    def model(parameters: Any, x: Any) -> Any:
        first, *layers, last = parameters
        following = iter(layers)
        x = jax.nn.relu(normed(first, x))
        for inputs, outputs, stride in blocks:
            found = normed(next(following), x, stride)
            found = normed(next(following), jax.nn.relu(found))
            x = jax.nn.relu(found + (normed(next(following), x, stride) if inputs != outputs else x))
        return x.mean((1, 2)) @ last["w"] + last["b"]

    return Case(parameters, model, ((rows, 32, 32, 3), (rows, 10)))


#: Rows, height, width and channels.
_IMAGES = ("NHWC", "HWIO", "NHWC")

#: By name: what makes the model, and how many times fewer turns it has.
MODELS: dict[str, tuple[Callable[[], Case], int]] = {
    "150 thousand, 6 tensors": (lambda: perceptron([128, 256, 384, 32], 64), 1),
    "2.2 million, 6 tensors": (lambda: perceptron([256, 1024, 1536, 256], 64), 1),
    "ResNet-18, 11 million, 62 tensors, 8 rows": (lambda: resnet18(8), 20),
    "25 million, 20 tensors, 4 rows": (lambda: perceptron([1024, *[1664] * 9, 1024], 4), 4),
}


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
    case = MODELS[name][0]()
    rng = numpy.random.default_rng(MPI.COMM_WORLD.rank)
    x, y = (jnp.asarray(rng.normal(size=shape), "f4") for shape in case.shapes)
    gradient_fn = jax.jit(jax.grad(lambda parameters: ((case.model(parameters, x) - y) ** 2).mean()))
    kinds = reductions()
    models = {kind: jax.tree.map(jnp.array, case.parameters) for kind in kinds}
    found: dict[str, list[float]] = {kind: [] for kind in [*kinds, "copy"]}
    copies = [numpy.asarray(leaf).copy() for leaf in jax.tree.leaves(models["bare"])]
    for turn in range(turns + 3):
        for kind, reduce in kinds.items():
            MPI.COMM_WORLD.Barrier()
            begun = time.perf_counter()
            models[kind] = jax.block_until_ready(apply(models[kind], reduce(gradient_fn(models[kind]))))
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
        rows[name] = shown = timed(name, max(1, options.turns // MODELS[name][1]))
        if MPI.COMM_WORLD.rank == 0:
            cells = ", ".join(f"{kind} {value:.3f}" for kind, value in shown.items())
            print(f"{name} on {MPI.COMM_WORLD.size} ranks: {cells} ms", flush=True)
    if options.save and MPI.COMM_WORLD.rank == 0:
        add_launch(options.save, "jax_trees", "jax", {"milliseconds": rows})


if __name__ == "__main__":
    main()
