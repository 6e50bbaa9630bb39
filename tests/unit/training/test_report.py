"""What `Report` notes of a training on ranks, in `fit` and in a loop of one's own."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy
import pytest

import mpidist
from mpidist.reporting import notes, page
from mpidist.testing import run_ranks

_spec = importlib.util.spec_from_file_location("softplus_net", Path(__file__).with_name("softplus_net.py"))
net = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(net)


def lines_of(folder: Path, rank: int) -> list[dict]:
    return [json.loads(line) for line in (folder / f"rank-{rank:05d}.jsonl").read_text().splitlines() if line]


def fit(folder, ranks=2, epochs=3, **options):
    """Train on 10 rows in batches of 4, with a report; return the chief's history."""

    def on_rank():
        x, y = net.rows(10)
        report = mpidist.callbacks.Report(folder)
        others = [mpidist.callbacks.ModelCheckpoint(folder / "saved", **options)]
        history = net.trainer().fit(
            x, y, batch_size=4, epochs=epochs, verbose=0, validation_data=(x, y), callbacks=[report, *others]
        )
        return history.epoch, history.history

    return run_ranks(ranks, on_rank)[0]


def test_the_notes_have_the_history_and_all_rows_of_the_ranks(tmp_path):
    _, history = fit(tmp_path)
    by_rank = [notes.read(tmp_path)[0][rank] for rank in range(2)]
    for each in by_rank:
        progress = each.of("progress")
        assert [(line["epoch"], line["step"]) for line in progress] == [(0, 3), (1, 6), (2, 9)]
        for name, values in history.items():
            assert [line["logs"][name] for line in progress] == values
    assert sum(each.last["rows"] for each in by_rank) == 30  # 3 epochs of 10 rows
    assert min(each.last["rows"] for each in by_rank) == 15
    assert all(each.has_ended and each.last["memory"] > 1e6 for each in by_rank)


def test_the_page_has_both_ranks_the_last_loss_and_the_checkpoints(tmp_path):
    _, history = fit(tmp_path)
    html = (tmp_path / page.NAME).read_text()
    assert "Training on 2 ranks" in html and f"last {history['loss'][-1]:.5g}" in html
    saved = re.findall(r"<td>saved</td><td>(.*?)</td><td>(.*?)</td>", html)
    assert [path for path, _ in saved] == [str(tmp_path / "saved" / f"checkpoint-{step}.h5") for step in (3, 6, 9)]
    size = (tmp_path / "saved" / "checkpoint-9.h5").stat().st_size
    assert float(saved[-1][1].removesuffix(" KB")) == pytest.approx(size / 1000, rel=5e-3)
    assert "<dt>all-reduce</dt><dd>shared_memory</dd>" in html
    assert "<dt>gradients</dt><dd>200 bytes" in html  # 15 + 5 + 5 float64


def test_the_page_of_a_traced_training_has_the_steps_of_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_TRACE", str(tmp_path))
    fit(tmp_path)
    html = (tmp_path / page.NAME).read_text()
    assert html.count('<span class="bar">') == 2 and 'class="problems"' not in html
    assert [int(calls) for calls in re.findall(r"<td>\d+ of (\d+)</td>", html)][0] >= 9  # a call in each of 9 steps
    assert page.render(tmp_path).count('<span class="bar">') == 2  # traces are closed by now


def test_a_training_that_goes_on_from_a_checkpoint_goes_on_in_its_notes(tmp_path):
    fit(tmp_path, epochs=2)
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-9])  # killed while it wrote that it had come to the end
    fit(tmp_path, ranks=3, epochs=4, resume=True)
    by_rank, problems = notes.read(tmp_path)
    assert len(by_rank) == 3 and problems == []
    assert [line["step"] for line in by_rank[0].of("progress", earlier=True)] == [3, 6, 9, 12]
    assert by_rank[0].of("restored")[0]["path"].endswith("checkpoint-6.h5")
    assert sum(each.last["rows"] for each in by_rank.values()) == 20


def test_a_second_fit_of_one_callback_goes_on_too(tmp_path):
    def on_rank():
        x, y = net.rows(4)
        trainer, report = net.trainer(), mpidist.callbacks.Report(tmp_path)
        for _ in range(2):
            trainer.fit(x, y, batch_size=2, verbose=0, callbacks=[report])

    run_ranks(1, on_rank)
    found = notes.read(tmp_path)[0][0]
    assert [line["step"] for line in found.of("progress", earlier=True)] == [2, 4] and found.last["rows"] == 4


def test_within_a_long_epoch_there_are_lines_too(tmp_path, monkeypatch):
    monkeypatch.setattr("mpidist.training.callbacks.report._EVERY_SECONDS", 0.0)
    fit(tmp_path, ranks=1, epochs=1)
    progress = notes.read(tmp_path)[0][0].of("progress")
    assert [line["step"] for line in progress] == [1, 2, 3, 3]
    assert [list(line["logs"]) for line in progress[:3]] == [["loss so far"]] * 3


def test_a_loop_of_ones_own(tmp_path):
    def on_rank():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            variable = mpidist.Variable(numpy.zeros(1))
        report = mpidist.callbacks.Report(tmp_path)
        report.begin(strategy, [variable])
        report.note(0, 5, 10, {"loss": numpy.float32(0.5), "table": numpy.zeros(3)})
        mpidist.Checkpoint(variable=variable).save(tmp_path / "saved.h5")
        assert report.end() == tmp_path / page.NAME

    run_ranks(2, on_rank)
    found = notes.read(tmp_path)[0][1]
    assert found.last["logs"] == {"loss": 0.5} and len(found.of("saved")) == 1
    assert "step 5: loss 0.5" in (tmp_path / page.NAME).read_text()


def test_without_a_report_no_checkpoint_is_noted(tmp_path):
    def on_rank():
        mpidist.Checkpoint(variable=mpidist.Variable(0.0)).save(tmp_path / "saved.h5")

    fit(tmp_path / "run")
    before = (tmp_path / "run" / "rank-00000.jsonl").read_bytes()
    run_ranks(2, on_rank)
    assert (tmp_path / "run" / "rank-00000.jsonl").read_bytes() == before


def test_a_folder_that_one_rank_cannot_write_is_an_error_on_all(tmp_path):
    (tmp_path / "file").write_text("")

    def on_rank():
        strategy = mpidist.MirroredStrategy()
        folder = tmp_path / ("file" if strategy.extended.replica_id == 1 else "folder")
        with pytest.raises(OSError, match=r"rank 1 on \S+: .*file") as caught:
            mpidist.callbacks.Report(folder).begin(strategy)
        return str(caught.value)

    assert len(run_ranks(2, on_rank)) == 2


def test_a_disk_that_is_full_is_warned_of_once_and_the_training_goes_on(tmp_path, caplog, capfd):
    def on_rank():
        report = mpidist.callbacks.Report(tmp_path)
        report.begin(mpidist.MirroredStrategy())
        report._notes._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        report.note(0, 1, 1, {"loss": 1.0})
        report.note(0, 2, 2, {"loss": 1.0})
        report.end()

    run_ranks(1, on_rank)
    told = capfd.readouterr().err + caplog.text
    assert told.count("notes of the report are lost") == 1


def test_an_empty_path_is_an_error():
    with pytest.raises(ValueError, match="folder is an empty path"):
        mpidist.callbacks.Report("")


@pytest.mark.parametrize(("variable", "ops", "chosen", "reason"), [
    ("ring", None, "ring", "MPIDIST_ALGORITHM=ring asks for it"),
    ("", mpidist.HierarchicalCopyAllReduce, "hierarchical", "the strategy asks for hierarchical"),
    ("", None, "shared_memory", "the table for these ranks, from 0 bytes on; measurements: all-reduce-openmpi-2.json"),
])  # fmt: skip
def test_the_all_reduce_is_the_one_that_is_used_and_the_reason_is_said(
    tmp_path, monkeypatch, variable, ops, chosen, reason
):
    if variable:
        monkeypatch.setenv("MPIDIST_ALGORITHM", variable)

    def on_rank():
        strategy = mpidist.MirroredStrategy(cross_device_ops=ops and ops())
        with strategy.scope():
            w = [mpidist.Variable(numpy.zeros(10)), mpidist.Variable(numpy.zeros(7), trainable=False)]
        report = mpidist.callbacks.Report(tmp_path)
        report.begin(strategy, w)
        report.note(0, 1)
        report.end()

    run_ranks(2, on_rank)
    (told,) = notes.read(tmp_path)[0][0].of("chosen")
    assert told["facts"]["gradients"].startswith("80 bytes")
    assert told["facts"]["all-reduce"] == chosen and told["facts"]["because"].startswith(reason)
