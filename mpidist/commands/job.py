"""``mpidist job``: the script of a batch job, filled in, checked and submitted."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpidist.cluster.launchers import family
from mpidist.cluster.programs import answer
from mpidist.commands.job_control import VERBS, submit
from mpidist.commands.launch.probe import probe_mpi
from mpidist.commands.parser import Parser
from mpidist.commands.site_page import add_site_options, given_defaults, sources
from mpidist.jobs.options import OPTIONS, command_line, read_options
from mpidist.jobs.request import Request, find_scheduler
from mpidist.jobs.schedulers import SCHEDULERS, Scheduler
from mpidist.jobs.script import fill_in
from mpidist.jobs.site import NAME, Default
from mpidist.whole_file import written

_EXAMPLES = f"""examples:
  mpidist job slurm --nodes 4 --gpus-per-node 4 --cores 8 --time 4h train.py -- --epochs 90
  mpidist job slurm --nodes 2 --ranks-per-node 8 --requeue 10 -o job.sh train.py -- --checkpoint {{checkpoints}}

In the script's arguments {{folder}} is the job's own folder, {{checkpoints}} one in it, and {{task}} the number of an
array's task. Defaults of a site are in the table [job] of {NAME}, here or in ~/.config/mpidist: any option, by
its name (partition = "gpu", setup = ["module load openmpi"]).
"""


def parser() -> Parser:
    """Return the parser of ``mpidist job``'s arguments."""
    parser = Parser(
        "job",
        f"Print the script of a batch job, for {', '.join(SCHEDULERS)}.",
        _EXAMPLES,
        usage="mpidist job SCHEDULER [options] SCRIPT [-- arguments] | status|logs|cancel [JOB] | --show-site",
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="SCHEDULER SCRIPT", help="who runs the job, and a Python file")
    for name, option in OPTIONS.items():
        add(f"--{name}", action="append", metavar=option.metavar, help=option.what, dest=name)
    add("-o", "--output", default=None, metavar="FILE", help="write the script there; a file that differs is kept")
    add("--submit", action="store_true", default=False, help="write the script (NAME.sh), and submit it")
    add_site_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Print, write or submit the script, or look after a job; return the exit status; Local."""
    if argv and argv[0] in VERBS:
        return _say_errors(lambda: VERBS[argv[0]](argv[1:]))
    asked, arguments = parse(argv)
    try:
        defaults = given_defaults(asked, "job", OPTIONS)
        if defaults is None:
            return 0
        request, text = make_job(vars(asked), arguments, defaults)
    except (ValueError, ModuleNotFoundError) as error:
        parser().error(str(error))
    scheduler = SCHEDULERS[request.scheduler]
    problems = find_problems(scheduler, text)
    for problem in problems:
        print(f"mpidist job: {problem}", file=sys.stderr)
    path = asked.output or (f"{request.name}.sh" if asked.submit else None)
    if path is None:
        sys.stdout.buffer.write(text.encode())  # as it is written to a file, whatever the locale
        return 0
    if asked.submit and problems:
        return 1
    if not _write(Path(path), text):
        return 1
    if asked.submit:
        return _say_errors(lambda: _submit(request, path))
    line = f"{scheduler.submit[0]} {'< ' if scheduler.reads_script else ''}{shlex.quote(path)}"
    print(f"mpidist job: wrote {path}; submit it: {line}", file=sys.stderr)
    return 0


def _submit(request: Request, path: str) -> int:
    """Submit the script, and say how the job is looked after."""
    job, is_known = submit(request, path)
    print(f"mpidist job: submitted {path} as job {job.job}; its output: {job.output}")
    if is_known:
        print(f"mpidist job: mpidist job status {job.job}, mpidist job logs -f {job.job}, mpidist job cancel {job.job}")
    return 0


def _say_errors(action: Callable[[], int]) -> int:
    """Return the exit status of an action; one that fails says why, in one line."""
    try:
        return action()
    except ValueError as error:
        print(f"mpidist job: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None:  # of the output
            raise
        print(f"mpidist job: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # of someone who has seen enough of `logs -f`
        return 128 + signal.SIGINT


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and what follows ``--``; leave by way of the parser where an option is unknown."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    asked, unknown = parser().parse_known_intermixed_args(words[:cut])
    if unknown:
        parser().refuse(unknown, f"arguments of the script come after --: train.py -- {unknown[0]}")
    return asked, words[cut + 1 :]


def make_job(
    asked: Mapping[str, Any], arguments: Sequence[str], defaults: Mapping[str, Default]
) -> tuple[Request, str]:
    """Return the job that options ask for, and its script; ValueError with the accepted form if they ask for none."""
    words = asked.get("words", [])
    scheduler = find_scheduler(words[0]) if words else None
    if scheduler is None or len(words) != 2:
        got = " ".join(words) or "nothing"
        raise ValueError(f"expected a scheduler and a Python file, as in: mpidist job slurm train.py; got {got}")
    chosen = {name: asked[name] for name in OPTIONS if name in asked}
    used = {name: default for name, default in defaults.items() if name not in chosen}
    origins = {name: f"--{name}" for name in chosen}
    origins |= {name: f"{default.file}: {name}" for name, default in used.items()}
    fields = read_options({**{name: default.values for name, default in used.items()}, **chosen}, origins)
    request = Request(words[0], words[1], tuple(arguments), **{**_implied(scheduler, words[1], fields), **fields})
    line = shlex.join(command_line(words[0], chosen, words[1], arguments))
    return request, fill_in(request, line, sources(used))


def _implied(scheduler: Scheduler, script: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from other options, from this interpreter and from its MPI, where it is not given."""
    in_container = bool(fields.get("apptainer") or fields.get("pyxis"))
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", Path(script).stem)
    implied = {
        "ranks_per_node": fields.get("gpus_per_node") or 1,
        "name": stem if stem[:1].isalpha() else f"job-{stem}",
        "python": "python3" if in_container else sys.executable,
    }
    if scheduler.plugins and "mpi" not in fields:
        implied["mpi"] = _plugin(scheduler, in_container)
    return implied


def _plugin(scheduler: Scheduler, in_container: bool) -> str:
    """Return how the ranks of this interpreter's MPI find each other; ValueError where that cannot be told."""
    forms = ", ".join(f"{plugin} for {mpi}" for mpi, plugin in scheduler.plugins.items())
    expected = f"expected --mpi HOW: {forms}"
    if in_container:
        raise ValueError(f"the MPI in a container cannot be seen from here; {expected}")
    mpi = probe_mpi()
    plugin = scheduler.plugins.get(family(mpi.library or mpi.vendor))
    if plugin is None:
        raise ValueError(f"mpi4py loads {mpi.title or f'no MPI here ({mpi.error})'}; {expected}")
    return plugin


def _write(path: Path, text: str) -> bool:
    """Write a script that can be run; a file that differs is kept, and said."""
    try:
        if path.is_file() and path.read_bytes() != text.encode():
            print(f"mpidist job: {path} exists and differs: remove it, or give another name with -o", file=sys.stderr)
            return False
        if not path.is_file():
            with written(path) as file:
                file.write(text.encode())
                if not path.exists():  # else it is a device, or a pipe
                    os.chmod(file.fileno(), 0o755)
        return True
    except OSError as error:
        print(f"mpidist job: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return False


#: Seconds after which a scheduler that does not answer is left alone.
_PATIENCE = 20.0


def find_problems(scheduler: Scheduler, text: str) -> list[str]:
    """Return what is wrong with a script, each in one line; programs that are not here find nothing."""
    problems = [_problem(("bash", "-n", "/dev/stdin"), text), _problem(("shellcheck", "-"), text)]
    if scheduler.check:
        said = _problem(scheduler.check, text)
        if scheduler.out_of_reach and re.search(scheduler.out_of_reach, said, re.IGNORECASE):
            said = f"{scheduler.title} cannot be reached from here, and has not checked the script: {said}"
        problems.append(said)
    return [problem for problem in problems if problem]


def _problem(command: Sequence[str], text: str) -> str:
    """Return what a program says about the script in its standard input; empty where it finds no fault."""
    if shutil.which(command[0]) is None:
        return ""
    _, faults = answer(command, _PATIENCE, text)
    shown = " ".join(word for word in command if word not in ("-", "/dev/stdin"))
    return f"{shown}: {'; '.join(line.strip() for line in faults[-3:] if line.strip())}" if faults else ""
