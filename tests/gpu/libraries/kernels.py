"""Compile every kernel that mpidist can ask for by NVRTC, for two kinds of GPUs, and print what it needs of them.

``python -m tests.gpu.libraries.kernels`` fails where one does not compile, or spills registers into
memory.  CuPy's options are those that it gives its compiler on emulated GPUs.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - with it NumPy knows bfloat16
import numpy

from mpidist import arrays, optimizers
from mpidist.device import kernels
from mpidist.errors import UnsupportedDtypeError
from mpidist.optimizers.rule import Rule, Step
from tests.gpu import emulated
from tests.gpu.emulated.kernels import CompileError, Compiler

#: Of an A100, and of an H100 or H200.
_ARCHITECTURES = ("sm_80", "sm_90")

#: What is printed of a kernel, and how the compiler says it; 0 where it does not.
_COLUMNS = {
    "registers": r"Used (\d+) registers",
    "spill stores": r"(\d+) bytes spill stores",
    "spill loads": r"(\d+) bytes spill loads",
    "local": r"(\d+) bytes stack frame",
    "shared": r"(\d+) bytes smem",
}
_BAD = ("spill stores", "spill loads", "local")


class _Asked(Exception):
    """Ends a compilation as soon as it is known what CuPy asks for."""


class Kernel(NamedTuple):
    """What is compiled."""

    name: str
    text: str
    options: tuple[str, ...]


def _all_kernels() -> Iterator[tuple[str, Any]]:
    """Yield the name and CuPy's kernel of everything that `mpidist.device.cuda` can ask for."""
    from mpidist.device import cuda

    yield "move", cuda._move_kernel()
    yield "mark", cuda._mark_kernel()
    yield "judge", cuda._judge_kernel()
    for apart, together, is_multiplied in sorted(_conversions(), key=str):
        times = " times a factor" if is_multiplied else ""
        yield f"convert {apart} and {together}{times}", cuda._convert_kernel(apart, together, is_multiplied)
    parameters = [numpy.dtype(name) for name in sorted(kernels.UPDATED)]
    pairs = [(each, gradient) for each in parameters for gradient in dict.fromkeys((each, arrays.wire_dtype(each)))]
    for gradient in sorted({gradient for _, gradient in pairs}, key=str):
        yield f"measure {gradient}", cuda._measure_kernel(gradient)
    for name, formula in _formulas().items():
        for parameter, gradient in pairs:
            yield f"update {name} {parameter} by {gradient}", cuda._update_kernel(formula, parameter, gradient)


def _conversions() -> set[tuple[numpy.dtype, numpy.dtype, bool]]:
    """Return what `CudaPacking` asks for: between values or results of reductions, and what they are reduced in."""
    found = set()
    for own, op in itertools.product(map(numpy.dtype, kernels._TYPES), (*arrays.REDUCTIONS, "mean")):
        try:
            arrays.check_reducible(own, "sum" if op == "mean" else op)
        except UnsupportedDtypeError:
            continue
        together, result = arrays.reduction_dtypes(own, op)
        for apart in (own, result):
            if apart != together:
                found.add((apart, together, False))
            if together.name in kernels.MULTIPLIED:
                found.add((apart, together, True))
    return found


def _formulas() -> dict[str, Any]:
    """Return each formula of an optimizer once, by the first one that has it, over all settings that are off."""
    names: dict[Any, str] = {}
    for family in (getattr(optimizers, each) for each in optimizers.__all__):
        if not (inspect.isclass(family) and issubclass(family, Rule)) or inspect.isabstract(family):
            continue
        given = inspect.signature(family).parameters.values()
        off = [each.name for each in given if each.default is False or each.default == 0]
        for chosen in itertools.product((False, True), repeat=len(off)):
            on = [name for name, is_on in zip(off, chosen, strict=True) if is_on]
            rule = family(**{name: True for name in on})
            if rule.has_formula:
                formula, _ = rule.in_formula([Step(rule.coefficients(0.1, 0))])
                names.setdefault(formula, " ".join([family.__name__, *on]))
    return {name: formula for formula, name in names.items()}


class _Compiler(Compiler):
    """The emulated compiler, which only notes what CuPy asks it for."""

    def compileProgram(self, program: int, options: Sequence[str]) -> None:
        text = self._programs[program]["text"]
        if "__global__" in text:  # else CuPy asks for the compiler's version
            raise _Asked(text, options)


def _asked(kernel: Any, name: str) -> Kernel:
    """Return what CuPy asks its compiler for."""
    try:
        kernel.compile()
    except _Asked as asked:
        text, options = asked.args
        return Kernel(name, text, tuple(each for each in options if not each.startswith("-arch")))
    raise AssertionError(f"CuPy did not compile {name}")


def main() -> int:
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    names = ("createProgram", "compileProgram", "getProgramLog", "getVersion")
    create, compile_, log_of, version = (getattr(nvrtc, each) for each in names)
    emulated.start()
    _Compiler(Path()).install(nvrtc)

    def compiled(kernel: Kernel, architecture: str) -> str:
        """Return the compiler's log, which begins with an exclamation mark where it failed."""
        program = create(kernel.text, "", (), ())
        try:
            compile_(program, (*kernel.options, f"-arch={architecture}", "--ptxas-options=-v"))
        except CompileError:
            return f"!{log_of(program)}"
        return str(log_of(program))

    found = [_asked(kernel, name) for name, kernel in _all_kernels()]
    jobs = [(kernel, architecture) for kernel in found for architecture in _ARCHITECTURES]
    print(f"NVRTC {'.'.join(map(str, version()))}: {len(found)} kernels; memory in bytes: a thread's, shared a block's")
    print(f"{'':56}{''.join(f'{each:>14}' for each in _COLUMNS)}")
    problems, registers = [], 0
    with ThreadPoolExecutor() as pool:
        for (kernel, architecture), log in zip(jobs, pool.map(lambda job: compiled(*job), jobs), strict=True):
            label = f"{architecture} {kernel.name}"
            if log.startswith("!") or "Used" not in log:
                problems.append(f"{label}: does not compile:\n{log}")
                continue
            numbers = {name: sum(map(int, re.findall(pattern, log))) for name, pattern in _COLUMNS.items()}
            print(f"{label:56}{''.join(f'{each:14}' for each in numbers.values())}")
            registers = max(registers, numbers["registers"])
            problems += [f"{label}: {numbers[each]} bytes of {each}" for each in _BAD if numbers[each]]
    print("\n".join([*problems, f"{len(jobs)} compiled, at most {registers} registers, {len(problems)} problems"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
