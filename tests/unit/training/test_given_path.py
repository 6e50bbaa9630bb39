"""Whatever takes a directory or a file refuses an empty path, before anything is written or removed."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpidist
from mpidist import callbacks
from mpidist.training.preemption import PreemptionCheckpointHandler

TAKERS = {
    "BackupAndRestore": callbacks.BackupAndRestore,
    "ModelCheckpoint": callbacks.ModelCheckpoint,
    "CSVLogger": callbacks.CSVLogger,
    "TensorBoard": callbacks.TensorBoard,
    "Checkpoint.save": lambda path: mpidist.Checkpoint().save(path),
    "Checkpoint.restore": lambda path: mpidist.Checkpoint().restore(path),
    "CheckpointManager": lambda path: mpidist.CheckpointManager(mpidist.Checkpoint(), path),
    "PreemptionCheckpointHandler": lambda path: PreemptionCheckpointHandler(None, mpidist.Checkpoint(), path),
    "SidecarEvaluator": lambda path: mpidist.SidecarEvaluator(
        lambda data: {}, None, path, max_evaluations=1, checkpoint=mpidist.Checkpoint()
    ),
}


@pytest.mark.parametrize("path", ["", " "])
@pytest.mark.parametrize("taker", TAKERS)
def test_an_empty_path_is_refused(taker, path, tmp_path, monkeypatch):
    if taker == "TensorBoard":
        pytest.importorskip("tensorboardX")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("")
    with pytest.raises(ValueError, match="is an empty path; name a"):
        TAKERS[taker](path)
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("taker", ["Checkpoint.save", "Checkpoint.restore", "CSVLogger"])
def test_a_file_has_a_name(taker):
    with pytest.raises(ValueError, match=r"must name a file, got '\.'"):
        TAKERS[taker](Path(""))


@pytest.mark.parametrize("taker", TAKERS)
def test_what_is_no_path_is_refused(taker):
    if taker == "TensorBoard":
        pytest.importorskip("tensorboardX")
    with pytest.raises(TypeError, match="must be a str or Path, got int"):
        TAKERS[taker](3)
