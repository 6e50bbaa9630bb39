"""Submission, ``status``, ``logs`` and ``cancel``, with programs that answer as Slurm's do."""

from __future__ import annotations

import json
import os
import threading

import pytest

from mpidist.commands import job, job_control
from mpidist.jobs.schedulers import SCHEDULERS
from mpidist.jobs.submitted import SubmittedJob


@pytest.fixture(autouse=True)
def slurm(tmp_path, monkeypatch):
    """A folder in which `programs` writes Slurm's programs; each leaves its arguments in the file `asked`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "train.py").write_text("")

    def programs(**bodies):
        for name, body in bodies.items():
            path = tmp_path / "bin" / name
            path.write_text(f'#!/bin/bash\necho "{name} $*" >>"{tmp_path}/asked"\n{body}\n')
            path.chmod(0o755)

    programs(sbatch='[ "$1" = --parsable ] && echo "4711;cluster"; exit 0', squeue="", scancel="")
    return programs


def submit(*words):
    return job.main(["slurm", *words, "--mpi", "pmix", "--submit", "train.py"])


def asked(tmp_path, name):
    lines = (tmp_path / "asked").read_text().splitlines()
    return [line for line in lines if line.startswith(f"{name} ")]


def test_a_job_is_submitted_and_said_how_to_look_after_it(capsys, tmp_path):
    assert submit() == 0
    printed = capsys.readouterr().out
    assert "submitted train.sh as job 4711; its output: train-4711.out" in printed
    assert "mpidist job status 4711, mpidist job logs -f 4711, mpidist job cancel 4711" in printed
    assert asked(tmp_path, "sbatch")[-1] == "sbatch --parsable train.sh"
    assert (tmp_path / "train.sh").read_text().startswith("#!/bin/bash")


def test_what_the_scheduler_does_not_take_is_not_submitted(slurm, capsys, tmp_path):
    slurm(sbatch='echo "sbatch: error: Invalid partition" >&2; exit 1')
    assert submit() == 1
    assert "sbatch --test-only: sbatch: error: Invalid partition" in capsys.readouterr().err
    assert asked(tmp_path, "sbatch") == ["sbatch --test-only"]
    assert not (tmp_path / "train.sh").exists()


def test_a_scheduler_that_is_not_here_is_said(capsys, tmp_path):
    (tmp_path / "bin" / "sbatch").unlink()
    assert submit() == 1
    assert "there is no program 'sbatch' here; submit where the scheduler's programs are" in capsys.readouterr().err


def test_an_answer_without_a_number_is_an_error(slurm, capsys):
    slurm(sbatch="echo accepted")
    assert submit() == 1
    assert "sbatch printed 'accepted', in which there is no job's number" in capsys.readouterr().err


def test_a_job_that_cannot_be_noted_down_is_submitted_all_the_same(capsys, tmp_path):
    (tmp_path / ".local").write_text("a file where the folder of the record belongs")
    assert submit() == 0
    told = capsys.readouterr()
    assert told.out == "mpidist job: submitted train.sh as job 4711; its output: train-4711.out\n"
    assert "jobs.jsonl cannot be written (" in told.err
    assert told.err.endswith("mpidist job cannot look after job 4711: end it by scancel 4711\n")


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
def test_a_record_that_cannot_be_read_is_named(verb, capsys, tmp_path):
    path = tmp_path / ".local" / "state" / "mpidist" / "jobs.jsonl"
    path.mkdir(parents=True)
    assert job.main([verb]) == 1
    assert capsys.readouterr().err == f"mpidist job: {path}: Is a directory\n"


def test_output_that_cannot_be_read_is_named(capsys, tmp_path):
    submit()
    (tmp_path / "train-4711.out").mkdir()
    capsys.readouterr()
    assert job.main(["logs"]) == 1
    assert capsys.readouterr().err == f"mpidist job: {tmp_path}/train-4711.out: Is a directory\n"


def test_a_program_of_the_scheduler_that_cannot_be_started_is_named(capsys, tmp_path):
    submit()
    for name in ("sbatch", "squeue"):
        (tmp_path / "bin" / name).write_bytes(b"no program")
    capsys.readouterr()
    assert submit() == 1
    assert "mpidist job: sbatch --test-only: cannot be started: Exec format error\n" in capsys.readouterr().err
    assert job.main(["status"]) == 0
    assert "squeue: cannot be started: Exec format error" in capsys.readouterr().out


def test_a_program_that_may_not_be_run_is_not_said_to_be_missing(capsys, tmp_path):
    assert submit() == 0
    for name in ("sbatch", "squeue"):
        (tmp_path / "bin" / name).chmod(0o644)
    capsys.readouterr()
    assert submit() == 1
    assert capsys.readouterr().err == "mpidist job: sbatch: cannot be started: Permission denied\n"
    assert job.main(["status"]) == 0
    assert "squeue: cannot be started: Permission denied" in capsys.readouterr().out


def test_a_scheduler_that_does_not_answer_is_left_alone(slurm, capsys, monkeypatch):
    monkeypatch.setattr(job, "_PATIENCE", 0.2)
    slurm(sbatch="exec /bin/sleep 60")
    assert submit() == 1
    assert capsys.readouterr().err == "mpidist job: sbatch --test-only: did not answer within 0.2 s\n"


def test_an_answer_may_have_letters_of_any_kind(slurm, capsys):
    slurm(sbatch=r"""printf '\377\n' >&2; [ "$1" = --parsable ]; exit $?""")
    assert submit() == 1
    assert "mpidist job: sbatch --test-only: \\xff\n" in capsys.readouterr().err  # which any terminal can show


@pytest.mark.parametrize(
    "printed, state, detail",
    [
        ("4711|RUNNING|0:12 node[1-2]", "running", "0:12 node[1-2]"),
        ("4711|PENDING|0:00 (Resources)", "pending", "0:00 (Resources)"),
        ("4711_0|RUNNING|0:12 node1\n4711_[1-3]|PENDING|0:00 (JobArrayTaskLimit)", "running, pending", None),
        ("", "ended", ""),
    ],
)
def test_status_shows_what_the_scheduler_says(slurm, capsys, printed, state, detail):
    submit()
    slurm(squeue=f'echo "{printed}"')
    capsys.readouterr()
    assert job.main(["status", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["job"], found["name"], found["state"]) == ("4711", "train", state)
    assert detail is None or found["detail"] == detail
    assert job.main(["status"]) == 0
    assert f"4711  train  {state} " in capsys.readouterr().out


def test_a_job_that_slurm_has_forgotten_has_ended(slurm, capsys):
    submit()
    slurm(squeue='echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert job.main(["status", "--json"]) == 0
    assert '"state": "ended"' in capsys.readouterr().out


def test_a_scheduler_that_fails_leaves_the_state_unknown(slurm, capsys):
    submit()
    slurm(squeue='echo "Unable to contact slurm controller" >&2; exit 1')
    assert job.main(["status"]) == 0
    assert "unknown  squeue: Unable to contact slurm controller" in capsys.readouterr().out


def test_cancel_ends_the_last_job_or_the_one_that_is_named(capsys, tmp_path, slurm):
    submit()
    slurm(sbatch='[ "$1" = --parsable ] && echo 4712; exit 0')
    submit()
    assert job.main(["cancel"]) == 0 and job.main(["cancel", "4711"]) == 0
    assert asked(tmp_path, "scancel") == ["scancel 4712", "scancel 4711"]
    assert job.main(["cancel", "1"]) == 1
    assert "job 1 was not submitted by `mpidist job`; expected one of 4711, 4712" in capsys.readouterr().err


def test_logs_print_the_output_from_another_folder_too(capsys, tmp_path, monkeypatch):
    submit()
    assert job.main(["logs"]) == 1
    assert "there is no" in capsys.readouterr().err
    (tmp_path / "train-4711.out").write_text("epoch 1\n")
    monkeypatch.chdir("/")
    assert job.main(["logs", "4711"]) == 0
    assert capsys.readouterr().out == "epoch 1\n"


def test_logs_of_a_job_whose_folder_has_the_letters_of_a_pattern(capsys, tmp_path, monkeypatch):
    folder = tmp_path / "seed[1]*"
    folder.mkdir()
    (folder / "train.py").write_text("")
    monkeypatch.chdir(folder)
    submit()
    capsys.readouterr()
    assert job.main(["logs"]) == 1
    assert f"there is no {folder}/train-4711.out yet" in capsys.readouterr().err
    (folder / "train-4711.out").write_text("epoch 1\n")
    assert job.main(["logs"]) == 0
    assert capsys.readouterr().out == "epoch 1\n"


def test_output_that_is_read_in_the_middle_of_a_letter_is_printed_as_it_is(capsysbinary, tmp_path):
    text, read = "précis\n".encode(), dict[str, int]()
    for end in range(1, len(text) + 1):
        (tmp_path / "out").write_bytes(text[:end])
        job_control._print_new(str(tmp_path / "out"), read)
    assert capsysbinary.readouterr().out == text


def test_logs_of_an_array_name_the_tasks(capsys, tmp_path):
    submit("--array", "0-1")
    capsys.readouterr()
    for task in range(2):
        (tmp_path / f"train-4711_{task}.out").write_text(f"seed {task}\n")
    assert job.main(["logs"]) == 0
    assert capsys.readouterr().out == "==> train-4711_0.out <==\nseed 0\n==> train-4711_1.out <==\nseed 1\n"


def test_logs_follow_a_job_until_it_has_ended(slurm, capsys, tmp_path, monkeypatch):
    """The second line comes only once the first was read, and the job ends only after the second."""
    submit()
    capsys.readouterr()
    monkeypatch.setattr(job_control, "_OUTPUT_PAUSE", 0.01)
    monkeypatch.setattr(job_control, "_STATE_PAUSE", 0.0)
    slurm(squeue='while read -r state; do echo "4711|$state|0:01 node1"; done <state')
    (tmp_path / "state").write_text("RUNNING\n")
    (tmp_path / "train-4711.out").write_text("epoch 1\n")
    seen = threading.Event()
    monkeypatch.setattr(job_control, "_print_new", _that_tells(seen, job_control._print_new))

    def go_on():
        assert seen.wait(30)
        with open(tmp_path / "train-4711.out", "a") as file:
            file.write("epoch 2\n")
        (tmp_path / "new").write_text("COMPLETED\n")
        os.replace(tmp_path / "new", tmp_path / "state")

    other = threading.Thread(target=go_on)
    other.start()
    assert job.main(["logs", "-f"]) == 0
    other.join()
    printed = capsys.readouterr()
    assert printed.out == "epoch 1\nepoch 2\n"
    assert printed.err.endswith("mpidist job: job 4711 is completed: 0:01 node1\n")


def test_logs_that_follow_a_job_say_what_it_waits_for(slurm, capsys, tmp_path, monkeypatch):
    """It is looked at three times: it waits, still waits, and has been cancelled."""
    submit()
    capsys.readouterr()
    monkeypatch.setattr(job_control, "_OUTPUT_PAUSE", 0.01)
    monkeypatch.setattr(job_control, "_STATE_PAUSE", 0.0)
    slurm(
        squeue='state=PENDING; [ "$(<looks)" = xx ] && state=CANCELLED; printf x >>looks; '
        'echo "4711|$state|0:00 (Resources)"'
    )
    (tmp_path / "looks").touch()
    assert job.main(["logs", "-f"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == [f"mpidist job: job 4711 is {state}: 0:00 (Resources)" for state in ("pending", "cancelled")]
    assert said[2].startswith("mpidist job: there is no ") and len(said) == 3


def _that_tells(seen, function):
    def called(*arguments):
        function(*arguments)
        seen.set()

    return called


def test_without_jobs_there_is_nothing_to_look_after(capsys):
    assert job.main(["status"]) == 0
    assert "no jobs" in capsys.readouterr().out
    assert job.main(["logs"]) == 1
    assert "no job was submitted yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    "scheduler, printed, number",
    [
        ("slurm", "4711\n", "4711"),
        ("slurm", "4711;cluster\n", "4711"),
        ("pbs", "4711.pbs01\n", "4711.pbs01"),
        ("lsf", "Job <4711> is submitted to queue <normal>.\n", "4711"),
        ("sge", "4711\n", "4711"),
        ("flux", "\u0192M7Zq9AKHno\n", "\u0192M7Zq9AKHno"),
    ],
)
def test_the_number_of_a_job_is_read_from_what_each_scheduler_prints(scheduler, printed, number):
    assert SCHEDULERS[scheduler].read_job_id(printed) == number


@pytest.mark.parametrize(
    "scheduler, printed, state, waits_or_runs",
    [
        ("slurm", "4711|COMPLETED|0:12 node1", "completed", False),
        ("pbs", "Job Id: 4711.pbs01\n    Job_Name = x\n    job_state = R\n    queue = q", "r", True),
        ("pbs", "    job_state = F", "f", False),
        ("lsf", "RUN   4*n1:4*n2", "run", True),
        ("lsf", "DONE  4*n1", "done", False),
        ("sge", "qw ", "qw", True),
        ("sge", "", "ended", False),
        ("flux", "RUN node[1-2]", "run", True),
        ("flux", "COMPLETED node1", "completed", False),
    ],
)
def test_states_are_read_from_what_each_scheduler_prints(monkeypatch, scheduler, printed, state, waits_or_runs):
    monkeypatch.setattr(job_control, "_ask", lambda words: printed)
    submitted = SubmittedJob("4711", scheduler, "x", "/x.sh", "/", "x.out", 0.0)
    assert job_control.state_of(submitted)[0] == state
    assert job_control.is_ended(submitted, state) is not waits_or_runs


def test_lsf_reads_the_script_from_its_standard_input(slurm, tmp_path, capsys):
    slurm(bsub='read -r line; echo "$line" >>asked; echo "Job <12> is submitted to default queue <normal>."')
    assert job.main(["lsf", "--submit", "train.py"]) == 0
    assert (tmp_path / "asked").read_text().splitlines() == ["bsub ", "#!/bin/bash"]
    assert "as job 12; its output: train-12.out" in capsys.readouterr().out
