"""``mpidist doctor``: what is wrong with this machine or this job, a line each, and the command that mends it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from mpidist.cluster.allocation import slurm_tasks
from mpidist.cluster.launchers import Launcher, detect_launcher
from mpidist.cluster.programs import said
from mpidist.cluster.resolvers.mpi import start_mpi
from mpidist.cluster.slurm_plugins import offered_plugins
from mpidist.collectives.exchange.objects import all_gather_object
from mpidist.commands import run
from mpidist.commands.doctor_rank import observe
from mpidist.commands.launch.mpirun import find_mpirun
from mpidist.commands.launch.probe import probe_mpi
from mpidist.commands.parser import Parser
from mpidist.diagnosis import card_checks, launch_checks, network_checks, node_checks
from mpidist.diagnosis.case import Case
from mpidist.diagnosis.finding import FAIL, OK, WARN, Finding, fail, status
from mpidist.diagnosis.trials import try_together
from mpidist.errors import LaunchError, MpidistError
from mpidist.options import NO_MPI, TIMEOUT, settings
from mpidist.world import world_communicator

_EXAMPLES = """examples:
  mpidist doctor                                     this machine, as on a login node; nothing is started
  mpidist doctor --launch                            the same, and two ranks of mpidist run
  srun --mpi=pmix -N 2 --ntasks-per-node 4 python -m mpidist doctor --folder $SCRATCH

The exit status is 0 when all is well, 1 with warnings, 2 when something is broken.
"""

#: Seconds after which ranks that wait for others give up, unless the environment says otherwise, and a launch.
_PATIENCE, _LAUNCH_PATIENCE = "60", 180.0

#: The checks, in the order of the page: name, and the function that returns what it finds in a case.
CHECKS: Mapping[str, Callable[[Case], Iterable[Finding]]] = {
    "MPI": launch_checks.check_mpi,
    "mpirun": launch_checks.check_mpirun,
    "srun": launch_checks.check_srun,
    "world": launch_checks.check_world,
    "placement": launch_checks.check_placement,
    "PMI": launch_checks.check_pmi,
    "thread level": launch_checks.check_threads_of_mpi,
    "software": launch_checks.check_software,
    "working folder": launch_checks.check_working_folder,
    "settings": launch_checks.check_settings,
    "cores": node_checks.check_cores,
    "threads": node_checks.check_threads,
    "shared memory": node_checks.check_shared_memory,
    "memory": node_checks.check_memory,
    "limits": node_checks.check_limits,
    "interfaces": network_checks.check_interfaces,
    "node pairs": network_checks.check_pairs,
    "clocks": network_checks.check_clocks,
    "folder": node_checks.check_folder,
    "file locks": node_checks.check_locks,
    "h5py": node_checks.check_h5py,
    "GPUs": card_checks.check_cards,
    "GPU buffers": card_checks.check_card_buffers,
    "all-reduce": network_checks.check_all_reduce,
}


def main(argv: Sequence[str]) -> int:
    """Print the page, on rank 0 only, and return the exit status; Collective under a launcher."""
    options = parser().parse_args(argv)
    os.environ.setdefault(TIMEOUT, _PATIENCE)
    try:
        launcher = detect_launcher()
        slurm_tasks(os.environ)  # which checks read too
    except (LaunchError, ValueError) as error:
        print(f"mpidist doctor: {error}", file=sys.stderr)
        return 2
    if launcher is not None:
        return _of_ranks(launcher, options)
    findings = diagnose(_alone(options.folder))
    if options.launch:
        tried = _launch(options.folder)
        names = {finding.check for finding in tried}
        findings = [*tried, *(each for each in findings if each.check not in names)]
        findings.sort(key=lambda finding: list(CHECKS).index(finding.check))
    return _print(findings, options.json)


def parser() -> Parser:
    """Return the parser of ``mpidist doctor``'s arguments."""
    what = (
        "Look for what is wrong, a line a finding: ok, warn or FAIL, and the command that mends it. Under mpirun and "
        "srun all ranks look, and one page is printed."
    )
    parser = Parser("doctor", what, _EXAMPLES)
    parser.add_argument("--folder", default=".", metavar="DIR", help="where checkpoints are to be (the current folder)")
    parser.add_argument("--launch", action="store_true", help="start two ranks of mpidist run, and look at them too")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def diagnose(case: Case) -> list[Finding]:
    """Return what all checks find in a case.  Local."""
    return [finding.named(name) for name, find_fn in CHECKS.items() for finding in find_fn(case)]


def _alone(folder: str) -> Case:
    """Return the case of this machine, without starting ranks."""
    mpi = probe_mpi(start=True)
    mpirun, mpirun_error = "", ""
    try:
        mpirun = find_mpirun(mpi).title
    except LaunchError as error:
        mpirun_error = str(error)
    plugins, plugin = _srun()
    return Case(
        ranks=(observe(folder, mpi.title, asks_mpi=True),),
        mpi=mpi.title,
        mpi_error=mpi.error or "mpi4py is not installed",
        mpirun=mpirun,
        mpirun_error=mpirun_error,
        plugins=plugins,
        plugin=plugin,
    )


def _srun() -> tuple[tuple[str, ...] | None, str]:
    """Return the plugins that srun has for MPI, None where it shows none, and the one that it takes by itself."""
    plugins = offered_plugins()
    if not plugins:
        return None, ""
    default = re.search(r"^MpiDefault\s*=\s*(\S+)", said(["scontrol", "show", "config"], 20), re.MULTILINE)
    return plugins, os.environ.get("SLURM_MPI_TYPE") or (default[1] if default else "none")


def _of_ranks(launcher: Launcher, options: Namespace) -> int:
    """Look at all ranks of a job, and print the page on rank 0."""
    case = Case((), launcher)
    try:
        if settings().no_mpi:
            raise LaunchError(f"{NO_MPI}=1 is set, so each task of {launcher.name} is a world of one rank")
        communicator = world_communicator()
        MPI = start_mpi(launcher)  # it runs already
        mpi = communicator.transport.library
        level = next(
            name for name in dir(MPI) if name.startswith("THREAD_") and getattr(MPI, name) == MPI.Query_thread()
        )
        rank = communicator.rank
        own = observe(options.folder, mpi, asks_mpi=rank == 0)
        own = replace(own, host=communicator.topology.hosts[rank])
        ranks = tuple(all_gather_object(communicator, own))
        case = replace(case, ranks=ranks, mpi=mpi)
        case = replace(case, joint=try_together(communicator, level, options.folder))
    except (MpidistError, ImportError, RuntimeError, OSError, ValueError) as error:
        if launcher.rank != 0:
            return _beside(launcher, error)
        mpi, rank = case.mpi or probe_mpi().title, 0
        ranks = case.ranks or (observe(options.folder, mpi, asks_mpi=False),)
        case = replace(case, ranks=ranks, mpi=mpi, mpi_error=str(error), join_error=str(error))
    return _print(diagnose(case), options.json) if rank == 0 else 0


def _beside(launcher: Launcher, error: Exception) -> int:
    """Say what is wrong with this rank alone; rank 0 says what is wrong with all."""
    if isinstance(error, MpidistError) and ("mpi4py.MPI" in sys.modules or settings().no_mpi):
        return 0
    print(f"mpidist doctor: rank {launcher.rank}: {error}", file=sys.stderr)
    return 2


def _launch(folder: str) -> list[Finding]:
    """Return the findings of two ranks that `mpidist run` starts here."""
    command = [sys.executable, "-m", "mpidist", "run", *run.words_for(2, "doctor", "--json", "--folder", folder)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LAUNCH_PATIENCE
        )
        page = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        problem = f"two ranks did not end within {_LAUNCH_PATIENCE:g} s"
    except ValueError:
        problem = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    else:
        return [Finding(**each) for each in page["findings"]]
    return [fail(f"mpidist run: {problem}", "mpidist run -n 2 -m mpidist doctor").named("world")]


def _print(findings: Sequence[Finding], as_json: bool) -> int:
    """Print the page, and return the exit status."""
    worst = status(findings)
    if as_json:
        page = {"status": ("healthy", "warnings", "broken")[worst], "findings": [*map(asdict, findings)]}
        print(json.dumps(page, indent=1), flush=True)
        return worst
    counts = {level: sum(finding.level == level for finding in findings) for level in (OK, WARN, FAIL)}
    lines = [*map(str, findings), "", f"{counts[OK]} ok, {counts[WARN]} warn, {counts[FAIL]} FAIL"]
    print("\n".join(lines), flush=True)
    return worst
