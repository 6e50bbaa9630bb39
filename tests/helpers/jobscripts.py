"""The scripts of `jobscripts/`: each is what the command line in its header prints.  As a program: writes them."""

from __future__ import annotations

import shlex
from pathlib import Path

from mpidist.commands.job import make_job, parse
from tests.helpers.pages import ROOT

FOLDER = ROOT / "jobscripts"

_HEADER = "# Printed by: mpidist job "

#: A training that ends only after a restart; its argument is the folder of its checkpoints.
TRAINING = """
import sys, time
import numpy, mpidist

strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    v = mpidist.Variable(numpy.zeros(2), name="v")
config = mpidist.experimental.TerminationConfig(signals=["SIGUSR1"])
handler = mpidist.experimental.PreemptionCheckpointHandler(
    strategy.cluster_resolver, mpidist.Checkpoint(v=v), sys.argv[1], config)
first = handler.total_run_calls
if mpidist.rank() == 0:
    print("begins at", first, flush=True)

def step():
    v.assign_add(numpy.ones(2))
    time.sleep(0.02)

while not first or handler.total_run_calls < first + 5:
    handler.run(step)
if mpidist.rank() == 0:
    print("done:", handler.total_run_calls - first, v.value.tolist() == [handler.total_run_calls] * 2, flush=True)
"""


def scripts() -> list[Path]:
    """Return the scripts, of all schedulers."""
    return sorted(FOLDER.glob("*/*.sh"))


def words_of(text: str) -> list[str]:
    """Return the arguments of ``mpidist job`` in a script's header."""
    (line,) = [line for line in text.splitlines() if line.startswith(_HEADER)]
    return shlex.split(line.removeprefix(_HEADER))


def printed(words: list[str]) -> str:
    """Return what ``mpidist job`` prints in the root of the checkout, where no site has defaults."""
    asked, arguments = parse(words)
    return make_job(vars(asked), arguments, {})[1]


if __name__ == "__main__":
    for path in scripts():
        path.write_text(printed(words_of(path.read_text())))
