"""Scripts that are filled in: those of `jobscripts/`, and what each option puts into one."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from mpidist.jobs.request import Request
from mpidist.jobs.schedulers import SCHEDULERS
from mpidist.jobs.script import fill_in, place, word
from tests.helpers.jobscripts import FOLDER, printed, scripts, words_of
from tests.helpers.pages import ROOT

NAMES = [path.relative_to(FOLDER).as_posix() for path in scripts()]


def test_every_scheduler_has_scripts_and_the_page_names_each():
    assert {name.partition("/")[0] for name in NAMES} == set(SCHEDULERS)
    assert {f"slurm/{name}.sh" for name in "cpu gpu gpu-nodes servers array requeue apptainer pyxis".split()} <= {
        *NAMES
    }
    page = (FOLDER / "README.md").read_text()
    assert [name for name in NAMES if f"({name})" not in page] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_what_the_command_line_in_its_header_prints(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (FOLDER / name).read_text()
    assert printed(words_of(text)) == text, "make jobscripts writes them anew"


@pytest.mark.parametrize("name", NAMES)
def test_bash_and_shellcheck_find_nothing(name):
    checks = [["bash", "-n"], *([["shellcheck"]] if shutil.which("shellcheck") else [])]
    for check in checks:
        done = subprocess.run([*check, FOLDER / name], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")

    def lines(**fields):
        asked = Request(**{"scheduler": "slurm", "script": "train.py", "mpi": "pmix", **fields})
        return fill_in(asked, "mpidist job").splitlines()

    return lines


def directives(lines):
    """Return the options that sbatch reads; up to the first line that is no comment, comments behind them left out."""
    head = lines[: lines.index("", lines.index("#SBATCH --open-mode=append          # a restart adds to the output"))]
    return [line.removeprefix("#SBATCH ").partition(" #")[0].rstrip() for line in head if line.startswith("#SBATCH ")]


def srun(lines):
    """Return the words of the step: a line and those that continue it."""
    (start,) = [number for number, line in enumerate(lines) if line.startswith("srun ")]
    end = next(number for number in range(start, len(lines)) if not lines[number].endswith("\\"))
    return " ".join(line.rstrip("\\") for line in lines[start : end + 1]).split()


def test_what_is_asked_for_is_what_sbatch_reads(slurm):
    asked = {"nodes": 4, "ranks_per_node": 8, "cores": 3, "gpus_per_node": 2, "memory": 2048, "time": 90000}
    found = directives(slurm(**asked, partition="gpu", account="p1", directives=("--exclusive",), requeue=3))
    expected = (
        "nodes=4 ntasks-per-node=8 cpus-per-task=3 gpus-per-node=2 mem=2048M time=25:00:00 partition=gpu account=p1"
    )
    assert [f"--{option}" for option in expected.split() if f"--{option}" not in found] == []
    assert {"--exclusive", "--requeue", "--signal=B:USR1@120", "--open-mode=append"} <= set(found)


def test_the_step_has_what_srun_does_not_take_from_the_job(slurm):
    step = srun(slurm(gpus_per_node=4, ranks_per_node=4))
    assert step[0] == "srun" and step[-2:] == ["train.py", "&"]
    assert {"--mpi=pmix", "--kill-on-bad-exit=1", "--gpu-bind=none", '--cpus-per-task="$SLURM_CPUS_PER_TASK"'} <= {
        *step
    }
    assert {'--ntasks-per-node="$SLURM_NTASKS_PER_NODE"', '--gpus-per-node="$SLURM_GPUS_PER_NODE"'} <= {*step}
    assert not [option for option in srun(slurm()) if "gpu" in option]


def test_servers_are_a_second_component_of_one_world(slurm):
    lines = slurm(servers=3, ranks_per_node=2, cores=5)
    second = lines[
        lines.index("#SBATCH hetjob" + " " * 21 + " # the second component: its ranks are the servers, with no GPUs") :
    ]
    assert [line.split()[1] for line in second[1:4]] == ["--nodes=1", "--ntasks-per-node=3", "--cpus-per-task=5"]
    assert "--het-group=0,1" in srun(lines)


def test_without_a_save_nothing_waits_for_a_signal(slurm):
    text = "\n".join(slurm(save_before=0))
    assert "USR1" not in text and "trap" not in text and "wait" not in text
    assert srun(text.splitlines())[-1] == "train.py"


def test_mpich_gets_no_variables_of_open_mpi(slurm):
    assert "OMPI_" not in "\n".join(slurm(mpi="pmi2")) and "OMPI_" in "\n".join(slurm(mpi="pmix"))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("60", "60"),
        ("a b", "'a b'"),
        ("", "''"),
        ("{folder}", '"$folder"'),
        ("{checkpoints}/new run", "\"$checkpoints\"'/new run'"),
        ("--out={folder}/$x", "--out=\"$folder\"'/$x'"),
        ('{"lr": 1}', "'{\"lr\": 1}'"),
        ("{seed}", "'{seed}'"),
    ],
)
def test_arguments_are_words_of_bash(text, expected):
    assert word(text) == expected


@pytest.mark.parametrize("path", ["~/my folder", "$HOME/my folder", "${SCRATCH:-$HOME/my folder}"])
def test_paths_are_single_words_in_which_bash_replaces_variables_and_the_home_folder(path):
    done = subprocess.run(
        ["bash", "-c", f"set -u; place={place(path)}; echo $place"],
        env={"HOME": "/home of/me", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("/home of/me/my folder\n", "")


def test_the_home_folder_of_another_is_left_to_bash():
    assert [place("~bob/a b"), place("~a;b/c"), place("~")] == ['~bob/"a b"', '"~a;b/c"', '"~"']


def test_paths_with_blanks_and_in_the_home_folder_are_the_ones_of_the_job(slurm):
    lines = slurm(scratch="/my scratch;x", python="~/venv/bin/python", apptainer="~/image.sif")
    assert 'folder="/my scratch;x/$SLURM_JOB_NAME"' in lines
    assert 'python=~/"venv/bin/python"' in "\n".join(lines)
    assert '~/"image.sif"' in srun(lines)
    step = srun(slurm(pyxis="~/image.sqsh"))  # bash leaves ~ behind "=" as it is
    assert step[step.index("--container-image") + 1] == '~/"image.sqsh"'


def test_a_missing_jinja2_is_said_with_its_cure(slurm, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match="not installed: pip install jinja2"):
        slurm()
