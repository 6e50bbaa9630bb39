"""The job of the case ``ps`` on TensorFlow's parameter servers: one process is the chief and starts the others.

A step is a ``tf.function`` that reads the variable on its worker, computes a gradient there, and has it applied where
the variable is: subtracted, or by TensorFlow's own operation for momentum or Adam.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # it greets with a page of log lines
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # of no use here, and announced
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from benchmarks.suite.ps_work import RATE, SLOPE, WORKS, timed  # noqa: E402

#: Rule -> its slots; the last of Adam counts steps.
_SLOTS = {"plain": 0, "sgd": 1, "adam": 3}

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7

CLUSTER = ("worker", "worker", "ps")


def main() -> None:
    """Measure, as the chief; or serve, as one of the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), required=True)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--task", nargs=2, metavar=("JOB", "INDEX"), help="serve; TF_CONFIG says who else there is")
    options = parser.parse_args()
    if options.task:
        serve()
    with others(options.works) as cluster:
        found = measure(cluster, options.works, options.seconds, options.turns)
    options.save.write_text(json.dumps(found))


def serve() -> None:
    """Be a worker or a server until this process is ended."""
    import tensorflow

    resolver = tensorflow.distribute.cluster_resolver.TFConfigClusterResolver()
    server = tensorflow.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    server.join()


@contextmanager
def others(works: list[str]) -> Iterator[dict[str, list[str]]]:
    """Start the workers and the server, yield the cluster, and end them."""
    cluster: dict[str, list[str]] = {}
    tasks = []
    for job in CLUSTER:
        tasks.append((job, len(cluster.setdefault(job, []))))
        cluster[job].append(f"127.0.0.1:{free_port()}")
    started = []
    try:
        for job, index in tasks:
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            line = [sys.executable, "-m", __spec__.name, "--works", *works, "--task", job, str(index)]
            started.append(subprocess.Popen(line, env={**os.environ, "TF_CONFIG": config}, stderr=subprocess.DEVNULL))
        yield cluster
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)  # they have no other end
            process.wait()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(cluster: dict[str, list[str]], works: list[str], seconds: float, turns: int) -> dict[str, Any]:
    """Return seconds of a step by work, in each turn."""
    import tensorflow

    distribute = tensorflow.distribute
    spec = tensorflow.train.ClusterSpec(cluster)
    resolver = distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    strategy = distribute.ParameterServerStrategy(resolver)
    coordinator = distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variables = {title: tensorflow.Variable(tensorflow.ones(WORKS[title].elements)) for title in works}
        slots = {
            title: [
                tensorflow.Variable(tensorflow.zeros(WORKS[title].elements)) for _ in range(_SLOTS[WORKS[title].rule])
            ]
            for title in works
        }
    steps = {title: stepping(tensorflow, variables[title], slots[title], WORKS[title].rule) for title in works}
    runs = {title: scheduling(coordinator, steps[title]) for title in works}
    found: dict[str, list[float]] = {title: [] for title in works}
    for _ in range(turns):
        for title in works:
            found[title].append(timed(runs[title], seconds)[0])
    return {"seconds": found, "wrong": dict.fromkeys(works, 0)}


def stepping(tensorflow: Any, variable: Any, slots: list[Any], rule: str) -> Callable[[], None]:
    """Return a step as a graph.  Local."""

    @tensorflow.function
    def plain() -> None:
        variable.assign_sub(RATE * SLOPE * variable.read_value())

    @tensorflow.function
    def momentum() -> None:
        gradient, handles = SLOPE * variable.read_value(), [each.handle for each in (variable, *slots)]
        tensorflow.raw_ops.ResourceApplyMomentum(
            var=handles[0], accum=handles[1], lr=RATE, grad=gradient, momentum=BETA_1
        )

    @tensorflow.function
    def adam() -> None:
        gradient, handles = SLOPE * variable.read_value(), [each.handle for each in (variable, *slots)]
        count = slots[2].assign_add(tensorflow.ones_like(slots[2]), read_value=True)[0]
        powers = {"beta1_power": BETA_1**count, "beta2_power": BETA_2**count}
        rates = {"lr": RATE, "beta1": BETA_1, "beta2": BETA_2, "epsilon": EPSILON}
        tensorflow.raw_ops.ResourceApplyAdam(
            var=handles[0], m=handles[1], v=handles[2], grad=gradient, **powers, **rates
        )

    return {"plain": plain, "sgd": momentum, "adam": adam}[rule]


def scheduling(coordinator: Any, step: Callable[[], None]) -> Callable[[int], None]:
    """Return what schedules so many steps and waits for all.  Local."""

    def run(steps: int) -> None:
        for _ in range(steps):
            coordinator.schedule(step)
        coordinator.join()

    return run


if __name__ == "__main__":
    main()
