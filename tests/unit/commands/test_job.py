"""``mpidist job``: its arguments, defaults of a site, and the file that it writes."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
import threading

import pytest

from mpidist.commands import job
from mpidist.commands.launch.probe import MpiFound
from mpidist.jobs.options import OPTIONS


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with a script, no site, an Open MPI, and no programs but bash and those of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(job, "probe_mpi", lambda: MpiFound(library="Open MPI v5.0.11", vendor="Open MPI"))
    (tmp_path / "train.py").write_text("")
    return tmp_path


def printed(capsys, *words):
    assert job.main(["slurm", *words]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    with pytest.raises(SystemExit) as left:
        job.main(words)
    assert left.value.code == 2
    return capsys.readouterr().err


def header(text):
    (line,) = [line for line in text.splitlines() if line.startswith("# Printed by: ")]
    return shlex.split(line.removeprefix("# Printed by: "))


def test_the_script_and_its_arguments_are_in_the_printed_script(capsys):
    text = printed(capsys, "--nodes", "4", "--gpus-per-node", "4", "--time", "4h", "train.py", "--", "--epochs", "90")
    assert "\n#SBATCH --nodes=4 " in text and "\n#SBATCH --ntasks-per-node=4 " in text
    assert "\n#SBATCH --time=04:00:00 " in text and " train.py --epochs 90 &\n" in text
    assert "srun --mpi=pmix " in text and "\n#SBATCH --job-name=train\n" in text


def test_options_may_stand_behind_the_script(capsys):
    assert "\n#SBATCH --nodes=4 " in printed(capsys, "train.py", "--nodes", "4")


def test_the_header_prints_the_same_script_again(capsys):
    words = [
        "--setup",
        "module load x",
        "--directive=--exclusive",
        "--array=0-3",
        "train.py",
        "--",
        "--seed",
        "{task}",
        "a b",
    ]
    text = printed(capsys, *words)
    assert header(text)[:3] == ["mpidist", "job", "slurm"]
    assert printed(capsys, *header(text)[3:]) == text


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "expected a scheduler and a Python file, as in: mpidist job slurm train.py; got nothing"),
        (["slurm"], "got slurm"),
        (["slrum", "train.py"], "'slrum' is not a scheduler; expected one of slurm, pbs, lsf, sge, flux"),
        (["slurm", "trian.py"], "there is no file 'trian.py'"),
        (["slurm", "--nodes", "0", "train.py"], "--nodes: '0': expected a whole number, 1 or more"),
        (["slurm", "--gpus-per-node=-1", "train.py"], "--gpus-per-node: '-1': expected a whole number, 0 or more"),
        (["slurm", "--nodes", "1", "--nodes", "2", "train.py"], "--nodes: expected one value, got 2"),
        (["slurm", "--time", "soon", "train.py"], "--time: 'soon': expected a time such as 90m"),
        (["slurm", "--node", "2", "train.py"], "there is no option --node; did you mean --nodes?"),
        (["slurm", "train.py", "--epochs", "2"], "arguments of the script come after --: train.py -- --epochs"),
        (["slurm", "train.py", "90"], "got slurm train.py 90"),
        (["slurm", "--pyxis", "image", "train.py"], "expected --mpi HOW: pmix for Open MPI, pmi2 for MPICH"),
        (["slurm", "--cores-per-node", "4", "--cores", "5", "train.py"], "which has 4"),
        (["slurm", "--site", "none.toml", "train.py"], "none.toml: No such file"),
    ],
)
def test_a_bad_request_is_refused_with_the_accepted_form_before_anything_is_written(words, message, capsys, folder):
    before = sorted(os.listdir(folder))
    assert message in refused(capsys, *words, *(["-o", "job.sh"] if words else []))
    assert sorted(os.listdir(folder)) == before


def test_the_plugin_is_that_of_the_mpi_that_mpi4py_loads(capsys, monkeypatch):
    monkeypatch.setattr(job, "probe_mpi", lambda: MpiFound(library="MPICH Version: 5.0", vendor="MPICH"))
    assert "srun --mpi=pmi2 " in printed(capsys, "train.py")
    assert "srun --mpi=cray_shasta " in printed(capsys, "--mpi", "cray_shasta", "train.py")
    monkeypatch.setattr(job, "probe_mpi", lambda: MpiFound(error="no MPI library"))
    assert "mpi4py loads no MPI here (no MPI library); expected --mpi HOW" in refused(capsys, "slurm", "train.py")


def test_defaults_of_a_site_stand_below_the_command_line_and_are_named_in_the_script(capsys, folder):
    (folder / "mpidist.toml").write_text(
        '[job]\npartition = "gpu"\nnodes = 3\nmpi = "pmi2"\nsetup = ["module load a"]\n'
    )
    text = printed(capsys, "--nodes", "2", "train.py")
    assert "\n#SBATCH --partition=gpu\n" in text and "\n#SBATCH --nodes=2 " in text and "\nmodule load a\n" in text
    assert f"\n# Defaults of {folder}/mpidist.toml: partition, mpi, setup\n" in text
    assert header(text) == ["mpidist", "job", "slurm", "--nodes", "2", "train.py"]


def test_a_bad_default_is_refused_by_the_name_of_its_file(capsys, folder):
    (folder / "mpidist.toml").write_text('[job]\ntime = "4 hours"\n')
    assert f"{folder}/mpidist.toml: time: '4 hours': expected a time" in refused(capsys, "slurm", "train.py")


def test_show_site_says_what_came_from_where(capsys, folder):
    assert job.main(["--show-site"]) == 0
    assert "no defaults: there is no mpidist.toml" in capsys.readouterr().out
    (folder / "home/.config/mpidist").mkdir(parents=True)
    (folder / "home/.config/mpidist/mpidist.toml").write_text('[job]\naccount = "p1"\n')
    (folder / "mpidist.toml").write_text("[job]\ncores_per_node = 64\n")
    assert job.main(["--show-site"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [
        ["account", "p1", "~/.config/mpidist/mpidist.toml"],
        ["cores-per-node", "64", f"{folder}/mpidist.toml"],
    ]


def test_scripts_and_site_files_are_utf_8_in_any_locale(folder):
    (folder / "mpidist.toml").write_bytes('[job]\nsetup = "echo ü"\n'.encode())
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-m", "mpidist", "job", "slurm", "--mpi", "pmix", "train.py"]
    made = subprocess.run(words, env={**os.environ, **locale}, capture_output=True, timeout=60)
    assert "\necho ü\n" in made.stdout.decode(), made.stderr


def test_a_file_is_written_once_and_one_that_differs_is_kept(capsys, folder):
    path = folder / "job.sh"
    assert job.main(["slurm", "-o", "job.sh", "train.py"]) == 0
    assert "wrote job.sh; submit it: sbatch job.sh" in capsys.readouterr().err
    text = path.read_text()
    assert text.startswith("#!/bin/bash\n") and os.access(path, os.X_OK)
    assert job.main(["slurm", "-o", "job.sh", "train.py"]) == 0  # the same again
    capsys.readouterr()
    assert job.main(["slurm", "-o", "job.sh", "--nodes", "2", "train.py"]) == 1
    assert "job.sh exists and differs" in capsys.readouterr().err
    assert path.read_text() == text


def test_a_script_goes_through_a_pipe_which_is_not_read(folder):
    os.mkfifo(folder / "pipe", 0o600)
    reader = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    job.main(["slurm", "-o", "job.sh", "train.py"])
    writer = threading.Thread(target=job.main, args=(["slurm", "-o", "pipe", "train.py"],), daemon=True)
    writer.start()
    writer.join(20)
    came, of_file = os.read(reader, 1 << 16).decode(), (folder / "job.sh").read_text()
    os.close(reader)
    assert not writer.is_alive() and came == of_file.replace("-o job.sh", "-o pipe")
    assert stat.S_IMODE(os.stat(folder / "pipe").st_mode) == 0o600


def test_what_the_scheduler_says_about_the_script_is_shown(capsys, folder):
    program = folder / "bin" / "sbatch"
    program.write_text('#!/bin/bash\nread -r line\necho "sbatch: error: $1 $line: not available" >&2\nexit 1\n')
    program.chmod(0o755)
    text = printed(capsys, "train.py")
    assert text.startswith("#!/bin/bash\n")
    job.main(["slurm", "train.py"])
    error = capsys.readouterr().err
    assert error == "mpidist job: sbatch --test-only: sbatch: error: --test-only #!/bin/bash: not available\n"


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: fatal: Could not establish a configuration source",
        "allocation failure: Unable to contact slurm controller (connect failure)",
    ],
)
def test_a_slurm_out_of_reach_is_no_fault_of_the_script(capsys, folder, said):
    """Such as on a workstation that has the commands: sbatch's words alone read like a finding about the script."""
    program = folder / "bin" / "sbatch"
    program.write_text(f'#!/bin/bash\necho "{said}" >&2\nexit 1\n')
    program.chmod(0o755)
    job.main(["slurm", "train.py"])
    error = capsys.readouterr().err
    begin = "mpidist job: Slurm cannot be reached from here, and has not checked the script: sbatch --test-only: "
    assert error == f"{begin}{said}\n"


def test_every_option_is_on_the_page_of_help():
    page = job.parser().format_help()
    assert [name for name in OPTIONS if f"--{name} " not in page] == []
