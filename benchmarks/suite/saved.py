"""Results of frameworks' benchmarks: a file for so many ranks, a launch after the other."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mpidist.commands.machine import machine
from mpidist.world import world_communicator


def add_launch(folder: str, name: str, package: str, launch: dict[str, Any], *options: str) -> None:
    """Add a launch of ``benchmarks.name`` to the results in a folder, with the machine and a package's version."""
    communicator = world_communicator()
    path = Path(folder) / f"{'-'.join([name, *options])}-{communicator.size}.json"
    command = ["run", "-n", str(communicator.size), "-m", f"benchmarks.{name}", "--save", "benchmarks/results"]
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"command": command, "launches": []}
    about = {"mpi": communicator.transport.library, package: version(package), **machine()}
    found["launches"].append({"machine": about, **launch})
    path.write_text(json.dumps(found, indent=1) + "\n")
