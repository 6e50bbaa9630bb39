"""Checks of what has to be alike on all ranks: software, settings, the working folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpidist.diagnosis.case import Case, Observation, ranks_text
from mpidist.diagnosis.finding import Finding, fail, ok, warn

#: What may differ between ranks at a price only; all else of `Observation.software` must not.
_MAY_DIFFER = ("Python's path", "mpidist's path", "h5py")


def check_software(case: Case) -> Iterator[Finding]:
    """Find versions and paths that differ."""
    if case.size == 1:
        return
    differ = False
    environment = case.own.software.get("Python's path", "ENVIRONMENT/bin/python").rpartition("/bin/")[0]  # rank 0's
    for what in case.own.software:
        if text := _unlike(case, lambda rank, what=what: rank.software.get(what, "none")):  # type: ignore[misc]
            differ = True
            judge = warn if what in _MAY_DIFFER else fail
            yield judge(f"{what} differs: {text}", f"source {environment}/bin/activate")
    if not differ:
        yield ok(f"{', '.join(case.own.software)}: alike on all ranks")


def check_working_folder(case: Case) -> Iterator[Finding]:
    """Find ranks that were started in another folder, as Slurm does where the node does not have it."""
    if case.size == 1:
        return
    text = _unlike(case, lambda rank: rank.environ.get("PWD", ""))
    if text:
        yield fail(f"differs, so the node does not have it: {text}", "cd $SCRATCH")
    else:
        yield ok(f"{case.own.environ.get('PWD', '')} on all ranks")


def check_settings(case: Case) -> Iterator[Finding]:
    """Find variables ``MPIDIST_*`` that differ."""
    names = sorted({name for rank in case.ranks for name in rank.environ if name.startswith("MPIDIST_")})
    for name in names:
        if text := _unlike(case, lambda rank, name=name: rank.environ.get(name, "not set")):  # type: ignore[misc]
            yield fail(f"{name} differs: {text}", f"mpidist run -x {name}; srun --export=ALL")


def _unlike(case: Case, value_fn: Callable[[Observation], str]) -> str:
    """Return who has which value; empty where all have the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, observation in enumerate(case.ranks):
        ranks_of.setdefault(value_fn(observation), []).append(rank)
    if len(ranks_of) == 1:
        return ""
    shown = [f"{value} on {ranks_text(ranks)} ({case.ranks[ranks[0]].host})" for value, ranks in ranks_of.items()]
    return ", ".join(shown[:4])
