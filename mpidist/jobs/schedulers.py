"""The schedulers, a row each: how a job is submitted, looked at and ended.

A new scheduler is a row here, a template of its name in ``templates/``, and scripts in ``jobscripts/``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mpidist.cluster.slurm_plugins import PLUGINS


@dataclass(frozen=True)
class Scheduler:
    """What the command needs to know of a scheduler.

    Attributes
    ----------
    title : str
        Its name in sentences.
    submit : tuple of str
        Submits the script whose path is added.
    job_id : str
        A pattern; its group is the job's number in what `submit` prints.
    status, cancel : tuple of str
        Print the state of the job whose number is added; end it.
    state : str
        A pattern; its groups are a state, and more about it, in what `status` prints for each part of the job.
    alive : str
        A pattern of the states, in small letters, of a job that waits or runs.
    unknown_job : str
        A pattern of the error of `status` for a job that has ended long ago.
    output : str
        The name of a job's output, with ``{name}``, ``{job}`` and ``{number}``, the digits of the latter.
    array_output : str
        The same of the tasks of an array, as a pattern of the shell.
    check : tuple of str
        Checks a script without submitting it; empty where there is no such command.
    out_of_reach : str
        A pattern of what `check` says, in any letters, where the machine has the commands and not the scheduler.
    reads_script : bool
        Whether `submit` reads the script from its standard input.
    splits_at_colons : bool
        Whether what starts the ranks takes a ':' among their arguments for the end of them.
    counts_gpus_by_rank : bool
        Whether a script asks for GPUs by rank, so that each rank has one, or none has.
    most_notice : float
        Seconds before the time limit at which a signal is sent at the earliest.
    plugins : mapping
        MPI -> how ranks that the scheduler starts find each other; empty where ``mpidist run`` starts them.
    lacks : mapping
        What it does not have -> why, and what to do.
    """

    title: str
    submit: tuple[str, ...]
    job_id: str
    status: tuple[str, ...]
    cancel: tuple[str, ...]
    state: str
    alive: str
    unknown_job: str
    output: str
    array_output: str = ""
    check: tuple[str, ...] = ()
    out_of_reach: str = ""
    reads_script: bool = False
    splits_at_colons: bool = False
    counts_gpus_by_rank: bool = False
    most_notice: float = math.inf
    plugins: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)

    def read_job_id(self, printed: str) -> str:
        """Return the job's number in what the submit command printed; ValueError where there is none."""
        match = re.search(self.job_id, printed, re.MULTILINE)
        if match is None:
            raise ValueError(f"{self.submit[0]} printed {printed.strip()!r}, in which there is no job's number")
        return match[1]


def _slurm_only(**others: str) -> dict[str, str]:
    """Return what templates of other schedulers do not have."""
    names = ("servers", "array", "apptainer", "pyxis")
    return {name: "scripts for Slurm only have it; expected a request without it" for name in names} | others


SCHEDULERS = {
    "slurm": Scheduler(
        title="Slurm",
        submit=("sbatch", "--parsable"),
        job_id=r"^(\d+)(?:;.*)?$",
        status=("squeue", "--noheader", "--states=all", "--format=%i|%T|%M %R", "--jobs"),
        cancel=("scancel",),
        state=r"^[^|]*\|([A-Z_]+)\|(.*)$",
        alive="pending|configuring|running|completing|requeued|requeue_hold|suspended|resizing|signaling|stage_out|stopped",
        unknown_job="Invalid job id",
        output="{name}-{job}.out",
        array_output="{name}-{job}_*.out",
        check=("sbatch", "--test-only"),
        out_of_reach="could not establish a configuration source|unable to contact slurm controller",
        splits_at_colons=True,
        most_notice=65535,  # by its manual
        plugins=PLUGINS,
    ),
    "pbs": Scheduler(
        title="PBS Pro",
        submit=("qsub",),
        job_id=r"^(\d\S*)$",
        status=("qstat", "-x", "-f"),
        cancel=("qdel",),
        state=r"^ *job_state = (\w)()$",
        alive="[behqrstuw]",
        unknown_job="Unknown Job",
        output="{name}.o{number}",
        lacks=_slurm_only(),
    ),
    "lsf": Scheduler(
        title="LSF",
        submit=("bsub",),
        job_id=r"^Job <(\d+)>",
        status=("bjobs", "-noheader", "-o", "stat exec_host"),
        cancel=("bkill",),
        state=r"^([A-Z]+) +(.*)$",
        alive="pend|prov|psusp|run|ssusp|ususp|wait|unkwn|zombi",
        unknown_job="is not found",
        output="{name}-{job}.out",
        reads_script=True,
        lacks=_slurm_only(memory="its unit is the site's; expected --directive='-R \"rusage[mem=NUMBER]\"'"),
    ),
    "sge": Scheduler(
        title="Grid Engine",
        submit=("qsub", "-terse"),
        job_id=r"^(\d+)",
        # the fifth column of its table of jobs is the state; `qstat -j` does not have it
        status=("sh", "-c", "qstat | awk -v job=\"$1\" '$1 == job {print $5, $8}'", "sh"),
        cancel=("qdel",),
        state=r"^(\w+) ?(.*)$",
        alive="[a-z]+",
        unknown_job="do not exist",
        output="{name}-{job}.out",
        lacks=_slurm_only(
            memory="the resource's name is the site's; expected --directive='-l h_vmem=4G' or what qconf -sc shows",
            gpus_per_node="the resource's name is the site's; expected --directive='-l gpu=4' or what qconf -sc shows",
        ),
    ),
    "flux": Scheduler(
        title="Flux",
        submit=("flux", "batch"),
        job_id=r"^(\S+)$",
        status=("flux", "jobs", "--no-header", "--format={status} {nodelist}"),
        cancel=("flux", "cancel"),
        state=r"^(\w+) *(.*)$",
        alive="depend|priority|sched|run|cleanup",
        unknown_job="unknown|not found|invalid",
        output="{name}-{job}.out",
        counts_gpus_by_rank=True,
        plugins={"Open MPI": "pmix", "MPICH": "simple"},
        lacks=_slurm_only(memory="Flux has no such resource; expected --directive=--exclusive for whole nodes"),
    ),
}
