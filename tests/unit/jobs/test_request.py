"""What a job may ask for: accepted forms, and what is refused with them."""

from __future__ import annotations

import pytest

from mpidist.jobs.request import Array, Request, parse_array, parse_memory, parse_seconds, parse_time


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def asked(**fields):
    return Request(**{"scheduler": "slurm", "script": "train.py", **fields})


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("90m", 5400),
        ("4h", 14400),
        ("1h30m", 5400),
        ("2d", 172800),
        ("1d12h", 129600),
        ("60s", 60),
        ("04:00:00", 14400),
        ("1-12:00:00", 129600),
        ("100:00:01", 360001),
    ],
)
def test_times(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "4", "30:00", "4x", "h", "0h", "00:00:00", "4h 30m", "-4h", "1.5h", "4:60:00"])
def test_a_time_that_schedulers_take_differently_or_not_at_all_is_refused_with_the_form(text):
    with pytest.raises(ValueError, match=r"expected a time such as 90m, 4h, .*04:00:00"):
        parse_time(text)


def test_other_forms():
    assert [parse_memory(text) for text in ("512M", "64G", "1T", "64GB", "64GiB")] == [512, 65536, 2**20, 65536, 65536]
    assert parse_array("0-9") == Array(0, 9) and parse_array("3-4%2") == Array(3, 4, 2)
    assert [parse_seconds(text) for text in ("0", "120", "2m")] == [0, 120, 120]


@pytest.mark.parametrize("text", ["64", "0G", "64g", "1.5G", "G"])
def test_memory_without_a_unit_is_refused(text):
    with pytest.raises(ValueError, match="expected memory such as 512M, 64G or 1T"):
        parse_memory(text)


@pytest.mark.parametrize("text", ["9", "9-0", "0-9%0", "0,3", "0-9:2"])
def test_an_array_is_a_range(text):
    with pytest.raises(ValueError, match="expected FIRST-LAST such as 0-9"):
        parse_array(text)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"scheduler": "slrum"}, "'slrum' is not a scheduler; expected one of slurm"),
        ({"script": "trian.py"}, "there is no file 'trian.py' in "),
        ({"script": "train.sh"}, "expected a Python file"),
        (
            {"ranks_per_node": 4, "cores": 4, "cores_per_node": 8},
            "4 ranks of 4 cores need 16 cores of a node, which has 8; expected --ranks-per-node times --cores of 8",
        ),
        (
            {"servers": 5, "cores": 2, "cores_per_node": 8},
            "5 servers of 2 cores need 10 cores of one node, which has 8",
        ),
        ({"name": "7 seeds"}, "--name '7 seeds': expected a letter, then"),
        ({"partition": "a b"}, "--partition 'a b': expected one word"),
        ({"mpi": "pmix; rm"}, "--mpi 'pmix; rm': expected one word"),
        ({"scratch": "${SCRATCH:-~/runs}"}, "'${SCRATCH:-~/runs}': bash leaves ~ as it is there; give $HOME"),
        ({"python": "$(which python)"}, "--python '$(which python)': expected a path without quotes"),
        ({"directives": ("exclusive",)}, "--directive 'exclusive': expected an option of sbatch"),
        ({"setup": ("a\nb",)}, "expected one line"),
        ({"arguments": ("a\nexit 0",)}, "argument 'a\\nexit 0': expected one line"),
        ({"arguments": ("a\udcff",)}, "argument 'a\\udcff': expected one line of UTF-8"),
        ({"arguments": ("--between", ":")}, "argument ':': srun begins another program there"),
        ({"time": 30}, "--time 30s: expected a minute or more"),
        ({"time": 120}, "--save-before 120 s is not before a time limit of 120 s; expected less, or 0"),
        ({"requeue": 1, "save_before": 0}, "--requeue needs a save before the time limit"),
        ({"apptainer": "a.sif", "pyxis": "b"}, "expected one of them"),
        ({"servers": 1, "requeue": 1}, "--requeue with --servers"),
        ({"servers": 1, "array": Array(0, 3)}, "--array with --servers: Slurm has no arrays of jobs of two components"),
        ({"time": 86400, "save_before": 65536}, "--save-before 65536 s: Slurm sends a signal 65535 s before the limit"),
        ({"arguments": ("--seed", "{task}")}, "expected --array FIRST-LAST with it"),
    ],
)
def test_a_request_that_can_be_no_job_is_refused_with_the_accepted_form(fields, message):
    with pytest.raises(ValueError) as refused:
        asked(**fields)
    assert message in str(refused.value)


def test_what_fits_a_node_exactly_is_accepted():
    assert asked(nodes=3, ranks_per_node=4, cores=2, cores_per_node=8).ranks == 12
