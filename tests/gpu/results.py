"""What ``tests/gpu/run`` has found, as ``results.json`` and as the page ``results.md``; and what it ran on.

python3 -m tests.gpu.results about FOLDER NOTE
python3 -m tests.gpu.results write FOLDER SECONDS LIMIT
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FORMAT = "mpidist tests/gpu 1"

_PACKAGES = ("numpy", "cupy", "torch", "jax", "mpi4py", "ml_dtypes", "pytest", "mpidist")

_CARD = ("name", "uuid", "pci.bus_id", "driver_version", "memory.total", "memory.used")


def about(folder: Path, note: str) -> None:
    """Print and write what the machine has.  Local; whatever cannot be found out is told."""
    found = {"note": note, "cards": _cards(), "python": platform.python_version(), "cores": _cores()}
    found |= {name: _tried(lambda name=name: _version(name)) for name in _PACKAGES}
    found["CuPy's NCCL, CUDA, driver"] = _tried(_cuda)
    for name, value in found.items():
        print(f"{name}: {value}")
    (folder / "about.json").write_text(json.dumps(found, indent=1) + "\n")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _cards() -> Any:
    command = ["nvidia-smi", f"--query-gpu={','.join(_CARD)}", "--format=csv,noheader"]
    lines = _tried(lambda: subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout)
    if isinstance(lines, dict):
        return lines
    return [dict(zip(_CARD, line.split(", "), strict=False)) for line in lines.splitlines()]


def _version(name: str) -> str:
    return str(getattr(importlib.import_module(name), "__version__", ""))


def _cuda() -> list[int]:
    nccl, runtime = (importlib.import_module(f"cupy.cuda.{name}") for name in ("nccl", "runtime"))
    return [nccl.get_version(), runtime.runtimeGetVersion(), runtime.driverGetVersion()]


def _tried(call: Any) -> Any:
    """Return what a call returns, or why it cannot."""
    try:
        return call()
    except Exception as error:
        return {"missing": f"{type(error).__name__}: {error}"}


def counts_of(text: str) -> dict[str, int]:
    """Return pytest's last line by words: ``{"passed": 3, "skipped": 1}``."""
    return {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", text.split(" in ")[0])}


def parts_of(text: str) -> list[dict[str, Any]]:
    """Return the parts that ``run`` has noted, one a line."""
    rows = [line.split("\t") for line in text.splitlines()]
    return [
        {"name": name, "seconds": int(seconds), "limit": int(limit), "status": status, "counts": counts_of(count)}
        for name, seconds, limit, status, count in rows
    ]


def write(folder: Path, seconds: int, limit: int) -> None:
    """Write both files, of what lies in the folder.  Local."""
    told, files = folder / "about.json", _files(folder)
    found = {
        "format": _FORMAT,
        "seconds": seconds,
        "limit": limit,
        "about": json.loads(told.read_text()) if told.exists() else {},
        "parts": parts_of((folder / "parts.tsv").read_text()),
        "benchmarks": [each.name for each in files],
    }
    (folder / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "results.md").write_text(page(found, _measured(files, _has_card(found))))


def _files(folder: Path) -> list[Path]:
    """Return what the benchmarks of this run wrote, and no earlier one: what is newer than the tale of the machine."""
    told = folder / "about.json"
    began = told.stat().st_mtime_ns if told.exists() else float("inf")
    written = (each for pattern in ("gpu-*.json", "*-cores-*.json") for each in folder.glob(pattern))
    return sorted(each for each in written if each.stat().st_mtime_ns >= began)


def _has_card(found: dict[str, Any]) -> bool:
    return isinstance(found["about"].get("cards"), list)


def _measured(files: Sequence[Path], has_card: bool) -> str:
    """Return tables of the benchmarks, and which targets a card reaches; empty where there are none."""
    from benchmarks.suite import markdown, results, targets

    launches = [launch for path in files for launch in results.read(path)]
    if not launches:
        return ""
    judged = f"```\n{targets.report(launches)}\n```\n\n" if has_card else ""
    told = [
        f"{name}: {_cell(value)}."
        for launch in launches
        for name, value in launch.machine.items()
        if name.endswith(": overlapped")
    ]
    return "\n\n".join(filter(None, [f"{judged}{markdown.tables(launches)}", markdown.choices(launches), *told])) + "\n"


def page(found: dict[str, Any], measured: str) -> str:
    """Return the page.  Local, pure."""
    title = "# On a GPU" if _has_card(found) else "# Without a card: no figure here is a GPU's"
    lines = [title, "", f"{found['seconds']} s of at most {found['limit']} s.", ""]
    lines += ["| part | s | limit, s | | tests |", "|---|---|---|---|---|"]
    for part in found["parts"]:
        counts = ", ".join(f"{number} {word}" for word, number in part["counts"].items())
        lines.append(f"| {part['name']} | {part['seconds']} | {part['limit']} | {part['status']} | {counts} |")
    lines += ["", "## The machine", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in found["about"].items()]
    return "\n".join([*lines, "", "## Measured", "", measured or "Nothing was measured.\n"])


def _cell(value: Any) -> str:
    """Return a value for a cell, in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(_cell, value))
    return str(value).replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    if sys.argv[1] == "about":
        about(Path(sys.argv[2]), sys.argv[3])
    else:
        write(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
