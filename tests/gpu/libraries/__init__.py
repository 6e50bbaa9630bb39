"""NVIDIA's own libraries as far as they go without a GPU: NVRTC compiles all kernels, NCCL says why it cannot start."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.gpu import emulated


def missing() -> str:
    """Return why these checks cannot run here; empty where they can."""
    why = emulated.missing()  # by it CuPy tells the options of its compiler
    if why:
        return why
    try:
        version = importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()
        nccl = importlib.import_module("cupy.cuda.nccl").get_version()
        headers = importlib.import_module("cupy._environment").get_cuda_path()
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"NVRTC or NCCL cannot be loaded ({told})"
    is_whole = headers is not None and (Path(headers) / "include" / "cuda_fp16.h").exists()
    return "" if version and nccl and is_whole else "there is no cuda_fp16.h of CUDA"
