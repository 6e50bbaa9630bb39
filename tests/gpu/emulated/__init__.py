"""An emulated CUDA below the real CuPy: `start` makes GPUs of the host's memory, before CuPy is imported.

CuPy's own code runs, and so do mpidist's kernels, compiled by g++.  It shows what values come out, which arguments
kernels and NCCL are given, and which memory is used; and whether streams and events order all work, for it is done
later, after random delays.  It cannot show NCCL itself, nor times.

With ``tests/gpu/emulated/site`` on PYTHONPATH every Python does so at its start: for jobs, scripts and benchmarks.

``EMULATED_GPUS``: how many there are, 2 by default; ranks that share one are staged through the host.
``EMULATED_SEED``: of the delays, 0 by default.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy

from tests.gpu.emulated import kernels

#: What is loaded in place of NVIDIA's, by the names under which CuPy asks for them.
_LIBRARIES = {"libcuda.so.1": "runtime.cpp", "libnccl.so.2": "nccl.cpp"}

#: The byte of memory that was given back.
_FREED = 0xFD

#: A jump to an address: mov rax, ADDRESS; jmp rax.
_JUMP = b"\x48\xb8%b\xff\xe0"


def missing() -> str:
    """Return why CUDA cannot be emulated here; empty where it can."""
    tools = [each for each in ("g++", "nm") if shutil.which(each) is None]
    if tools:
        return f"there is no {' and no '.join(tools)}"
    machine = f"{sys.platform} {platform.machine()}"
    return "" if machine == "linux x86_64" else f"it is for linux x86_64, and this is {machine}"


@cache
def start() -> None:
    """Emulate CUDA in this process; once."""
    assert "cupy" not in sys.modules, "CuPy was imported before its GPUs are emulated"
    folder = kernels.FOLDER.parents[2] / "build" / "emulated"
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"  # what is on disk is kernels.py's
    os.environ["CUPY_ACCELERATORS"] = ""  # CUB is compiled into CuPy, for real GPUs only
    loaded = {}
    for name, source in _LIBRARIES.items():
        text = (kernels.FOLDER / source).read_text()
        made = kernels.compiled(folder, text, ("-O2", f"-Wl,-soname,{name}", "-ldl"), name)
        loaded[name] = ctypes.CDLL(str(made), ctypes.RTLD_GLOBAL)
    _lead(importlib.import_module("cupy_backends.cuda.api.runtime").__file__, loaded["libcuda.so.1"])
    kernels.Compiler(folder).install(importlib.import_module("cupy_backends.cuda.libs.nvrtc"))
    cupy = importlib.import_module("cupy")
    importlib.import_module("cupy.cuda.nccl")
    maps = Path("/proc/self/maps").read_text()
    others = set(re.findall(r"/\S+/libnccl\.so\S*", maps)) - {loaded["libnccl.so.2"]._name}
    assert not others, f"NVIDIA's NCCL is loaded, too: {others}"
    functions = _overwriting(cupy)
    for each in functions:  # arrays that live as long as the process call them at its end
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in functions]
    cupy.cuda.set_allocator(cupy.cuda.CFunctionAllocator(0, *addresses, None).malloc)
    cupy.ndarray.__matmul__ = cupy.matmul = _by_numpy(cupy, "matmul")
    cupy.ndarray.argsort = cupy.argsort = _by_numpy(cupy, "argsort")
    cupy.asfortranarray = _by_numpy(cupy, "asfortranarray")


def _overwriting(cupy: Any) -> tuple[Any, Any]:
    """Return functions that take memory from CuPy's pool and give it back, overwritten in the order of its stream.

    They are C's: of memory in a cycle the garbage collector clears a function of Python before it is called.
    """
    pool, held, has_ended = cupy.get_default_memory_pool(), {}, sys.is_finalizing

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    def malloc(_: int, nbytes: int, device: int) -> int:
        memory = pool.malloc(nbytes)
        held[memory.ptr] = memory, cupy.cuda.get_current_stream()
        return int(memory.ptr)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    def free(_: int, address: int, device: int) -> None:
        if address and not has_ended():  # by then there is no function of a module any more
            memory, stream = held.pop(address)
            with cupy.cuda.Device(device):  # of a default stream each device has one
                memory.memset_async(_FREED, memory.mem.size, stream)

    return malloc, free


def _by_numpy(cupy: Any, name: str) -> Callable[..., Any]:
    """Return a function that CuPy has by cuBLAS or Thrust, which are not emulated."""

    def function(*arrays: Any, **options: Any) -> Any:
        return cupy.array(getattr(numpy, name)(*map(cupy.asnumpy, arrays), **options))

    return function


def _lead(path: str, library: ctypes.CDLL) -> None:
    """Lead the functions of CUDA's runtime that are linked into a module, to those of a library."""
    listed = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
    symbols = {name: int(at, 16) for at, _, name in (line.split() for line in listed.splitlines() if line[0] != " ")}
    module = ctypes.CDLL(path)
    entry = next(name for name in symbols if name.startswith("PyInit_"))
    base = ctypes.cast(getattr(module, entry), ctypes.c_void_p).value - symbols[entry]
    protect, page = ctypes.CDLL(None, use_errno=True).mprotect, mmap.PAGESIZE
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for name in (each for each in symbols if each.startswith("cuda") and hasattr(library, each)):
        target = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        code, at = _JUMP.replace(b"%b", target.to_bytes(8, "little")), base + symbols[name]
        first = at // page * page
        if protect(first, at + len(code) - first, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), f"cannot write over {name}")
        ctypes.memmove(at, code, len(code))
