"""``mpidist run`` with real ranks: exit codes, signals, tracebacks, and no process left behind."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import uuid

import pytest

from mpidist.commands.launch.probe import without_launcher
from mpidist.commands.launch.rank_processes import processes_of
from mpidist.options import RUN_TOKEN
from tests.helpers.launch import ROOT, launcher, run_process, survivors

#: The rank, by the launcher's word: these scripts need no MPI.
RANK = "import os, sys\nrank = int(os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')))\n"

#: A rank that names the signal it gets, then ends; it waits for the signal without going to sleep for good.
WAITING = (
    RANK
    + """
import signal, threading
done = threading.Event()
def note(signum, frame):
    print("rank", rank, signal.Signals(signum).name, flush=True)
    done.set()
for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), note)
print("ready", flush=True)
sys.exit(0 if done.wait(60) else 1)
"""
)


def environ():
    return {**without_launcher(os.environ), "PYTHONPATH": str(ROOT)}


def command(*arguments):
    return [sys.executable, "-m", "mpidist", "run", *arguments]


def run(tmp_path, script, *options, ranks=2, arguments=()):
    path = tmp_path / "script.py"
    path.write_text(script)
    return run_process(command("-n", str(ranks), *options, str(path), *arguments), environ(), 300)


#: What launchers, MPI and libevent say around the end of a job.
NOISE = re.compile(r"MPI_ABORT was|prterun |Primary job|\[warn\]|-{74}|={83}|BAD TERMINATION|EXIT STRING|Abort\(")


def last_words(result, rank):
    """Return the traceback that is printed before the last line, which says whose it is; there is nothing else."""
    last = f"mpidist run: rank {rank} failed first; its traceback is above\n"
    before, heading, after = result.stderr.rpartition(last)
    assert heading and not after and not NOISE.search(before), result.stderr
    return before[before.rindex("Traceback (most recent call last):\n") :]


def test_every_rank_runs_the_script_with_its_arguments(tmp_path):
    script = RANK + "print(rank, sys.argv[1:], os.environ['OMP_NUM_THREADS'], flush=True)"
    result = run(tmp_path, script, ranks=3, arguments=["--epochs", "2"])
    assert result.returncode == 0
    lines = sorted(result.stdout.split("\n"))
    assert [line[:18] for line in lines if line] == [f"{rank} ['--epochs', '2']"[:18] for rank in range(3)]
    assert "OMP_NUM_THREADS" in result.stderr or "OMP_NUM_THREADS" in os.environ


def test_ranks_form_one_world(tmp_path):
    script = "from mpi4py import MPI\nprint(MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1), flush=True)"
    result = run(tmp_path, script, "--quiet", ranks=3)
    assert (result.returncode, result.stdout.split()) == (0, ["6", "6", "6"])
    assert "mpidist run:" not in result.stderr


def test_a_module_and_any_program_can_be_run():
    for program in (["-m", "platform"], [sys.executable, "-c", "print('here')"]):
        result = run_process(command("-n", "2", "--quiet", *program), environ(), 300)
        assert result.returncode == 0
        assert len(result.stdout.split("\n")) == 3


def test_the_exit_code_is_passed_on(tmp_path):
    assert run(tmp_path, RANK + "sys.exit(3 if rank == 1 else 0)").returncode == 3


def test_a_traceback_is_the_last_thing(tmp_path):
    result = run(tmp_path, RANK + "if rank == 1: raise ValueError('two\\nlines')")
    assert result.returncode == 1
    assert last_words(result, 1).endswith("ValueError: two\nlines\n")


def test_all_ranks_failing_at_once_give_whole_tracebacks(tmp_path):
    result = run(tmp_path, "import no_such_module", ranks=4)
    assert result.returncode == 1
    last = "ModuleNotFoundError: No module named 'no_such_module'"
    assert re.search(r"\nmpidist run: rank \d failed first; its traceback (is above|again:)\n", result.stderr)
    # at least one rank got to print before the launcher ended the others, and no line is torn
    lines = [line for line in result.stderr.split("\n") if "no_such_module'" in line]
    assert len(lines) >= 2
    assert set(lines) == {last}


def test_a_syntax_error_is_told(tmp_path):
    result = run(tmp_path, "def f(:\n")
    assert result.returncode == 1
    assert re.search(r"\nSyntaxError.*\n.*mpidist run: rank \d failed first; its traceback is above\n\Z", result.stderr)


def test_a_framed_failure_makes_the_job_fail_whatever_the_launcher_says(tmp_path):
    frame = "mpidist: rank 1 of 2 failed\nTraceback (most recent call last):\nValueError: a\nmpidist: end of rank 1\n"
    result = run(tmp_path, RANK + f"if rank == 1: sys.stderr.write({frame!r})")
    assert result.returncode == 1
    assert last_words(result, 1) == "Traceback (most recent call last):\nValueError: a\nmpidist: end of rank 1\n"


def test_a_traceback_out_of_sight_is_told_again(tmp_path):
    frame = "mpidist: rank 1 of 2 failed\nTraceback (most recent call last):\nValueError: a\nmpidist: end of rank 1\n"
    result = run(tmp_path, RANK + f"if rank == 1: sys.stderr.write({frame!r} + 'progress\\n' * 20)")
    last = "mpidist run: rank 1 failed first; its traceback again:\nTraceback (most recent call last):\nValueError: a\n"
    assert result.stderr.endswith(last), result.stderr


def test_what_mpi_says_of_the_end_is_shown_where_nothing_else_tells_of_it(tmp_path):
    result = run(tmp_path, "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: MPI.COMM_WORLD.Abort(5)")
    assert result.returncode == 5
    assert re.search(r"MPI_ABORT was invoked on rank 1 |Abort\(5\) on node 1 ", result.stderr), result.stderr


def test_a_rank_that_is_killed_takes_few_lines(tmp_path):
    script = """
import os
import numpy
from mpidist.world import world_communicator
communicator = world_communicator()
if communicator.rank == 1: os.kill(os.getpid(), 9)
communicator.all_reduce(numpy.ones(4))
"""
    result = run(tmp_path, script, "--quiet", ranks=4)
    assert result.returncode == 137
    # MPICH's launcher ends the others at once, by the same signal
    who = r"(rank 1 \(process \d+ on .*\)|one of ranks [\d, ]*\b1\b.*)"
    assert re.search(rf"^mpidist run: {who} was ended by signal 9", result.stderr, re.MULTILINE), result.stderr
    assert len(result.stderr.splitlines()) <= 20 and not NOISE.search(result.stderr), result.stderr


#: Ends rank 1 in some way while the others wait for it in MPI.
LOST = """
import os, signal, sys
from mpi4py import MPI
memory = b"x" * (0 if MPI.COMM_WORLD.rank == 1 else 1 << 27)  # it takes time to end a rank that has much
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1: {end}
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize(
    "end, told, status",
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by signal 9", 128 + signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was ended by signal 11", 128 + signal.SIGSEGV),
        ("os._exit(7)", "ended first, with status 7", 7),
    ],
)
def test_the_rank_that_ended_first_is_named(tmp_path, end, told, status):
    result = run(tmp_path, LOST.format(end=end), ranks=3)
    assert result.returncode == status, result.stderr
    said = re.findall(rf"mpidist run: (?:one of )?(ranks? .+) \(.+\) {told}", result.stderr)
    assert len(said) == 1 and said[0] in ("rank 1", "ranks 0, 1", "ranks 1, 2", "ranks 0, 1, 2"), result.stderr


#: A program of mpi4py alone: MPI's end waits for all ranks, and those that wait for rank 1 do not come to it.
ALONE = """
import os, sys, threading, time
from mpi4py import MPI
if "python_start" in os.environ.get("PYTHONPATH", "") + "".join(sys.path): sys.exit("a trace of the launcher")
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    {end}
MPI.COMM_WORLD.Barrier()
print("over", flush=True)
"""


@pytest.mark.parametrize(
    ("end", "said", "status"),
    [
        ("raise ValueError('boom')", "ValueError: boom", 1),
        ("threading.Thread(target=time.sleep, args=(1,)).start(); raise ValueError('boom')", "ValueError: boom", 1),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", 128 + signal.SIGINT),
    ],
)
@pytest.mark.parametrize("way", ["file", "module", "python"])
def test_an_exception_of_a_program_of_mpi4py_alone_ends_the_job(tmp_path, way, end, said, status):
    path = tmp_path / "script.py"
    path.write_text(ALONE.format(end=end))
    program = {"file": [str(path)], "module": ["-m", "script"], "python": [sys.executable, str(path)]}[way]
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    result = run_process(command("-n", "3", "--quiet", "--timeout", "60", *program), {**environ(), **paths}, 300)
    assert (result.returncode, result.stdout) == (status, ""), result.stderr
    assert last_words(result, 1).endswith(f"{said}\n")


def test_an_exception_ends_the_job_of_a_program_with_a_hook_of_its_own(tmp_path):
    own = "sys.excepthook = lambda *of: print('own hook:', of[1], file=sys.stderr)"
    result = run(tmp_path, ALONE.format(end=f"{own}; raise ValueError('boom')"), "--timeout", "60", ranks=3)
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    assert "own hook: boom\n" in result.stderr


@pytest.mark.parametrize(
    "survived",
    [
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()",
        "try: 1 / 0\n    except ZeroDivisionError: sys.excepthook(*sys.exc_info())",
        "import ctypes; ctypes.pythonapi.PyRun_SimpleString(b'1 / 0')",  # as C does that calls Python
    ],
)
def test_an_exception_that_does_not_end_its_program_ends_no_job(tmp_path, survived):
    result = run(tmp_path, ALONE.format(end=survived), "--timeout", "60", ranks=3)
    assert (result.returncode, result.stdout) == (0, "over\n" * 3), result.stderr
    assert "ZeroDivisionError" in result.stderr


def test_an_exception_at_a_prompt_ends_no_job():
    program = command("-n", "1", "--quiet", "--timeout", "60", sys.executable, "-i")
    typed = "from mpi4py import MPI\n1 / 0\nprint(MPI.COMM_WORLD.size)\n"
    result = subprocess.run(program, env=environ(), input=typed, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr
    assert "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize("status", [0, 3])
def test_all_ranks_may_leave_a_program_of_mpi4py_alone_by_exit(tmp_path, status):
    result = run(tmp_path, ALONE.format(end="pass") + f"sys.exit({status})", "--timeout", "60", ranks=3)
    assert (result.returncode, result.stdout) == (status, "over\n" * 3), result.stderr
    assert "warning: rank" not in result.stderr


@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_that_waits_for_the_others_at_its_end_is_named(tmp_path, status):
    path = tmp_path / "script.py"
    path.write_text(ALONE.format(end=f"sys.exit({status})"))
    soon = {"MPIDIST_WARN_SECONDS": "1"}
    result = run_process(command("-n", "3", "--timeout", "10", str(path)), {**environ(), **soon}, 300)
    assert result.returncode == 124
    said = re.findall(r"warning: (rank 1 came to the end of its program .* MPI_Finalize for ranks 0, 2)", result.stderr)
    assert len(said) == 1, result.stderr


#: A start of Python that makes way for the next one, as programs that watch others put in front.
FOREMOST = """
import os, sys
sys.path.remove(os.path.dirname(__file__))
del sys.modules["sitecustomize"]
import sitecustomize
"""


@pytest.mark.parametrize("put_in_front", ["", "PYTHONPATH={tmp_path}/foremost:$PYTHONPATH"])
def test_the_users_own_start_of_python_is_run(tmp_path, put_in_front):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['OWN'] = __file__\n")
    (tmp_path / "foremost").mkdir()
    (tmp_path / "foremost" / "sitecustomize.py").write_text(FOREMOST)
    shown = "import os, sys; print(os.environ['OWN'], os.environ['PYTHONPATH'], 'python_start' in str(sys.path))"
    line = f'{put_in_front.format(tmp_path=tmp_path)} exec "$0" "$@"'
    program = ["sh", "-c", line, sys.executable, "-c", shown]
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    result = run_process(command("-n", "2", "--quiet", *program), {**environ(), **paths}, 300)
    kept = f"{tmp_path}/foremost:" if put_in_front else ""
    assert result.stdout == f"{tmp_path}/sitecustomize.py {kept}{tmp_path}:{ROOT} False\n" * 2, result.stderr


def test_who_ended_the_job_by_abort_is_not_taken_for_killed(tmp_path):
    result = run(tmp_path, LOST.format(end="MPI.COMM_WORLD.Abort(5)"), ranks=3)
    assert result.returncode == 5
    assert "mpidist run: rank" not in result.stderr


@pytest.mark.parametrize("end", ["sys.exit(3)", "sys.exit('no data')"])
def test_a_rank_that_leaves_its_script_early_is_named_not_the_one_that_waits(tmp_path, end):
    script = f"""
import sys
import numpy
from mpidist.world import world_communicator
communicator = world_communicator()
communicator.all_reduce(numpy.ones(4))
if communicator.rank == 2: {end}
communicator.all_reduce(numpy.ones(4))
"""
    result = run(tmp_path, script, ranks=3)
    assert result.returncode != 0
    heading = r"mpidist run: rank 2 left early; rank [01] reported it; its traceback is above\n"
    assert re.search(heading, result.stderr), result.stderr


def test_ranks_that_have_lost_their_launcher_are_not_to_blame(tmp_path):
    script = RANK + LAUNCHER + "if rank == 0: os.kill(launcher(), 9)\nimport threading\nthreading.Event().wait(60)"
    result = run(tmp_path, script)
    assert result.returncode == 128 + signal.SIGKILL
    assert "mpidist run: the launcher itself was ended by signal 9\n" in result.stderr
    assert "mpidist run: rank" not in result.stderr


#: Finds the process that `mpidist run` has started: the ancestor of a rank that carries the job's token, and the last.
LAUNCHER = """
def launcher():
    process = os.getpid()
    while True:
        with open(f"/proc/{process}/stat") as file: parent = int(file.read().rpartition(")")[2].split()[1])
        with open(f"/proc/{parent}/environ") as file: ours = os.environ["MPIDIST_RUN_TOKEN"] in file.read()
        if not ours: return process
        process = parent
"""


def test_time_is_up(tmp_path):
    result = run(tmp_path, "import threading\nthreading.Event().wait()", "--timeout", "1")
    assert result.returncode == 124
    assert "--timeout 1 s" in result.stderr


def test_dry_run_prints_and_does_not_run(tmp_path):
    result = run(tmp_path, "print('ran')", "--dry-run", "--launcher-args", "--some 'thing else'", ranks=5)
    assert result.returncode == 0
    assert " -n 5 " in result.stdout
    assert "--some 'thing else' " in result.stdout
    assert result.stdout.rstrip().endswith("script.py")
    assert "ran" not in result.stdout.split()


def dry_run(*options, **variables):
    line = command("--dry-run", *options, "-n", "4", "true")
    plain = {name: value for name, value in environ().items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(line, env={**plain, **variables}, capture_output=True, text=True, timeout=60)


def test_the_cores_are_those_of_a_host_of_the_allocation():
    job = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "far[1-2]", "SLURM_JOB_CPUS_PER_NODE": "600(x2)"}
    result = dry_run(**job, SLURM_TASKS_PER_NODE="2(x2)")
    assert "OMP_NUM_THREADS=300: 600 cores for 2 ranks on far1" in result.stderr
    assert "OVERSUBSCRIBE" not in result.stdout
    assert "far1" not in result.stdout  # both launchers ask Slurm themselves


def test_hosts_that_the_launcher_does_not_ask_for_are_told_to_it():
    result = dry_run(LSB_JOBID="41", LSB_MCPU_HOSTS="far1 3 far2 3")
    assert ("--host far1:3,far2:1 " in result.stdout) == (launcher().vendor == "Open MPI")
    assert "3 cores for 3 ranks on far1" in result.stderr


def test_an_allocation_that_cannot_be_read_is_told_and_the_job_starts():
    result = dry_run(PBS_JOBID="41", PBS_NODEFILE="/no/such/file")
    assert result.returncode == 0
    assert "mpidist run: warning: the hosts of PBS's job cannot be read: " in result.stderr
    assert "for 4 ranks" in result.stderr


SPEAKING = RANK + "print('out', os.environ['FOO'], flush=True)\nprint('an error', file=sys.stderr, flush=True)\n"


def test_each_line_has_its_rank(tmp_path):
    result = run(tmp_path, SPEAKING, "--quiet", "--tag", "-x", "FOO=a b,c")
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, ["[0] out a b,c", "[1] out a b,c"])
    assert sorted(result.stderr.splitlines()) == ["[0] an error", "[1] an error"]


@pytest.mark.parametrize(
    ("end", "told", "status"),
    [
        ("raise ValueError('no data')", "rank 1 failed first; its traceback:\nTraceback .*ValueError: no data\n", 1),
        ("sys.exit('no data')", "rank 1 .*ended first[^\n]*\nmpidist run: its last errors:\n.*no data\n", 1),
        ("os.kill(os.getpid(), 11)", "rank 1 .* ended by signal 11 .*last errors:\nan error\n", 128 + signal.SIGSEGV),
    ],
)
def test_with_files_for_the_output_the_errors_of_who_failed_first_are_still_shown(tmp_path, end, told, status):
    # how a rank ended that is gone before anybody looks at it is not known; and none is left to be killed for another
    script = SPEAKING + f"import time\ntime.sleep(1 + rank)\nif rank == 1: {end}\n"
    logs = tmp_path / "new" / "logs"
    result = run(tmp_path, script, "--quiet", "--log-dir", str(logs), "-x", "FOO=1")
    assert result.returncode == status
    assert re.search(f"mpidist run: {told}", result.stderr, re.DOTALL), result.stderr
    assert f"what the ranks printed is in {logs}\n" in result.stderr
    assert "out 1" not in result.stdout + result.stderr
    assert (logs / "rank1.log").read_text().startswith("out 1\nan error\n")


def test_who_prints_into_files_goes_on_with_them(tmp_path):
    for word in ("one", "two"):
        result = run(tmp_path, SPEAKING, "--quiet", "--log-dir", str(tmp_path / "logs"), "-x", f"FOO={word}")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    for rank in (0, 1):
        assert (tmp_path / "logs" / f"rank{rank}.log").read_text() == "out one\nan error\nout two\nan error\n"


#: In the place of ssh: leaves out options and the host, and runs the rest here, without a variable of ours.
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
shift
unset FOO
exec sh -c "$*"
"""


def test_ranks_on_other_hosts_get_the_variables_that_are_named(tmp_path):
    agent, hosts = tmp_path / "agent", tmp_path / "hosts"
    agent.write_text(AGENT)
    agent.chmod(0o700)
    is_open_mpi = launcher().vendor == "Open MPI"
    hosts.write_text("localhost slots=1\n127.0.0.2:1  # which Open MPI takes for another\n")
    own = f"--mca plm_rsh_agent {agent}" if is_open_mpi else f"-launcher ssh -launcher-exec {agent}"
    options = ["--quiet", "--hostfile", str(hosts), "-x", "FOO", "--tag", "--launcher-args", own]
    path = tmp_path / "script.py"
    path.write_text(SPEAKING)
    result = run_process(command("-n", "2", *options, str(path)), {**environ(), "FOO": "here"}, 300)
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, ["[0] out here", "[1] out here"])


#: Trains until the chief is told to end, and then some: a rank that has exited must not end the others' saving.
PREEMPTED = """
import sys
import numpy
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = mpidist.Variable(numpy.zeros(1 << 16))
config = mpidist.experimental.TerminationConfig(exit_code=17)
handler = mpidist.experimental.PreemptionCheckpointHandler(None, mpidist.Checkpoint(w=w), sys.argv[1], config)
print("ready", flush=True)
while True:
    handler.run(lambda: w.assign_add(strategy.run(lambda: mpidist.get_replica_context().all_reduce("sum", w.value))))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_the_exit_status_of_a_preempted_job_is_passed_on(started, tmp_path, name):
    job = started(PREEMPTED, arguments=[str(tmp_path / "saved")])
    job.process.send_signal(getattr(signal, name))
    assert job.end()[0] == 17
    assert list((tmp_path / "saved").glob("*.h5"))


def test_the_status_that_a_rank_chooses_when_it_is_told_to_end_is_passed_on(started):
    job = started(WAITING.replace("sys.exit(0 if done", "sys.exit(42 if done"))
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 42


class Started:
    """``mpidist run`` in the background, its ranks all waiting."""

    def __init__(self, tmp_path, script, ranks=2, stderr=None, hangup=signal.SIG_DFL, arguments=()):
        path = tmp_path / "script.py"
        path.write_text(script)
        self.token = uuid.uuid4().hex
        self.process = subprocess.Popen(
            command("-n", str(ranks), "--quiet", str(path), *arguments),
            env={**environ(), "TEST_TOKEN": self.token},
            stdout=subprocess.PIPE,
            stderr=stderr,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),  # whatever this process was started under
            bufsize=0,  # so that select below knows of every line that is still to be read
        )
        said = [self.line() for _ in range(ranks)]
        assert set(said) <= {"ready", "and so on"} and said[0] == "ready"

    def line(self):
        ready, _, _ = select.select([self.process.stdout], [], [], 300)
        assert ready, "the job printed nothing for 300 s"
        return self.process.stdout.readline().decode().strip()

    def tokens(self):
        """Return the tokens that `mpidist run` gave the job, by the environments of its processes."""
        mark = f"TEST_TOKEN={self.token}".encode()
        found = set()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    variables = file.read().split(b"\0")
            except OSError:
                continue
            if mark in variables:
                found |= {
                    text.split(b"=")[1].decode() for text in variables if text.startswith(RUN_TOKEN.encode() + b"=")
                }
        return found

    def end(self):
        output, _ = self.process.communicate(timeout=300)
        return self.process.returncode, output.decode().split("\n")


@pytest.fixture
def started(tmp_path):
    jobs = []

    def start(script, **options):
        jobs.append(Started(tmp_path, script, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.kill()
        job.process.communicate()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_signals_reach_the_ranks(started, name):
    job = started(WAITING)
    job.process.send_signal(getattr(signal, name))
    status, lines = job.end()
    assert status == 0
    assert sorted(filter(None, lines)) == [f"rank 0 {name}", f"rank 1 {name}"]


def test_ranks_that_a_signal_ends_make_its_exit_code(started):
    job = started("import threading\nprint('ready', flush=True)\nthreading.Event().wait(60)")
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 128 + signal.SIGTERM


def test_a_lost_terminal_ends_ranks_that_have_started_mpi(started):
    job = started("import threading\nfrom mpi4py import MPI\nprint('ready', flush=True)\nthreading.Event().wait(60)")
    job.process.send_signal(signal.SIGHUP)
    assert job.end()[0] == 128 + signal.SIGHUP


def test_a_job_under_nohup_goes_on_without_its_terminal(started):
    job = started("import threading\nprint('ready', flush=True)\nthreading.Event().wait(60)", hangup=signal.SIG_IGN)
    job.process.send_signal(signal.SIGHUP)
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 128 + signal.SIGTERM


def test_the_job_ends_quietly_when_nobody_reads_its_output(started):
    job = started("print('ready', flush=True)\nwhile True: print('and so on', flush=True)", stderr=subprocess.PIPE)
    (token,) = job.tokens()
    job.process.stdout.close()
    _, errors = job.process.communicate(timeout=300)
    assert (job.process.returncode, errors) == (128 + signal.SIGPIPE, b"")
    assert survivors(token) == []


STUBBORN = """
import signal, threading
signal.signal(signal.SIGINT, lambda *_: print("noted", flush=True))
print("ready", flush=True)
while True: threading.Event().wait(60)
"""


def test_a_second_interrupt_kills(started):
    job = started(STUBBORN)
    job.process.send_signal(signal.SIGINT)
    assert [job.line(), job.line()] == ["noted", "noted"]
    (token,) = job.tokens()
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 128 + signal.SIGINT
    assert processes_of(token) == {}


def test_no_rank_outlives_a_killed_mpidist_run(started):
    job = started(STUBBORN)
    (token,) = job.tokens()
    assert processes_of(token)
    job.process.kill()
    assert job.end()[0] == -signal.SIGKILL
    assert survivors(token) == []
