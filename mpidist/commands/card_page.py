"""What `mpidist info` shows of GPUs: driver, CuPy, NCCL, the cards, and which of them reach each other."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpidist.arrays import GET_CUPY
from mpidist.commands.launch.probe import ask_child
from mpidist.device.cards import dotted_nccl, sharing_problem

#: A line of the page: what, and what about it.
Row = tuple[str, str]

#: Asked of a child process, so that a CUDA that hangs or crashes takes the child with it.
_CHILD = """
import json, warnings
warnings.simplefilter("ignore")
found = {}
try:
    import cupy
    found["cupy"] = cupy.__version__
    try:
        from cupy.cuda import nccl
        found["nccl"] = nccl.get_version()
    except Exception as error:
        found["no_nccl"] = f"{type(error).__name__}: {error}".splitlines()[0]
    runtime = cupy.cuda.runtime
    found["cuda"] = runtime.runtimeGetVersion()
    found["driver"] = runtime.driverGetVersion()
    count = runtime.getDeviceCount()
    found["cards"] = []
    for index in range(count):
        facts, bus_id = runtime.getDeviceProperties(index), cupy.cuda.Device(index).pci_bus_id
        found["cards"].append([facts["name"].decode(), int(facts["totalGlobalMem"]), str(bus_id)])
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    found["apart"] = [pair for pair in pairs if not runtime.deviceCanAccessPeer(*pair)]
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(found))
"""


def ask_cuda(timeout_seconds: float = 60.0) -> dict[str, Any]:
    """Return what a child process finds out about CuPy and the GPUs; Local."""
    try:
        return ask_child(_CHILD, [], timeout_seconds, "imports CuPy", may_crash=True)
    except subprocess.TimeoutExpired:
        return {"error": f"the process that imports CuPy did not answer in {timeout_seconds:g} s"}


def card_rows(
    cuda: Mapping[str, Any], environ: Mapping[str, str] = os.environ, driver_file: str = "/proc/driver/nvidia/version"
) -> list[Row]:
    """Return the lines about GPUs; Local.

    `cuda` is that of `ask_cuda`; `environ` has variables of CUDA and NCCL, `driver_file` the driver's version.
    """
    error = cuda.get("error", "")
    if "cupy" not in cuda:
        why = "not installed" if "No module" in error else f"cannot be used ({error})"
        return [("CuPy", f"{why}, needed for arrays in GPU memory only: {GET_CUPY}"), ("GPUs", _by_the_driver())]
    return [
        ("CuPy", cuda["cupy"]),
        ("CUDA", _cuda(cuda, driver_file)),
        ("NCCL", _nccl(cuda)),
        *_sharing(cuda, environ),
        *_cards(cuda, environ),
    ]


def _cuda(cuda: Mapping[str, Any], driver_file: str) -> str:
    runtime = _dotted_cuda(cuda.get("cuda", 0))
    if not cuda.get("driver"):
        return f"runtime {runtime}; no driver"
    return f"driver {_driver_version(driver_file)}for CUDA {_dotted_cuda(cuda['driver'])}; runtime {runtime}"


def _driver_version(driver_file: str) -> str:
    """Return the version of NVIDIA's driver with a blank behind it; nothing where it does not say."""
    try:
        words = Path(driver_file).read_text().split("\n")[0].split()
    except OSError:
        return ""
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025
    return next((f"{word} " for word in words if word[0].isdigit() and "." in word), "")


def _dotted_cuda(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else "unknown"


def _nccl(cuda: Mapping[str, Any]) -> str:
    if "nccl" in cuda:
        return dotted_nccl(cuda["nccl"])
    major = cuda.get("cuda", 0) // 1000 or 13
    why = cuda.get("no_nccl", "unknown")
    return f"not usable ({why}), so sums go through the host: pip install nvidia-nccl-cu{major}"


def _sharing(cuda: Mapping[str, Any], environ: Mapping[str, str]) -> list[Row]:
    if "nccl" not in cuda:
        return []
    problem = sharing_problem(cuda["nccl"], environ)
    return [("several ranks on a card", f"not by NCCL, but through the host: {problem}" if problem else "by NCCL")]


def _cards(cuda: Mapping[str, Any], environ: Mapping[str, str]) -> list[Row]:
    cards, error = cuda.get("cards"), cuda.get("error", "")
    if cards is None:
        return [("GPUs", f"CUDA shows none ({error})")]
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = "" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown})"
    rows = [("GPUs", f"{len(cards) or 'none'}{chosen}")]
    rows += [
        (f"GPU:{index}", f"{name}, {nbytes / 2**30:.1f} GiB, {bus_id}")
        for index, (name, nbytes, bus_id) in enumerate(cards)
    ]
    if error:
        return [*rows, ("asking them failed", error)]
    return rows + ([("GPU to GPU", _peers(cuda["apart"]))] if len(cards) > 1 else [])


def _peers(apart: Sequence[Sequence[int]]) -> str:
    """Return which GPUs cannot read each other's memory."""
    pairs = sorted({tuple(sorted(pair)) for pair in apart})
    if not pairs:
        return "each reaches the others' memory"
    return f"through host memory between {', '.join(f'{first} and {second}' for first, second in pairs)}"


def _by_the_driver() -> str:
    """Return the GPUs by the driver's word, where there is no CuPy to ask."""
    if not shutil.which("nvidia-smi"):
        return "none"
    command = ["nvidia-smi", "--query-gpu=name,memory.total,pci.bus_id", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown, nvidia-smi fails: {error}"
    lines = answer.stdout.split("\n")[:-1]
    if answer.returncode != 0 or not lines:
        return f"none: nvidia-smi says {(answer.stdout + answer.stderr).strip()}"
    return f"{len(lines)}: {'; '.join(lines)}"
