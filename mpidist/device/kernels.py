"""The C++ of CUDA's kernels that are compiled for the dtypes of their arrays."""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from mpidist.arrays import wire_dtype

#: What C++ calls a dtype.
_TYPES = {
    "bool": "bool",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
}
_HEADERS = {"float16": "cuda_fp16.h", "bfloat16": "cuda_bf16.h"}

#: Elements that one block of threads updates; and how many one thread reads, of each array, before it computes.
CHUNK, _BATCH = 1 << 12, 4
#: Threads of a block: a power of 2.
THREADS = 256

#: The dtypes of parameters that the kernel updates.
UPDATED = frozenset({"float16", "bfloat16", "float32", "float64"})

#: The dtypes of flat arrays in which the kernel multiplies.
MULTIPLIED = frozenset({"float32", "float64"})


class Formula(NamedTuple):
    """What the step of an optimizer does to an element, in C++.

    `statement` changes the parameter ``p`` and the slots, by their names; ``g`` is the gradient, and further `numbers`
    have names too.  All are of the type ``real``, in which parameters are updated.
    """

    statement: str
    slots: tuple[str, ...]
    numbers: tuple[str, ...]


def update_text(formula: Formula, parameter: Any, gradient: Any) -> str:
    """Return the kernel ``update`` for parameters of a dtype, and gradients of one."""
    slots, numbers = formula.slots, formula.numbers
    return _filled(
        "update.cu",
        includes=_includes(parameter, gradient) + _text("blocks.cu"),
        real=_TYPES[wire_dtype(parameter).name],
        parameter=_TYPES[parameter.name],
        gradient=_TYPES[gradient.name],
        chunk=CHUNK,
        batch=_BATCH,
        statement=formula.statement,
        slot_members=" ".join(f"real* {name};" for name in slots),
        slots_at=" ".join(f"real* __restrict__ {name}_at = tensor.{name} + first;" for name in slots),
        slots_of="".join(f", {name}_of[{_BATCH}]" for name in slots),
        slots_read=" ".join(f"{name}_of[k] = {name}_at[at];" for name in slots),
        slots="".join(f", {name}_of[k]" for name in slots),
        slots_written=" ".join(f"{name}_at[at] = {name}_of[k];" for name in slots),
        slot_parameters="".join(f", real& {name}" for name in slots),
        number_members=" ".join(f"double {name};" for name in numbers),
        number_parameters="".join(f", const real {name}" for name in numbers),
        numbers_read=" ".join(f"const real {name}_number = (real)tensor.{name};" for name in numbers),
        numbers="".join(f", {name}_number" for name in numbers),
    )


def measure_text(gradient: Any) -> str:
    """Return the kernel ``measure`` for gradients of a dtype."""
    includes = _includes(gradient) + _text("blocks.cu") + _total()
    return _filled("measure.cu", includes=includes, gradient=_TYPES[gradient.name], chunk=CHUNK, batch=2 * _BATCH)


def judge_text() -> str:
    """Return the kernel ``judge``."""
    return _filled("judge.cu", includes=_total())


def convert_text(apart: Any, together: Any, is_multiplied: bool = False) -> str:
    """Return the kernel ``convert`` between tensors of one dtype and a flat array of another, or of the same one.

    With `is_multiplied` values are multiplied by its last argument, which is not read otherwise.
    """
    flat, value = _TYPES[together.name], "plain(values[k])"
    value = f"(({flat}){value} * factor)" if is_multiplied else value
    types = {"apart": _TYPES[apart.name], "together": flat, "value": value}
    return _filled("convert.cu", includes=_includes(apart, together), batch=2 * _BATCH, **types)


def _includes(*dtypes: Any) -> str:
    """Return what dtypes need; ``plain`` makes a float of 16 bits, from which C++ knows several ways on, a float."""
    lines = ["template <class T> __device__ inline T plain(T value) { return value; }"]
    for name in sorted({each.name for each in dtypes} & _HEADERS.keys()):
        lines.insert(0, f"#include <{_HEADERS[name]}>")
        lines.append(f"__device__ inline float plain({_TYPES[name]} value) {{ return (float)value; }}")
    return "\n".join([*lines, ""])


def _total() -> str:
    return _filled("total.cu", threads=THREADS)


def _filled(file: str, **texts: Any) -> str:
    return Template(_text(file)).substitute(texts)


def _text(file: str) -> str:
    return Path(__file__).with_name(file).read_text()
