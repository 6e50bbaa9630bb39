"""Children of ranks: they inherit the launcher's variables, start no MPI, and a use of mpidist in them says why."""

from __future__ import annotations

import pytest

from tests.jobs import run_job

BEGIN = """
import multiprocessing, os, subprocess, sys
import mpidist
from mpidist.errors import LaunchError

def use():
    try:
        return f"rank {mpidist.rank()}"
    except LaunchError as error:
        return str(error)

def said(text):
    return "refused" if "is a child of rank" in text and "MPI was not started in it" in text else text

def answer(queue):
    queue.put(use())
"""

BY_MULTIPROCESSING = """
if __name__ == "__main__":
    early = sys.argv[2] == "early"  # before the rank has asked for anything
    rank = None if early else mpidist.rank()
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.SimpleQueue()
    child = context.Process(target=answer, args=(queue,))
    child.start()
    found = said(queue.get())
    child.join()
    rank = mpidist.rank()
    mpidist.barrier()
    os.write(1, f"rank {rank}: {found} {child.exitcode}\\n".encode())
"""


BY_HAND = """
rank = mpidist.rank()
own = "import mpidist; print(mpidist.rank())"
alone = "import mpidist; print(mpidist.size())"
refused = subprocess.run([sys.executable, "-c", own], capture_output=True, text=True)
shell = subprocess.run(["sh", "-c", f"{sys.executable} -c '{own}'; true"], capture_output=True, text=True)
single = subprocess.run(
    [sys.executable, "-c", alone], capture_output=True, text=True, env={**os.environ, "MPIDIST_NO_MPI": "1"}
)
mpidist.barrier()
found = [said(refused.stderr), said(shell.stderr), single.stdout.strip()]
os.write(1, f"rank {rank}: {found}\\n".encode())
"""

AT_MODULE_LEVEL = """
import multiprocessing, os, sys
import mpidist

strategy = mpidist.MultiWorkerMirroredStrategy()

if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=print)
    child.start()
    child.join()
    strategy.barrier()
    os.write(1, f"{child.exitcode}\\n".encode())
"""


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("how", ["forkserver", "spawn"])
def test_a_child_of_multiprocessing_is_no_rank(how, when):
    result = run_job(2, BEGIN + BY_MULTIPROCESSING, [how, when])
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"rank {rank}: refused 0" for rank in range(2)]


def test_a_child_started_by_hand_is_no_rank_unless_it_works_alone():
    result = run_job(2, BEGIN + BY_HAND)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"rank {rank}: {['refused', 'refused', '1']}" for rank in range(2)]


@pytest.mark.parametrize("how", ["forkserver", "spawn"])
def test_a_strategy_at_module_level_ends_the_child_with_the_cure_and_not_the_job(how):
    result = run_job(2, AT_MODULE_LEVEL, [how])
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1", "1"]
    for rank in range(2):
        assert f"is a child of rank {rank} of 2" in result.stderr and "if __name__ == '__main__'" in result.stderr


def test_a_rank_may_start_a_job_of_its_own():
    inner = "import mpidist, os; os.write(1, f'inner {mpidist.rank()} of {mpidist.size()}{chr(10)}'.encode())"
    script = f"""
import subprocess, sys, mpidist
if mpidist.rank() == 0:
    run = [sys.executable, "-m", "mpidist", "run", "--quiet", "-n", "1"]
    subprocess.run([*run, sys.executable, "-c", {inner!r}], check=True)
mpidist.barrier()
"""
    result = run_job(2, script)
    assert (result.returncode, result.stdout.split("\n")) == (0, ["inner 0 of 1", ""]), result.stderr
