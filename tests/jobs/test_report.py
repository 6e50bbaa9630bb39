"""The report of a training on real ranks: `examples/train.py --report`, and one that is killed."""

from __future__ import annotations

import re

from mpidist.reporting import page
from tests.helpers.launch import ROOT
from tests.jobs import run_job


def test_the_example_ends_by_naming_its_report_which_has_both_ranks(tmp_path):
    arguments = ["--model", "mlp", "--epochs", "3", "--report", str(tmp_path), "--checkpoint", str(tmp_path / "saved")]
    result = run_job(2, ROOT / "examples" / "train.py", arguments, env={"MPIDIST_TRACE": str(tmp_path)})
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == f"report: {tmp_path / page.NAME}" or "ranks share" in result.stdout
    html = (tmp_path / page.NAME).read_text()
    ranks = re.findall(r"<tr><td>(\d+)</td><td>[^<]+</td><td>[\d.]+</td><td>(\d+)</td>", html)
    assert [rank for rank, _ in ranks] == ["0", "1"]
    assert sum(int(rows) for _, rows in ranks) == 3 * 1437
    assert html.count("<td>saved</td>") == 3 and html.count('<span class="bar">') == 2
    losses = re.findall(r"step (\d+): loss", html)
    assert losses == ["12", "24", "36"] and 'class="problems"' not in html


KILLED = """
import os, signal, sys
import numpy
import mpidist

class End(mpidist.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and mpidist.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    variable = mpidist.Variable(numpy.zeros(3))
trainer = mpidist.Trainer(lambda w, x: (1.0, numpy.ones(3)), variable, mpidist.optimizers.SGD(0.1))
trainer.fit(numpy.zeros(8), batch_size=4, epochs=4, callbacks=[End(), mpidist.callbacks.Report(sys.argv[1])])
"""


def test_of_a_training_that_was_killed_the_report_has_what_was_noted(tmp_path):
    result = run_job(2, KILLED, [str(tmp_path)])
    assert result.returncode != 0
    html = page.render(tmp_path)
    assert re.findall(r"step (\d+): loss", html) == ["2", "4"]
    assert "Rank 0, 1 did not come to the end" in html and not (tmp_path / page.NAME).exists()


SERVED = """
import sys
import numpy
import mpidist

strategy = mpidist.ParameterServerStrategy()
with strategy.scope():
    variable = mpidist.Variable(numpy.zeros(3))
trainer = mpidist.Trainer(lambda w, x: (1.0, numpy.ones(3)), variable, mpidist.optimizers.SGD(0.1))
trainer.fit(numpy.zeros(8), batch_size=4, epochs=2, callbacks=[mpidist.callbacks.Report(sys.argv[1])])
"""


def test_workers_of_parameter_servers_are_all_in_the_report(tmp_path):
    result = run_job(3, SERVED, [str(tmp_path)], env={"MPIDIST_ROLES": "worker:2,ps:1"})
    assert result.returncode == 0, result.stdout + result.stderr
    html = page.render(tmp_path)
    assert re.findall(r"<tr><td>(\d+)</td><td>[^<]+</td><td>[\d.]+</td><td>(\d+)</td>", html) == [
        ("0", "16"),
        ("1", "16"),
    ]
    assert "Training on 2 ranks" in html and 'class="problems"' not in html and "<dt>servers</dt><dd>1</dd>" in html
