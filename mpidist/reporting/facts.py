"""What a rank says of itself and of its job: versions, command line, and what was chosen and why."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.ways import selection
from mpidist.options import changed

#: Packages whose version is told, if the program has imported them.
_PACKAGES = ("autograd", "cupy", "h5py", "jax", "keras", "mpi4py", "torch")


def about(strategy: Any, communicator: Communicator, run: str) -> dict[str, Any]:
    """Return what this rank is.  Local."""
    trace, topology, trainers = communicator.observer.trace, communicator.topology, strategy.extended.trainers
    ranks: int | list[int]  # how many there are, or which of the job's
    job = {"strategy": type(strategy).__name__, "device": strategy.extended.device_name}
    if trainers is None:
        rank, ranks = communicator.rank, communicator.size
        job |= {"replicas": str(strategy.num_replicas_in_sync), "ranks": topology.describe()}
        job["transport"] = communicator.transport.name
    else:
        rank, ranks = trainers[0], list(trainers[1])
        trace = None  # workers trace their own worlds, not the training
        job["servers"] = str(len(strategy.extended.parameter_devices))
    return {
        "run": run,
        "rank": rank,
        "ranks": ranks,
        "host": topology.node_names[topology.node_of[communicator.rank]],
        "command": shlex.join([sys.executable, *sys.orig_argv[1:]]),
        "directory": os.getcwd(),
        "trace": trace and {"job": trace.about.job, "folder": str(trace.path.parent.absolute())},
        "versions": versions(communicator),
        "job": job,
    }


def versions(communicator: Communicator) -> dict[str, str]:
    """Return the versions of what the program runs on.  Local."""
    versions_here = {
        "mpidist": sys.modules["mpidist"].__version__,
        "Python": platform.python_version(),
        "NumPy": numpy.__version__,
        "MPI": communicator.transport.library or "none",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
    }
    return versions_here | {name: _version(name) for name in _PACKAGES if name in sys.modules}


def _version(package: str) -> str:
    """Return the version of a package that is imported."""
    try:
        return str(getattr(sys.modules[package], "__version__", None) or metadata.version(package))
    except metadata.PackageNotFoundError:
        return "unknown"


def chosen(strategy: Any, communicator: Communicator, variables: Iterable[Any]) -> dict[str, str]:
    """Return by which all-reduce gradients of the variables are summed, and why; settings too.  Local.

    Call it after a step: what `mpidist tune` stored is loaded by the first all-reduce.
    """
    facts: dict[str, str] = {}
    ops: Any = getattr(strategy.extended, "cross_device_ops", None)
    is_reduced = hasattr(ops, "algorithm_for") and strategy.num_replicas_in_sync > 1
    held = [variable.live for variable in variables if variable.trainable] if is_reduced else []
    if held:
        nbytes, on_host = sum(each.nbytes for each in held), not any(map(arrays.is_device, held))
        algorithm = ops.algorithm_for(ops.options)
        unit = min(nbytes, ops.options.bytes_per_pack or ops.communicator.bytes_per_pack(algorithm, on_host))
        facts["gradients"] = f"{nbytes} bytes, in units of at most {unit} bytes"
        way = ops.communicator.way(unit, algorithm, on_host)
        facts["all-reduce"] = way.label if unit > way.segment_bytes else way.algorithm
        facts["because"] = _reason(ops.communicator, algorithm, unit, on_host)
    return facts | {name: str(value) for name, (value, _) in changed(communicator.control.settings).items()}


def _reason(communicator: Communicator, algorithm: str | None, nbytes: int, on_host: bool) -> str:
    """Return why an all-reduce is the one for so many bytes."""
    settings = communicator.control.settings
    if settings.algorithm != selection.AUTO:
        return f"MPIDIST_ALGORITHM={settings.algorithm} asks for it"
    if algorithm not in (None, selection.AUTO, selection.PINNED):
        return f"the strategy asks for {algorithm}"
    if not on_host:
        return "the variables are in device memory"
    facts = communicator.facts()
    if facts.choices is not None and algorithm != selection.PINNED and not settings.deterministic:
        return "measured on these ranks by mpidist tune"
    row = [row for row in selection.TABLE if row.place == facts.place and row.least_bytes <= nbytes][-1]
    return (
        f"the table for these ranks, from {row.least_bytes} bytes on; measurements: {row.evidence(communicator.size)}"
    )
