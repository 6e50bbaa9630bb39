"""What `mpidist info` shows of GPUs: what is missing is a line with its cure."""

from __future__ import annotations

import sys

import pytest

from mpidist.commands import card_page
from mpidist.commands.card_page import ask_cuda, card_rows

TWO = {
    "cupy": "14.2.0",
    "nccl": 23203,
    "cuda": 13020,
    "driver": 13000,
    "cards": [["NVIDIA H100 80GB HBM3", 80 << 30, "0000:0A:00.0"], ["NVIDIA A100", 40 << 30, "0000:0B:00.0"]],
    "apart": [],
}


def rows(found, environ=None, driver_file="/nowhere"):
    return dict(card_rows(found, environ or {}, driver_file))


def test_two_gpus():
    assert card_rows(TWO, {}, "/nowhere") == [
        ("CuPy", "14.2.0"),
        ("CUDA", "driver for CUDA 13.0; runtime 13.2"),
        ("NCCL", "2.32.3"),
        ("several ranks on a card", "not by NCCL, but through the host: NCCL_MULTI_RANK_GPU_ENABLE=1 is not set"),
        ("GPUs", "2"),
        ("GPU:0", "NVIDIA H100 80GB HBM3, 80.0 GiB, 0000:0A:00.0"),
        ("GPU:1", "NVIDIA A100, 40.0 GiB, 0000:0B:00.0"),
        ("GPU to GPU", "each reaches the others' memory"),
    ]


def test_the_version_of_the_driver(tmp_path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 2025\nGCC version: 12.2.0\n")
    assert rows(TWO, driver_file=str(file))["CUDA"] == "driver 580.95.05 for CUDA 13.0; runtime 13.2"


def test_ranks_that_may_share_a_card():
    environ = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert rows(TWO, environ)["several ranks on a card"] == "by NCCL"
    old = rows({**TWO, "nccl": 22809}, environ)["several ranks on a card"]
    assert old == "not by NCCL, but through the host: NCCL is 2.28.9, and 2.30 or newer can do it"


def test_gpus_that_do_not_reach_each_other():
    shown = rows({**TWO, "apart": [[0, 1], [1, 0], [2, 1]]})["GPU to GPU"]
    assert shown == "through host memory between 0 and 1, 1 and 2"


def test_one_gpu_has_no_peers():
    assert "GPU to GPU" not in rows({**TWO, "cards": TWO["cards"][:1]})


def test_what_the_environment_shows():
    assert rows(TWO, {"CUDA_VISIBLE_DEVICES": "3,1"})["GPUs"] == "2 (CUDA_VISIBLE_DEVICES=3,1)"
    assert rows({**TWO, "cards": []}, {"CUDA_VISIBLE_DEVICES": ""})["GPUs"] == "none (CUDA_VISIBLE_DEVICES=)"


@pytest.mark.parametrize(("cuda", "package"), [(13020, "nvidia-nccl-cu13"), (12090, "nvidia-nccl-cu12")])
def test_without_nccl(cuda, package):
    found = {**TWO, "cuda": cuda, "no_nccl": "AttributeError: no attribute 'get_version'"}
    del found["nccl"]
    shown = rows(found)
    assert shown["NCCL"].endswith(f"so sums go through the host: pip install {package}")
    assert shown["GPUs"] == "2" and "several ranks on a card" not in shown


def test_without_a_driver():
    error = "CUDARuntimeError: cudaErrorInsufficientDriver: CUDA driver version is insufficient"
    found = {"cupy": "14.2.0", "nccl": 23203, "cuda": 13020, "driver": 0, "error": error}
    assert rows(found)["CUDA"] == "runtime 13.2; no driver"
    assert rows(found)["GPUs"] == f"CUDA shows none ({error})"


def test_gpus_that_were_seen_before_an_error_are_shown():
    found = {**TWO, "cards": TWO["cards"][:1], "error": "CUDARuntimeError: cudaErrorUnknown"}
    del found["apart"]
    assert rows(found)["GPU:0"] and rows(found)["asking them failed"] == "CUDARuntimeError: cudaErrorUnknown"


def test_without_cupy():
    shown = rows({"error": "ModuleNotFoundError: No module named 'cupy'"})
    assert shown["CuPy"].startswith("not installed")
    assert "pip install cupy-cuda13x" in shown["CuPy"] and "pip install -e '.[cuda13]'" in shown["CuPy"]
    assert set(shown) == {"CuPy", "GPUs"}
    broken = rows({"error": "ImportError: libcublas.so.13: cannot open shared object file"})
    assert broken["CuPy"].startswith("cannot be used (ImportError: libcublas.so.13")


@pytest.mark.parametrize("code", ["import os; os.abort()", "print('no answer')", "raise SystemExit(3)"])
def test_a_child_that_crashes_is_a_line(monkeypatch, code):
    monkeypatch.setattr(card_page, "_CHILD", code)
    assert "the process that imports CuPy ended with status" in rows(ask_cuda())["CuPy"]


def test_a_child_that_hangs_ends(monkeypatch):
    monkeypatch.setattr(card_page, "_CHILD", "import threading; threading.Event().wait()")
    assert "did not answer in 0.2 s" in rows(ask_cuda(timeout_seconds=0.2))["CuPy"]


PRETENDED = """
import sys, types
class Runtime:
    runtimeGetVersion = driverGetVersion = staticmethod(lambda: 13000)
    getDeviceCount = staticmethod(lambda: 2)
    getDeviceProperties = staticmethod(lambda index: {"name": b"card %d" % index, "totalGlobalMem": 1 << 30})
    deviceCanAccessPeer = staticmethod(lambda one, other: one < other)
cupy, nccl = types.ModuleType("cupy"), types.ModuleType("cupy.cuda.nccl")
cupy.cuda = types.ModuleType("cupy.cuda")
cupy.__version__ = "14.2.0"
cupy.cuda.runtime = Runtime
cupy.cuda.Device = lambda index: types.SimpleNamespace(pci_bus_id=f"0000:0{index}:00.0")
cupy.cuda.nccl = nccl
sys.modules.update({"cupy": cupy, "cupy.cuda": cupy.cuda, "cupy.cuda.nccl": nccl})
"""


def test_what_the_child_asks(monkeypatch):
    monkeypatch.setattr(card_page, "_CHILD", f"{PRETENDED}nccl.get_version = lambda: 23203\n{card_page._CHILD}")
    assert ask_cuda() == {
        "cupy": "14.2.0",
        "nccl": 23203,
        "cuda": 13000,
        "driver": 13000,
        "cards": [["card 0", 1 << 30, "0000:00:00.0"], ["card 1", 1 << 30, "0000:01:00.0"]],
        "apart": [[1, 0]],
    }


def test_the_child_sees_the_gpus_without_nccl(monkeypatch):
    monkeypatch.setattr(card_page, "_CHILD", f"{PRETENDED}\n{card_page._CHILD}")
    found = ask_cuda()  # CuPy puts an empty module in its place
    assert len(found["cards"]) == 2 and "get_version" in found["no_nccl"] and "error" not in found


def test_the_child_without_cupy(monkeypatch):
    monkeypatch.setattr(card_page, "_CHILD", f"import sys; sys.modules['cupy'] = None\n{card_page._CHILD}")
    assert list(ask_cuda()) == ["error"]
    assert sys.modules.get("cupy") is None
