"""``examples/train.py``: the gradients of its models, its data, and the law that N ranks equal one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import mpidist
from mpidist.testing import run_ranks

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

import cnn  # noqa: E402
import digits  # noqa: E402
import display  # noqa: E402
import mlp  # noqa: E402
import train  # noqa: E402


def run_script(*arguments: str, without: str = "") -> subprocess.CompletedProcess:
    """Run the script in a process of its own, in which importing the packages `without` fails."""
    hide = "".join(f"sys.modules[{name!r}] = None; " for name in without.split())
    code = f"import sys, runpy; {hide}runpy.run_path({str(EXAMPLES / 'train.py')!r}, run_name='__main__')"
    code = f"import sys; sys.path[:0] = [{str(EXAMPLES)!r}, {str(EXAMPLES.parent)!r}]; {code}"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("model", [mlp, cnn])
def test_gradients_are_the_slopes_of_the_loss(model):
    random = numpy.random.default_rng(3)
    images, labels = random.random((5, 8, 8)), numpy.eye(10)[:5]
    parameters = [value.astype("float64") for value in model.initial(0).values()]
    loss, gradients = model.value_and_grad(parameters, images, labels, 7)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert gradient.shape == parameter.shape
        for index in random.integers(0, parameter.size, 5):
            place, step = numpy.unravel_index(index, parameter.shape), 1e-6
            kept = parameter[place]
            parameter[place] = kept + step
            above, _ = model.value_and_grad(parameters, images, labels, 7)
            parameter[place] = kept - step
            below, _ = model.value_and_grad(parameters, images, labels, 7)
            parameter[place] = kept
            assert gradient[place] == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("model", [mlp, cnn])
def test_equal_scores_lose_the_logarithm_of_the_classes(model):
    parameters = [numpy.zeros_like(value) for value in model.initial(0).values()]
    loss, _ = model.value_and_grad(parameters, numpy.ones((6, 8, 8), "float32"), numpy.eye(10, dtype="float32")[:6], 12)
    assert loss == pytest.approx(numpy.log(10) / 2, rel=1e-6)


@pytest.mark.parametrize("model", [mlp, cnn])
def test_an_empty_part_has_no_loss_and_gradients_of_zeros(model):
    parameters = list(model.initial(0).values())
    loss, gradients = model.value_and_grad(
        parameters, numpy.zeros((0, 8, 8), "float32"), numpy.zeros((0, 10), "float32"), 4
    )
    assert loss == 0
    assert [gradient.shape for gradient in gradients] == [parameter.shape for parameter in parameters]
    assert not any(gradient.any() for gradient in gradients)
    assert all(gradient.dtype == "float32" for gradient in gradients)


def test_splits_are_fixed_and_keep_test_rows_out_of_the_training():
    for split in range(3):
        (train_rows, test_rows), again = digits.load(split), digits.load(split)
        assert (again[1].images == test_rows.images).all()
        assert (len(train_rows.images), len(test_rows.images)) == (1437, 360)
        both = numpy.concatenate([train_rows.images, test_rows.images]).reshape(1797, 64)
        assert both.sum() == digits.load(0)[0].images.sum() + digits.load(0)[1].images.sum()
    assert (digits.load(0)[1].images != digits.load(1)[1].images).any()
    assert (train_rows.labels.sum(axis=1) == 1).all()
    assert (train_rows.images.dtype, train_rows.labels.dtype) == ("float32", "float32")
    assert (train_rows.images.min(), train_rows.images.max()) == (0, 1)


def test_an_image_moves_by_one_pixel_at_most():
    images = numpy.arange(3 * 64.0).reshape(3, 8, 8) + 1
    found = digits.shifted(images, numpy.array([[1, 1], [0, 1], [1, 2]]))
    assert (found[0] == images[0]).all()
    assert (found[1, 1:] == images[1, :-1]).all() and (found[1, 0] == 0).all()
    assert (found[2, :, :-1] == images[2, :, 1:]).all() and (found[2, :, -1] == 0).all()


def trained_parameters(model, batch_size, steps):
    """Return the parameters after some steps on all ranks of this world."""
    arguments = train.parse_arguments(["--model", model, "--batch-size", str(batch_size), "--steps", str(steps)])
    training = train.Training(arguments, mpidist.MultiWorkerMirroredStrategy())
    training.train_epoch()
    assert training.optimizer.iterations == steps
    return [parameter.copy() for parameter in training.parameters()]


@pytest.mark.parametrize("batch_size", [64, 50, 3])
def test_parameters_are_equal_to_rounding_on_any_number_of_ranks(batch_size):
    (alone,) = run_ranks(1, trained_parameters, "mlp", batch_size, 8)
    for size in (2, 3, 8):
        found = run_ranks(size, trained_parameters, "mlp", batch_size, 8)
        for parameters in found:
            for parameter, other, expected in zip(parameters, found[0], alone, strict=True):
                assert parameter.tobytes() == other.tobytes()
                numpy.testing.assert_allclose(parameter, expected, rtol=1e-5, atol=1e-6)


def test_mlp_reaches_its_accuracy(capsys):
    accuracies = []
    for split in range(3):
        train.main(["--model", "mlp", "--split", str(split)])
        last = capsys.readouterr().out.splitlines()[-1]
        accuracies.append(float(re.fullmatch(r"test accuracy (0\.\d{4})", last)[1]))
    assert sum(accuracies) / 3 >= 0.94


def test_every_strategy_gives_the_same_parameters(tmp_path):
    for strategy in train.STRATEGIES:
        file = str(tmp_path / f"{strategy}.npz")
        train.main(["--model", "mlp", "--strategy", strategy, "--steps", "9", "--save-parameters", file])
    found = [dict(numpy.load(path)) for path in sorted(tmp_path.iterdir())]
    assert len(found) == 4
    assert all((found[0][name] == other[name]).all() for other in found for name in found[0])


def test_script_says_who_is_who_and_what_the_batches_are(capsys):
    train.main(["--model", "mlp", "--epochs", "2", "--batch-size", "100"])
    header, rank, batch, first, second, *result = capsys.readouterr().out.splitlines()
    assert header.split() == ["rank", "host", "node", "role", "device"]
    assert rank.split()[::2][:2] == ["0", "0"] and "chief" in rank and "CPU:0" in rank
    assert batch == "global batch 100 rows, 100 per replica"
    assert re.fullmatch(r"epoch 1/2  loss \d\.\d{4}  \d+ examples/s", first)
    assert second.startswith("epoch 2/2")
    assert [line.rsplit(maxsplit=1)[0] for line in result] == ["model", "replicas", "steps", "seconds", "test accuracy"]


def test_a_part_of_an_epoch_is_told_as_one(capsys):
    train.main(["--model", "mlp", "--epochs", "3", "--steps", "16"])  # 12 steps an epoch
    told = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert told == ["epoch 1/3", "epoch 2/3, 4 of 12 steps"]


@pytest.mark.parametrize(
    ("steps", "shown", "rows"),
    [
        (0, (12, 24), (1437, 1437)),
        (0, (12, 16), (1437, 4 * 128)),
        (16, (24, 36), (1437 - 4 * 128, 1437)),  # resumed in the second epoch
        (0, (11, 12), (11 * 128, 1437 - 11 * 128)),  # the last batch is smaller
    ],
)
def test_examples_a_second_are_of_the_rows_that_were_seen(steps, shown, rows, capsys, monkeypatch):
    seconds = iter([10.0, 12.0, 16.0])
    monkeypatch.setattr(display.time, "perf_counter", lambda: next(seconds))
    with display.Progress(3, 1437, 128, steps, visible=True) as progress:
        for each in shown:
            progress.show(each, 0.5)
    told = [int(re.search(r"(\d+) examples/s", line)[1]) for line in capsys.readouterr().out.splitlines()]
    assert told == [round(rows[0] / 2), round(rows[1] / 4)]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [([2.0], ""), ([0.0, 0.0], ""), ([1.0, 1.05], ""), ([1.0, 6.0, 2.0], "rank 1 is slow: 4.0 times the others")],
)
def test_the_rank_that_computes_for_longer_than_the_others_is_named(seconds, told):
    assert display.slowest(seconds) == told


def test_on_gpus_no_rank_is_called_slow_by_times_that_do_not_wait_for_the_gpu():
    training = object.__new__(train.Training)
    training.arguments = train.parse_arguments(["--device", "gpu"])
    assert training.slowest() == ""


def test_ranks_that_share_cores_are_told_that_this_is_no_speed():
    here, header = display.socket.gethostname(), ("rank", "host")
    ranks = [header, *((str(rank), here) for rank in range(8)), ("8", here + "-2")]
    assert display.shared_cores(ranks, 8) == ""
    assert display.shared_cores(ranks, 2).startswith("8 ranks share 2 cores: this shows that it works, not speed")


@pytest.mark.parametrize("name", ["cnn", "mlp", "digits", "display", "needed"])
def test_a_module_that_is_no_program_says_which_one_to_start(name):
    done = subprocess.run([sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"{name}\.py .*: python examples/train\.py.*\n", done.stderr)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("name", "missing"),
    [("torch_digits", "torch"), ("torch_text", "torch"), ("jax_digits", "jax optax"), ("keras_digits", "keras jax")],
)
def test_a_framework_that_is_missing_is_told_by_one_rank_with_the_extra_that_installs_it(name, missing, rank):
    hide = "".join(f"sys.modules[{each!r}] = None; " for each in missing.split())
    run = f"runpy.run_path({str(EXAMPLES / name)!r} + '.py', run_name='__main__')"
    code = f"import sys, runpy; sys.path.insert(0, {str(EXAMPLES)!r}); {hide}{run}"
    environ = {**os.environ, "PMI_RANK": rank, "KERAS_BACKEND": "jax"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert (done.returncode, done.stdout) == (1, "")
    needs = f"this example needs {missing.replace(' ', ', ')}: pip install '.[{missing.split()[0]}"
    assert done.stderr.startswith(needs) if rank == "0" else done.stderr == ""


def test_resuming_ends_where_the_whole_run_ends(tmp_path, capsys):
    common = ["--model", "mlp", "--epochs", "4"]
    train.main([*common, "--save-parameters", str(tmp_path / "whole.npz")])
    kept = [*common, "--checkpoint", str(tmp_path / "run"), "--resume"]
    train.main([*kept, "--steps", "29"])
    assert "no checkpoint yet" in capsys.readouterr().out
    newest = tmp_path / "run" / "checkpoint-29.h5"
    train.main([*kept, "--save-parameters", str(tmp_path / "resumed.npz")])
    assert f"resumed from {newest}" in capsys.readouterr().out
    whole, resumed = (numpy.load(tmp_path / name) for name in ("whole.npz", "resumed.npz"))
    assert whole.files == list(mlp.initial(0))
    assert all((whole[name] == resumed[name]).all() for name in whole.files)


def test_runs_without_mpi4py_rich_and_autograd():
    done = run_script("--model", "mlp", "--epochs", "1", without="mpi4py rich autograd")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"test accuracy 0\.\d{4}", done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("missing", "cure"), [("autograd", "pip install autograd.*--model mlp"), ("sklearn", "pip install scikit-learn")]
)
def test_what_is_missing_is_named_with_its_cure(missing, cure):
    done = run_script(without=missing)
    assert done.returncode == 1
    assert re.search(cure, done.stderr.splitlines()[-1])


def test_resume_needs_a_directory(capsys):
    with pytest.raises(SystemExit):
        train.parse_arguments(["--resume"])
    assert "--checkpoint" in capsys.readouterr().err


def test_no_bar_where_nobody_watches(capsys):
    assert not display.on_terminal()
    with display.Progress(3, 10, 5, 0, visible=False) as progress:
        progress.show(1, 0.5)
    assert capsys.readouterr().out == ""


SHOWN = """
import sys
sys.path.insert(0, sys.argv[1])
import display
with display.Progress(2, 10, 5, 0, True) as progress:
    progress.show(2, 0.5, "rank 1 is slow")
    progress.show(4, 0.5, "rank 1 is slow")
"""


def _on_terminal(tmp_path, **env):
    """Return what the example's bar writes to a terminal."""
    script, output = tmp_path / "script.py", tmp_path / "output"
    script.write_text(SHOWN)
    line = shlex.join([sys.executable, str(script), str(EXAMPLES)])
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR" and "OMPI_" not in name}
    command = ["script", "--quiet", "--return", "--command", line, str(output)]
    subprocess.run(command, env={**kept, "TERM": "xterm", **env}, check=True, timeout=60, stdin=subprocess.DEVNULL)
    return output.read_text()


@pytest.mark.skipif(not shutil.which("script"), reason="no program `script`, which makes a terminal")
def test_the_bar_has_no_colors_where_none_are_wanted(tmp_path):
    pytest.importorskip("rich")
    color = re.compile(r"\x1b\[(3|4|9|10)\d")
    assert color.search(_on_terminal(tmp_path))
    plain = _on_terminal(tmp_path, NO_COLOR="1")
    assert "epoch" in plain and not color.search(plain)
    assert "rank 1 is slow" in plain and "0:00:00" in plain  # the bar has the time left, too


def test_a_gpu_needs_the_model_that_runs_on_its_arrays(capsys):
    assert train.parse_arguments(["--device", "gpu"]).model == "mlp"
    with pytest.raises(SystemExit):
        train.parse_arguments(["--device", "gpu", "--model", "cnn"])
    assert "--device gpu needs --model mlp" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_told_of():
    with pytest.raises(
        SystemExit, match="strategy multi_worker works on .*CPU:0: this rank sees no GPU, or has no CuPy"
    ):
        train.Training(train.parse_arguments(["--device", "gpu"]), mpidist.OneDeviceStrategy("/cpu:0"))
