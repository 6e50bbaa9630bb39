"""The command itself, its registry, and arguments of ``mpidist run``."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

import mpidist
from mpidist.commands import run
from mpidist.commands.job_control import VERBS
from mpidist.commands.launch.mpirun import Mpirun
from mpidist.commands.launch.probe import MpiFound
from mpidist.commands.main import COMMANDS, main


@pytest.mark.parametrize("arguments, status", [(["--help"], 0), (["-h"], 0), ([], 2)])
def test_help_lists_the_commands(arguments, status, capsys):
    assert main(arguments) == status
    printed = capsys.readouterr().out
    for name, (_, what) in COMMANDS.items():
        assert f"{name} " in printed and what in printed
    assert "mpidist --version" in printed and "mpidist run -n 4 train.py" in printed


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{mpidist.__version__}\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])  # at once argparse writes its pages, and is silent where it cannot
@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS), ["job", "status", "--help"]])
def test_a_full_disk_is_said_in_one_line(words, unbuffered):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "mpidist", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (ended.returncode, ended.stderr) == (1, "mpidist: the output cannot be written: No space left on device\n")


def test_a_full_quota_is_said_as_a_full_disk_is():
    code = """
import errno, sys
from mpidist.commands import main
def full(arguments): raise OSError(errno.EDQUOT, "Disk quota exceeded")
main._run = full
sys.exit(main.main(["info"]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "mpidist: the output cannot be written: Disk quota exceeded\n")


def test_an_unknown_command_lists_the_known_ones(capsys):
    assert main(["runn"]) == 2
    message = capsys.readouterr().err
    assert "'runn'" in message
    assert all(name in message for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_module_and_help(name, capsys):
    module = importlib.import_module(COMMANDS[name][0])
    assert callable(module.main)
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert f"mpidist {name}" in capsys.readouterr().out


def _pages():
    """Return (words of a command, its page of help), for all commands."""
    verbs = [["job", verb] for verb in VERBS]
    for words in [*([name] for name in COMMANDS), *verbs]:
        run_ = subprocess.run([sys.executable, "-m", "mpidist", *words, "--help"], capture_output=True, text=True)
        yield words, run_.stdout


def test_pages_of_help_have_one_shape():
    for words, page in _pages():
        command = " ".join(["mpidist", *words])
        usage, what, *_ = page.split("\n\n")
        assert usage.startswith(f"usage: {command} "), page
        assert re.match(r"[A-Z][a-z]+[^s] .*\.$", what, re.DOTALL) and what.split()[0] not in ("Looks", "One"), page
        assert "\noptions:\n  -h, --help " in page and "\n\nexamples:\n" in page, page
        examples = page.partition("\nexamples:\n")[2].partition("\n\n")[0].splitlines()
        assert any(command in line for line in examples) and all(line.startswith("  ") for line in examples), page
        assert max(map(len, page.splitlines())) <= 120, page
        assert all("--mpi=" in line for line in examples if line.startswith("  srun")), page
        assert not re.search(r"default[: ]\S+ *$", page, re.MULTILINE), page  # a default stands in parentheses


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"run", "job"}))
def test_an_unknown_option_is_refused_in_one_form(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, "--helpp"])
    assert left.value.code == 2
    assert f"mpidist {name}: error: there is no option --helpp; did you mean --help?" in capsys.readouterr().err


def _completed(script, *words):
    """Return what bash offers for the last of the words."""
    line = f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}; _shtab_mpidist"
    ask = f"source {script}; {line} mpidist {shlex.quote(words[-1])}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, cwd=script.parent, timeout=60)
    return set(done.stdout.split())


def test_bash_completes_commands_options_and_files(tmp_path, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "script.sh"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "train.py").touch()
    assert _completed(script, "mpidist", "") == set(COMMANDS)
    assert _completed(script, "mpidist", "run", "--lo") == {"--log-dir"}
    assert _completed(script, "mpidist", "simulate", "--placement", "") == {"block", "cyclic"}
    assert "train.py" in _completed(script, "mpidist", "run", "-n", "2", "tr")
    assert {"slurm", "status"} <= _completed(script, "mpidist", "job", "")
    assert main(["completion", "zsh"]) == 0 and "#compdef mpidist" in capsys.readouterr().out


def test_without_shtab_completion_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr() == ("", "mpidist completion: it needs the package shtab: pip install shtab\n")


@pytest.mark.parametrize(
    "page",
    [["info"], ["simulate"], ["--help"], ["run", "--help"]],
)
def test_a_page_that_nobody_reads_is_no_error(page):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mpidist", *page]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert result.returncode == 128 + signal.SIGPIPE
    assert result.stderr == b""


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-n", "0", "train.py"], "'0': expected a whole number, 1 or more"),
        (["-n", "many", "train.py"], "'many': expected a whole number, 1 or more"),
        (["train.py"], "-n RANKS is needed: mpidist run -n 2 train.py"),
        (["train.py", "-n", "2"], "-n goes before the program, whose arguments come last: mpidist run -n 2 train.py"),
        (["train.py", "-np", "2"], "-np goes before the program"),
        (["train.py", "--ranks=2"], "--ranks=2 goes before the program"),
        (["-m", "pytest", "-n2"], "-n2 goes before the program"),
        ([], "-n RANKS is needed"),
        (["-n", "2", "--tagg", "x.py"], "there is no option --tagg; did you mean --tag?"),
        (["-n", "2", "--log_dir=x", "x.py"], "there is no option --log_dir=x; did you mean --log-dir?"),
        (["-n", "2", "--host", "a,b", "x.py"], "did you mean --hosts?"),
        (["-n", "2", "--time", "5", "x.py"], "there is no option --time; did you mean --timeout?"),
        (["-n", "2", "--output", "tag", "x.py"], "there is no option --output; did you mean --tag or --log-dir DIR?"),
        (["-n", "2", "--tagg", "--qiet", "x.py"], "no option --tagg and no --qiet; did you mean --tag and --quiet?"),
        (["-n", "2", "--tagg", "--tagg", "-3", "x.py"], "there is no option --tagg; did you mean --tag?"),
        (["--map-by", "--bind-to", "x.py"], "no option --map-by and no --bind-to; one of mpirun's own goes"),
        (["-n", "2", "--map-by", "core", "x.py"], "goes into --launcher-args='--map-by ...'"),
        # argparse takes one word that begins with dashes for an option, so what is advised has =
        (["-n", "2", "--launcher-args=--verbose", "--map-by", "x.py"], "goes into --launcher-args='--map-by ...'"),
        (["-n", "2", "--tag", "--log-dir", "x", "x.py"], "not allowed with argument --tag"),
        (["-n", "2", "--hosts", "a", "--hostfile", "x", "x.py"], "not allowed with argument --hosts"),
        (["-n", "2", "--timeout", "-1", "x.py"], "'-1': expected a time such as "),
        (["-n", "2", "--timeout", "0", "x.py"], "'0': expected a time above 0"),
        (["-n", "2"], "no program"),
    ],
)
def test_run_refuses_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        run.main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("program, message", [("missing.py", "no file 'missing.py'"), ("./missing", "no program")])
def test_run_says_what_is_missing_before_ranks_do(program, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run.main(["-n", "2", program]) == 1
    assert message in capsys.readouterr().err


def test_run_without_mpi_is_an_error_with_the_cure(capsys, monkeypatch):
    monkeypatch.setattr(run, "probe_mpi", lambda: MpiFound(error="No module named 'mpi4py'"))
    assert run.main(["-n", "2", "-m", "pytest"]) == 1
    assert "pip install" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["-n", "3"], ["-n3"], ["-np", "3"], ["--ranks", "3"], ["--ranks=3"]])
def test_how_many_ranks_as_other_launchers_take_it(words):
    arguments = run.parser().parse_args([*words, "train.py", "-n", "8"])
    assert (arguments.ranks, arguments.program) == (3, ["train.py", "-n", "8"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--hosts", "node1:1"], "the hosts take 1 rank (node1:1), and -n asks for 2"),
        (["--hostfile", "missing"], "--hostfile missing: "),
        (["-x", "NO_SUCH_VARIABLE"], "-x NO_SUCH_VARIABLE: there is no such variable here"),
        (["--launcher-args", "--output tag"], "--output has no effect here; use --tag or --log-dir DIR"),
        (["--log-dir", "a_file"], "--log-dir a_file: "),
    ],
)
def test_run_refuses_what_it_cannot_do_before_there_are_ranks(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("")
    monkeypatch.setattr(run, "probe_mpi", lambda: MpiFound("4", "Open MPI v5.0.11", "Open MPI", (5, 0, 11)))
    monkeypatch.setattr(run, "find_mpirun", lambda mpi: Mpirun("mpirun", "Open MPI", (5, 0, 11)))
    monkeypatch.setattr(run, "supervise", lambda *args: pytest.fail("ranks were started"))
    assert run.main(["-n", "2", *arguments, "-m", "platform"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "vendor, options, expected",
    [
        ("Open MPI", ["--hosts", "a,b"], " --host a:2,b:2 -x A "),
        ("Open MPI", ["--tag"], " --tag-output -x A "),
        ("MPICH", ["--hosts", "a:1,b:3"], " -hosts a:1,b:3 "),
        ("MPICH", ["--log-dir", "logs"], " -prepend-rank "),
    ],
)
def test_each_launcher_is_told_in_its_words(vendor, options, expected, capsys, monkeypatch):
    monkeypatch.setattr(run, "probe_mpi", lambda: MpiFound("4", vendor, vendor, (5,)))
    monkeypatch.setattr(run, "find_mpirun", lambda mpi: Mpirun("mpirun", vendor, (5,)))
    assert run.main(["-n", "4", "--dry-run", *options, "-x", "A=1 2", "-m", "platform"]) == 0
    line = capsys.readouterr().out
    assert expected in line
    assert line.startswith("env ") and " 'A=1 2' " in line.partition("mpirun")[0]


def test_run_in_a_heterogeneous_job_says_which_component_it_sees(capsys, monkeypatch):
    monkeypatch.setattr(run, "probe_mpi", lambda: MpiFound("4", "Open MPI", "Open MPI", (5,)))
    monkeypatch.setattr(run, "find_mpirun", lambda mpi: Mpirun("mpirun", "Open MPI", (5,)))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert run.main(["-n", "4", "--dry-run", "-m", "platform"]) == 0
    assert "component" not in capsys.readouterr().err
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    assert run.main(["-n", "4", "--dry-run", "-m", "platform"]) == 0
    said = capsys.readouterr().err
    assert "the Slurm job 7 has 2 components, and mpirun sees the first one only (gpu1, gpu2)" in said
    assert "srun --mpi=pmix --het-group=0,1" in said


def test_a_launch_does_not_wait_for_numpy():
    code = "import sys; import mpidist.commands.run; print({'numpy', 'mpi4py'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", ["run", "job"])
def test_a_working_folder_that_is_gone_is_told_in_a_line(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main([name, "-n", "2", "train.py"]) == 1
    assert capsys.readouterr().err == f"mpidist {name}: the working folder is gone; cd into one that is there\n"


def test_what_a_command_starts_has_an_output_too():
    start = "import os; from mpidist.commands import main; main._open_closed(); os._exit(os.system('echo x') != 0)"
    line = f"{shlex.join([sys.executable, '-c', start])} >&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_without_its_output_does_what_it_is_to_do(closed, tmp_path):
    """As a daemon starts it; a file that it opens is not taken for its output."""
    (tmp_path / "train.py").touch()
    words = [sys.executable, "-m", "mpidist", "job", "pbs", "-o", "job.sh", "train.py"]
    line = f"{shlex.join(words)} {closed}"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert (tmp_path / "job.sh").read_text().endswith('exit "$status"\n')
