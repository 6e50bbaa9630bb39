"""``mpidist info``: one page about this machine.  What is missing is a line with its cure, never a traceback."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

import mpidist
from mpidist.cluster.launchers import detect_launcher
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.ways.selection import AUTO, check_name
from mpidist.commands.card_page import Row, ask_cuda, card_rows
from mpidist.commands.choice_page import page, table_page
from mpidist.commands.launch.cores import visible_cores
from mpidist.commands.launch.mpirun import find_mpirun
from mpidist.commands.launch.probe import GET_MPI, MpiFound, probe_mpi
from mpidist.commands.parser import Parser
from mpidist.errors import LaunchError, MpidistError
from mpidist.options import changed, settings
from mpidist.transports import world
from mpidist.tuning.store import folder, key_of, look_up, stored

_EXAMPLES = """examples:
  mpidist info                           this machine
  mpidist run -n 4 -m mpidist info       and the world of four ranks
"""

#: What the page does not say.
_NEXT = "next: mpidist doctor says whether this is right, and how to mend what is not"


def main(argv: Sequence[str]) -> int:
    """Print the page, on rank 0 only, and return the exit status; Collective under a launcher."""
    options = parser().parse_args(argv)
    rank, world_rows = world_page()
    if rank == 0:
        sections = {
            "software": software_rows(),
            "mpi": mpi_rows(probe_mpi(start=True)),
            "world": world_rows,
            "gpus": card_rows(ask_cuda()),
            "machine": machine_rows(),
            "settings": settings_rows(),
        }
        chosen = all_reduces()
        if options.json:
            found = {name: dict(rows) for name, rows in sections.items()}
            print(json.dumps({**found, "all_reduces": chosen}, indent=1))
        else:
            print("\n\n".join([*map(render, sections.values()), *chosen, _NEXT]), flush=True)
    return 0


def parser() -> Parser:
    """Return the parser of ``mpidist info``'s arguments."""
    parser = Parser(
        "info", "Print one page about this machine. Under mpirun it shows the world of all ranks, once.", _EXAMPLES
    )
    parser.add_argument("--json", action="store_true", help="print the page as JSON")
    return parser


def render(rows: Iterable[Row]) -> str:
    """Return the rows as text, the labels in a column of their own."""
    return "\n".join(f"{label:<26}{value}" for label, value in rows)


def software_rows() -> list[Row]:
    """Return the versions of mpidist, Python, NumPy and h5py."""
    return [
        ("mpidist", f"{mpidist.__version__}, {os.path.dirname(mpidist.__file__)}"),
        ("Python", f"{platform.python_version()}, {sys.executable}"),
        ("NumPy", metadata.version("numpy")),
        ("h5py", _h5py()),
    ]


def _h5py() -> str:
    facts = find_h5py()
    if "error" in facts:
        return f"not usable ({facts['error']}), so no checkpoints: pip install h5py"
    parallel = "with parallel I/O" if facts["parallel"] else "without parallel I/O (checkpoints do not need it)"
    return f"{facts['version']}, HDF5 {facts['hdf5']}, {parallel}"


def find_h5py() -> dict[str, Any]:
    """Return the versions of h5py and HDF5 and whether they are parallel, or the error of the import."""
    try:
        import h5py
    except ImportError as error:
        return {"error": str(error)}
    return {"version": h5py.__version__, "hdf5": h5py.version.hdf5_version, "parallel": bool(h5py.get_config().mpi)}


def mpi_rows(mpi: MpiFound) -> list[Row]:
    """Return what is known about mpi4py, its MPI library, and the mpirun that belongs to it."""
    rows = [("mpi4py", mpi.mpi4py or f"not installed, so one rank only: {GET_MPI}")]
    if mpi.vendor:
        standard = ".".join(map(str, mpi.standard))
        rows.append(("MPI library", f"{mpi.title}, implements MPI {standard}"))
        rows.append(("thread level", mpi.thread_level or f"unknown, MPI does not start here: {mpi.error}"))
    else:
        return rows + ([("MPI library", f"none, so one rank only: {GET_MPI} ({mpi.error})")] if mpi.mpi4py else [])
    try:
        rows.append(("mpirun", find_mpirun(mpi).title))
    except LaunchError as error:
        rows.append(("mpirun", str(error)))
    return rows


def world_page() -> tuple[int, list[Row]]:
    """Return this process's rank and what is known about the world it is in; starts MPI under a launcher only."""
    rank = 0
    try:
        launcher = detect_launcher()
        rank = launcher.rank if launcher else 0
        joined = world()
    except (MpidistError, ValueError, ImportError, RuntimeError, OSError) as error:
        return rank, [("world", f"cannot be joined: {error}")]
    started_by = launcher.name if launcher else "none detected: python alone, a world of one rank"
    ranks = [f"node {node} ({name})" for node, name in enumerate(joined.topology.node_names)]
    return joined.transport.rank, [
        ("launcher", started_by),
        ("world size", str(joined.transport.size)),
        ("topology", f"{joined.topology.describe()}: {', '.join(ranks)}"),
        ("transport", joined.transport.name),
    ]


def all_reduces() -> list[str]:
    """Return what is chosen for all-reduces, and why: for the world, or for all that was measured of this host; Local.

    Call it on rank 0, once the world is joined.
    """
    try:
        chosen, where = settings(), folder()
        check_name(chosen.algorithm)
        if chosen.algorithm != AUTO:
            return [render([("all-reduce", f"always {chosen.algorithm}, by MPIDIST_ALGORITHM")])]
        if chosen.deterministic:
            return [render([("all-reduce", "by a fixed table, since MPIDIST_DETERMINISTIC is set")])]
        if detect_launcher() is None or world().transport.size == 1:
            found, problems = stored(where)
            # a host has the number of its virtual node behind its name
            records = [one for one in found if platform.node() in (host.partition("#")[0] for host in one.hosts)]
            default = f"by a table; nothing was measured on this host yet: mpidist tune -n 2 does so ({where})"
        else:
            communicator = Communicator(world())
            record, problem = look_up(key_of(communicator), where)
            records, problems = [record] if record else [], [problem] if problem else []
            default = f"by a table, nothing was measured for these ranks yet: mpidist tune ({where})"
            default = f"{default}\n\n{table_page(communicator.facts())}"
    except (MpidistError, ValueError, ImportError, RuntimeError, OSError) as error:
        return [render([("all-reduce", f"unknown: {error}")])]
    pages = [f"all-reduces of {page(record)}" for record in records]
    pages += [render([("all-reduce", f"{problem}; mpidist tune measures anew")]) for problem in problems]
    return pages or [render([("all-reduce", default)])]


def machine_rows() -> list[Row]:
    """Return cores, threads and shared memory of this machine."""
    cores = visible_cores()
    share = ", a share of this machine" if cores.restricted else ""
    threads = os.environ.get("OMP_NUM_THREADS", "not set: every rank takes all cores (mpidist run sets it)")
    return [
        ("host", f"{platform.node()}, {platform.system()} {platform.release()}, {platform.machine()}"),
        ("cores visible", f"{cores.count}{share}"),
        ("OMP_NUM_THREADS", threads),
        ("/dev/shm", _shared_memory()),
    ]


def _shared_memory(path: str = "/dev/shm") -> str:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return f"not there ({error.strerror}): ranks of a node exchange messages instead"
    text = f"{usage.total / 2**30:.1f} GiB, {usage.free / 2**30:.1f} GiB free"
    small = usage.total < 256 * 2**20
    return f"{text}; small: in a container, start it with --shm-size=1g" if small else text


def settings_rows() -> list[Row]:
    """Return the ``MPIDIST_*`` settings that are in force."""
    try:
        chosen = settings()
    except ValueError as error:
        return [("settings", str(error))]
    rows = [(name, f"{value} (default {default})") for name, (value, default) in changed(chosen).items()]
    return rows or [("settings", "no MPIDIST_* variable changes a default")]
