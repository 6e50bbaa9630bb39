"""NVRTC: CUDA C++ compiled by the host's compiler into shared objects, which runtime.cpp loads as modules."""

from __future__ import annotations

import fcntl
import hashlib
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
_FLAGS = ("-std=c++17", "-w", "-shared", "-fPIC")

#: Bits of floats are those of the GPU: no sum of a product is rounded once where the source rounds twice.
_KERNEL_FLAGS = ("-O1", "-ffp-contract=off", "-fpermissive")

_KERNEL = re.compile(r"__global__(?:\s|void|__launch_bounds__\(.*?\))+(?!__launch_bounds__)(\w+)\s*\(")
#: Memory of a block whose size is told at the launch.
_SIZED_AT_LAUNCH = re.compile(r"extern\s+__shared__\s+([\w ]+?)\s+(\w+)\[\]")
_LAUNCH = """
extern "C" void launch_{kernel}(const unsigned* sizes, void** given)
{{ emulated::launch<{has_barriers}>({kernel}, sizes, given); }}
extern "C" const size_t* sizes_{kernel}() {{ return emulated::sizes_of({kernel}); }}
"""


class CompileError(Exception):
    """The compiler's errors."""


def compiled(cache: Path, text: str, flags: Sequence[str], name: str = "") -> Path:
    """Return the shared object of a C++ source, made by the first process that asks for it."""
    key = hashlib.sha256("\0".join((text, *flags)).encode()).hexdigest()[:32]
    source, made = cache / f"{key}.cpp", cache / key / (name or "kernels.so")
    made.parent.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            source.write_text(text)
            temporary = made.with_suffix(".part")
            command = ["g++", *_FLAGS, *flags, source, "-o", temporary]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise CompileError(result.stderr)
            temporary.rename(made)
    return made


class Compiler:
    """The functions of CuPy's module ``nvrtc``, of which programs are numbers."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._programs: list[dict[str, Any]] = [{}]  # 0 is no program

    def install(self, module: Any) -> None:
        """Put its functions into CuPy's module."""
        for name in ("createProgram", "destroyProgram", "compileProgram"):
            setattr(module, name, getattr(self, name))
        module.NVRTCError = CompileError
        module.getVersion = lambda: (13, 0)
        module.getProgramLog = lambda program: self._programs[program]["log"]
        module.getCUBIN = module.getPTX = lambda program: self._programs[program]["code"]

    def createProgram(self, text: str, name: str, headers: Sequence[str], include_names: Sequence[str]) -> int:
        self._programs.append({"text": text, "log": "", "code": b""})
        return len(self._programs) - 1

    def destroyProgram(self, program: int) -> None:
        self._programs[program] = {}

    def compileProgram(self, program: int, options: Sequence[str]) -> None:
        own = self._programs[program]
        kernels = _KERNEL.findall(own["text"])
        if not kernels:  # CuPy asks for the compiler's version so
            return
        has_barriers = str("__syncthreads" in own["text"]).lower()
        launches = [_LAUNCH.format(kernel=each, has_barriers=has_barriers) for each in kernels]
        # not CUDA's own headers, which are for its compiler only
        flags = [each for each in options if each.startswith("-D") or re.match("-I.*/cupy/_core/", each)]
        flags = [*_KERNEL_FLAGS, *flags, f"-I{FOLDER}"]
        includes = "\n".join([(FOLDER / "prelude.h").read_text(), *re.findall("^#include.*", own["text"], re.M)])
        given = compiled(self._cache, includes, (*flags, "-xc++-header"), "prelude.h.gch")  # most of the work
        text = _SIZED_AT_LAUNCH.sub(r"static \1 \2[(48 << 10) / sizeof(\1)]", own["text"]) + "".join(launches)
        try:
            made = compiled(self._cache, text, (f"-I{given.parent}", *flags, "-include", "prelude.h"))
            own["code"] = made.read_bytes()
        except CompileError as error:
            own["log"] = str(error)
            raise
