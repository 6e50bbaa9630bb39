"""What Slurm's ``srun`` needs to make one world of its tasks: the plugin that fits the MPI that mpi4py loads."""

from __future__ import annotations

import re

from mpidist.cluster.programs import said

#: MPI, by `family` -> the value of ``srun --mpi`` for it.
PLUGINS = {"Open MPI": "pmix", "MPICH": "pmi2"}


def family(mpi: str) -> str:
    """Return "Open MPI" or "MPICH" for an MPI that behaves like it at launch, by its name or version text; else ""."""
    if "Open MPI" in mpi or "Spectrum MPI" in mpi:
        return "Open MPI"
    derived = ("MPICH", "MVAPICH", "Intel")
    return "MPICH" if any(name in mpi for name in derived) else ""


def plugin_for(mpi: str) -> str | None:
    """Return the plugin for an MPI, by its name or version text; None for one that is not known."""
    return PLUGINS.get(family(mpi))


def offered_plugins() -> tuple[str, ...]:
    """Return the plugins that srun has here; none where there is no srun, or it does not say.  Local."""
    return listed_plugins(said(["srun", "--mpi=list"], 20))


def listed_plugins(text: str) -> tuple[str, ...]:
    """Return what ``srun --mpi=list`` prints: a plugin in a line, with or without ``srun:``, and versions of one."""
    found = re.findall(r"^(?:srun:)?[ \t]*([a-z][\w.-]*)[ \t]*$|versions available:(.*)$", text, re.MULTILINE)
    return tuple(name.strip() for one, several in found for name in [one, *several.split(",")] if name.strip())


def srun_cure(mpi: str, used: str = "", option: str = "") -> str:
    """Return how to start ranks with srun for an MPI, where the plugin `used` did not help; without a full stop.

    A further `option` is one that the job needs. It quotes what ``srun --mpi=list`` shows, if srun is at hand.
    """
    plugin, offered = plugin_for(mpi), offered_plugins()
    shown = f"`srun --mpi=list` here: {', '.join(sorted(offered))}" if offered else "`srun --mpi=list` shows them"
    if plugin is None or plugin == used:
        return f"Start with another plugin of srun ({shown})"
    if offered and plugin not in offered:
        return f"It takes `srun --mpi={plugin}`, which this Slurm does not have ({shown})"
    return f"Start with `srun --mpi={plugin}{option and ' '}{option}`" + (f" ({shown})" if offered else "")
