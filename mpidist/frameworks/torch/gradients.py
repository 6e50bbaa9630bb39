"""Gradients of a model's parameters, reduced over the replicas where they lie.

Which gradients there are may differ from replica to replica and from step to step.  All go through one bound list.  A
replica without a gradient of a parameter gives zeros, and says so in an array of flags.  That travels with the list; of
gradients on a device before it, in host memory: so nobody waits for the device in order to read it.  A parameter of
which no replica has a gradient gets none, as in one process.  Sparse gradients are reduced row by row, once the flags
have told all replicas of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import numpy
import torch

from mpidist.compression import Compression
from mpidist.errors import UnsupportedDtypeError
from mpidist.frameworks.replicas import Replicas
from mpidist.frameworks.torch import cuda
from mpidist.frameworks.torch.comparison import StepComparison
from mpidist.frameworks.torch.tensors import array_of, dtype_of, flat_of, is_flat, is_on_host, tensor_of
from mpidist.variables import IndexedSlices

#: What stands for the flags among the names of a list.
_FLAGS = "which gradients there are"

_NOTHING = nullcontext()

#: How many notes of the caller's go with the flags.
NOTES = 12


class GradientList:
    """The gradients of a list of parameters, bound to one collective.

    Collective: every rank makes it in the same order, with the same parameters.  `sparse` are the numbers of the
    parameters known to have sparse gradients, which `sparse_as_dense` reduces as dense ones; `compression` codes the
    dense ones.  `owner` says whose gradients they are, so that no two lists are taken for each other.  With `staging`
    ``"host"`` tensors of a device pass through host memory; without it all are on one device, or the host's.
    UnsupportedDtypeError for a compression, which codes values of the host, of parameters on a device.  `waiting` is
    that of the list that comes before this one.

    `notes` tell the other replicas: each is set to 0 or 1 before a reduction, and is not zero behind it where any
    replica has set it.  `keeps_apart` is such a note: a replica cannot begin to reduce these gradients in the backward
    pass.  Behind a reduction `has` is not zero, by number, where any replica has a gradient.  `signatures` are of the
    parameters that are not known to be sparse; `flags_signature`, of the flags, tells these gradients from others.
    `on_device`: they are reduced on a device.
    """

    def __init__(
        self,
        replicas: Replicas,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        sparse: frozenset[int] = frozenset(),
        sparse_as_dense: bool = False,
        compression: Compression | None = None,
        owner: str = "",
        staging: str | None = None,
        waiting: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self.names, self.parameters, self.sparse = list(names), list(parameters), sparse
        self.dtypes = [each.dtype for each in parameters]
        self._replicas, self._sparse_as_dense, self._compression = replicas, sparse_as_dense, compression
        self._is_coded = compression is not None and replicas.size > 1
        self._waiting = waiting or {}
        self._dense = [number for number in range(len(names)) if number not in sparse]
        signatures = [(names[each], dtype_of(parameters[each]), tuple(parameters[each].shape)) for each in self._dense]
        self._is_staged = staging is not None
        self.on_device = staging is None and any(map(cuda.has, parameters[:1]))
        self._place = parameters[0].device if self.on_device else torch.device("cpu")
        if self.on_device and compression is not None:
            raise UnsupportedDtypeError(
                f"compression={compression!r} codes gradients in host memory, and {names[0]!r} lies on "
                f"{parameters[0].device}: pass staging='host', which takes them there, or no compression"
            )
        dtypes = [dtype for _, dtype, _ in signatures if dtype.kind != "c" and not self.on_device]
        # in the dtype of gradients they go with these; as complex numbers, they are not coded
        kind = (dtypes[0] if dtypes else numpy.float32) if compression is None else numpy.complex64
        self._flags = numpy.zeros(2 * len(names) + NOTES + 1, kind)
        ends = [len(names), 2 * len(names), len(self._flags) - 1]
        self.has, self._is_sparse, self.notes, self.keeps_apart = numpy.split(self._flags, ends)
        self._lacks_any = False
        self.signatures = signatures
        self.flags_signature = (f"{_FLAGS} {owner}", self._flags.dtype, self._flags.shape)
        self._bound: dict[str, Any] = {}
        self._zeros: dict[int, torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept: dict[int, tuple[int, Any]] = {}

    def reduce(self, op: str, scale: float | None = None, compared: StepComparison | None = None) -> frozenset[int]:
        """Reduce the gradients in place, and return the numbers of those that were found to be sparse on some replica.

        Collective.  This replica's gradients are multiplied by `scale` first; `compared` is compared with them.
        """
        if self._replicas.size == 1 and not self._sparse_as_dense:
            return frozenset()  # nothing is touched, not even by a factor of 1
        with self.in_order():
            self._reduce_dense(op, scale, compared)
            for tensor, copy in self._copies:
                tensor.copy_(copy)
            self._copies.clear()
            if not self._lacks_any and not self._is_sparse.any():
                return frozenset()
            return self._settle(op, scale)

    @property
    def is_plain(self) -> bool:
        """Whether all are reduced as they are, where they lie, as far as is known."""
        return not (self._is_staged or self._sparse_as_dense or self._compression or self.sparse)

    def in_order(self) -> AbstractContextManager[None]:
        """Have what is done to arrays be ordered with PyTorch's work on their device, for a ``with`` block.  Local."""
        return cuda.in_order_of(self.parameters[0]) if self.on_device else _NOTHING

    @cached_property
    def kind(self) -> Any:
        """An array of the kind that is reduced on a device; None on the host."""
        return array_of(torch.empty(0, device=self._place)) if self.on_device else None

    def tell(self) -> Any:
        """Return which gradients this replica has, and its notes, for another collective to add up.  Local."""
        return numpy.concatenate([[each.grad is not None for each in self.parameters], self.notes.real])

    def hear(self, told: Any) -> None:
        """Take in the sum over the replicas of what they told.  Local."""
        self.has[:], self.notes[:] = numpy.split(told != 0, [len(self.names)])

    def _reduce_dense(self, op: str, scale: float | None, compared: StepComparison | None) -> None:
        """Reduce the flags, and the gradients that are not known to be sparse."""
        flags, rest = self._bound_to(op)
        arrays = self._device_arrays(scale) if self.on_device else self._host_arrays(scale)
        if compared is not None:
            compared.compare_groups(flags)
        if rest is None:
            flags([*arrays, self._flags])
        else:
            flags([self._flags])
            rest(arrays)

    def _bound_to(self, op: str) -> tuple[Any, Any]:
        """Return what reduces the flags, and what reduces gradients; None where they go with the flags."""
        if op not in self._bound:
            bind, own = self._replicas.bind_in_place, self.flags_signature
            if self.on_device:
                self._bound[op] = bind(op, [own]), bind(op, self.signatures, kind=self.kind)
            else:
                self._bound[op] = bind(op, [*self.signatures, own], self._compression), None
                self._take_over(op)
        found: tuple[Any, Any] = self._bound[op]
        return found

    def _take_over(self, op: str) -> None:
        """Have what another list has kept of these gradients go on waiting here.  Local."""
        waiting = self._waiting.get(op, {})
        for at, (name, _, shape) in enumerate(self.signatures):
            values = waiting.pop(name, None)
            if values is not None and values.shape == shape:
                self._bound[op][0].reduce.keep({at: values})

    def waiting(self) -> dict[str, dict[str, Any]]:
        """Return what error feedback keeps of gradients on this rank, by operation and name.  Local."""
        by_op = {op: dict(kept) for op, kept in self._waiting.items()}
        for op, (bound, _) in self._bound.items():
            kept = bound.reduce.waiting() if self._is_coded else {}
            by_op[op] = by_op.get(op, {}) | {self.signatures[at][0]: values for at, values in kept.items()}
        return by_op

    def _host_arrays(self, scale: float | None) -> list[Any]:
        """Return this replica's gradients as arrays, and set the flags; zeros for those that it does not have."""
        self._begin()
        arrays = []
        for number in self._dense:
            gradient: Any = self.parameters[number].grad
            if not self._is_staged:
                try:
                    array = gradient.numpy()
                except (AttributeError, TypeError, RuntimeError):  # there is none, or it is of another kind
                    array = None
                if array is not None and array.flags.c_contiguous:
                    arrays.append(array)
                    continue
            arrays.append(array_of(self._flat(number, gradient)))
        if scale is not None:
            for values in arrays:
                if scale:
                    numpy.multiply(values, scale, out=values)
                else:
                    values.fill(0)  # a rank without rows may have gradients that are no numbers
        return arrays

    def _device_arrays(self, scale: float | None) -> list[Any]:
        """Return the same on the device; an array is made anew where a gradient lies elsewhere than before."""
        self._begin()
        tensors = [self._flat(number, self.parameters[number].grad) for number in self._dense]
        if scale is not None:
            for each in tensors:
                each.mul_(scale) if scale else each.zero_()
        return [self._array(number, each) for number, each in zip(self._dense, tensors, strict=True)]

    def _array(self, number: int, tensor: torch.Tensor) -> Any:
        """Return the array of a tensor, which keeps nothing alive: a gradient's memory is free when it is dropped."""
        if tensor.dtype is not self.parameters[number].dtype:
            return array_of(tensor)  # which is refused
        address, kept = tensor.data_ptr(), self._kept.get(number)
        if kept is None or kept[0] != address or kept[1].shape != tensor.shape:
            kept = self._kept[number] = address, cuda.array_of(tensor, dtype_of(tensor), is_kept=False)
        return kept[1]

    def _begin(self) -> None:
        """Set the flags of a replica that has all gradients, but for those known to be sparse."""
        self.has.fill(1)
        self._is_sparse.fill(0)
        self._lacks_any = False
        for number in self.sparse:
            self.has[number] = self._is_sparse[number] = self.parameters[number].grad is not None
            self._lacks_any |= not self.has[number]

    def _flat(self, number: int, gradient: Any) -> torch.Tensor:
        """Return a gradient where it is reduced, or what is reduced in its place."""
        if gradient is not None and gradient.layout is torch.strided:
            is_near = gradient.device == self._place if self.on_device else is_on_host(gradient)
            if is_near and is_flat(gradient):
                found: torch.Tensor = gradient.detach()
                return found
        return self._dense_of(number, gradient)

    def _dense_of(self, number: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """Return what is reduced in place of a gradient that is missing, sparse, or lies elsewhere."""
        parameter = self.parameters[number]
        if gradient is not None and gradient.layout is torch.strided:
            copy = flat_of(gradient.to(self._place))
            self._copies.append((gradient.detach(), copy))
            return copy
        if gradient is not None and (self._sparse_as_dense or gradient.sparse_dim() != 1):
            parameter.grad = gradient.detach().to_dense()
            return parameter.grad
        self.has[number] = 0 if gradient is None else 1
        self._lacks_any |= gradient is None
        self._is_sparse[number] = self.has[number]
        zeros = self._zeros.get(number)
        if zeros is None:
            zeros = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._place)
            self._zeros[number] = zeros
        return zeros.zero_()

    def _settle(self, op: str, scale: float | None) -> frozenset[int]:
        """Give this replica the gradients that others have, and reduce those that are sparse anywhere."""
        has, is_sparse = self.has != 0, self._is_sparse != 0
        if self._is_coded:
            # else what error feedback has sent of it at last would be lost
            nobodys = {at: array_of(self._zeros[each]) for at, each in enumerate(self._dense) if not has[each]}
            self._bound[op][0].reduce.take_back(nobodys)
        sparse = []
        for number, parameter in enumerate(self.parameters):
            if is_sparse[number]:
                sparse += [number]
                self._settle_rows(number, parameter, op, scale)
            elif has[number] and parameter.grad is None:
                parameter.grad = self._zeros.pop(number).to(parameter.device)
        return frozenset(sparse)

    def _settle_rows(self, number: int, parameter: torch.Tensor, op: str, scale: float | None) -> None:
        """Reduce a gradient that is sparse on some replica; on others it may be dense, or missing."""
        gradient = parameter.grad
        rows = _rows_of(parameter, gradient if number in self.sparse or _is_sparse(gradient) else None)
        if scale is not None:
            weighed = rows.values * rows.dtype.type(scale) if scale else numpy.zeros_like(rows.values)
            rows = rows.with_values(weighed)
        rows = self._replicas.reduce_rows(op, rows)
        total = _sparse_tensor(parameter, rows)
        if number not in self.sparse:
            # the dense ones of other replicas, which are in the zeros of this one
            dense = self._zeros.get(number) if gradient is None or _is_sparse(gradient) else gradient
            if dense is not None and torch.count_nonzero(dense):  # the same on all: a replica gave a dense one
                total = total.to_dense() + dense.to(parameter.device)
        parameter.grad = total


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided


def _rows_of(parameter: torch.Tensor, gradient: torch.Tensor | None) -> IndexedSlices:
    """Return a gradient as rows: of a dense one all, of one that is missing none."""
    shape = tuple(parameter.shape)
    if gradient is None:
        return IndexedSlices(
            numpy.empty((0, *shape[1:]), dtype_of(parameter)), numpy.empty(0, numpy.int64), dense_shape=shape
        )
    gradient = cuda.awaited(gradient)
    if gradient.layout is torch.strided:
        gradient = gradient.to_sparse(1)
    gradient = gradient.detach().coalesce().cpu()
    return IndexedSlices(array_of(gradient.values()), gradient.indices()[0].numpy(), dense_shape=shape)


def _sparse_tensor(parameter: torch.Tensor, rows: IndexedSlices) -> torch.Tensor:
    """Return reduced rows as a sparse gradient of a parameter."""
    values = tensor_of(numpy.ascontiguousarray(rows.values))
    indices = torch.from_numpy(numpy.ascontiguousarray(rows.indices))[None]
    found = torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)
    return found.to(parameter.device)
