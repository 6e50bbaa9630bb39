"""Tasks of a job array, one after the other."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.slurm.cluster import Slurm

SCRIPT = """
import os, sys, mpidist
v = mpidist.Variable(1.0, name="v")
manager = mpidist.CheckpointManager(mpidist.Checkpoint(v=v), sys.argv[1])
found = manager.restore_or_initialize()
manager.save()
print("task", os.environ["SLURM_ARRAY_TASK_ID"], "found", found and found.name, "saved", flush=True)
"""


def test_the_second_task_does_not_go_on_with_the_training_of_the_first(slurm: Slurm, tmp_path: Path):
    script, shared = tmp_path / "script.py", tmp_path / "shared"
    script.write_text(SCRIPT)
    result = slurm.sbatch(
        f"""#!/bin/bash
#SBATCH --array=1-2%1 --open-mode=append --job-name=seeds
{sys.executable} {script} {shared}
{sys.executable} {script} {tmp_path}/own-$SLURM_ARRAY_TASK_ID
"""
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("task ")]
    assert lines == ["task 1 found None saved", "task 1 found None saved", "task 2 found None saved"], result.stdout
    assert "those of task 1 of Slurm's job array" in result.stdout
    assert "(seeds), and this is task 2 of it" in result.stdout
    assert [path.name for path in shared.glob("*.h5")] == ["checkpoint-1.h5"]
