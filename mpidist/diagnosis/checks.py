"""The checks that there are, a row each, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mpidist.diagnosis import card_checks, launch_checks, network_checks, node_checks
from mpidist.diagnosis.case import Case
from mpidist.diagnosis.finding import Finding


@dataclass(frozen=True)
class Check:
    """A check: its name on the page, and the function that returns what it finds in a case."""

    name: str
    find_fn: Callable[[Case], Iterable[Finding]]


CHECKS = (
    Check("MPI", launch_checks.check_mpi),
    Check("mpirun", launch_checks.check_mpirun),
    Check("srun", launch_checks.check_srun),
    Check("world", launch_checks.check_world),
    Check("placement", launch_checks.check_placement),
    Check("PMI", launch_checks.check_pmi),
    Check("thread level", launch_checks.check_threads_of_mpi),
    Check("software", launch_checks.check_software),
    Check("working folder", launch_checks.check_working_folder),
    Check("settings", launch_checks.check_settings),
    Check("cores", node_checks.check_cores),
    Check("threads", node_checks.check_threads),
    Check("shared memory", node_checks.check_shared_memory),
    Check("memory", node_checks.check_memory),
    Check("limits", node_checks.check_limits),
    Check("interfaces", network_checks.check_interfaces),
    Check("node pairs", network_checks.check_pairs),
    Check("clocks", network_checks.check_clocks),
    Check("folder", node_checks.check_folder),
    Check("file locks", node_checks.check_locks),
    Check("h5py", node_checks.check_h5py),
    Check("GPUs", card_checks.check_cards),
    Check("GPU buffers", card_checks.check_card_buffers),
    Check("all-reduce", network_checks.check_all_reduce),
)


def diagnose(case: Case) -> list[Finding]:
    """Return what all checks find in a case.  Local."""
    return [finding.named(check.name) for check in CHECKS for finding in check.find_fn(case)]
