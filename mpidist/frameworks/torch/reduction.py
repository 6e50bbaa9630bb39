"""When the gradients of a model are reduced: at the end of the backward pass, once a step.

So whatever comes between ``backward()`` and ``step()`` (clipping, unscaling, the user's own looking) finds the reduced
gradients, as it would in one process.  A replica that makes no backward pass joins the others in its step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any
from weakref import WeakMethod, ref

import numpy
import torch

from mpidist.compression import Compression
from mpidist.frameworks.torch import crossing
from mpidist.frameworks.torch.backward import call_at_the_end
from mpidist.frameworks.torch.comparison import StepComparison, check_equal
from mpidist.frameworks.torch.gradients import GradientList
from mpidist.frameworks.torch.join import GRADIENTS, Joining
from mpidist.frameworks.torch.replicas import TorchReplicas
from mpidist.frameworks.torch.tensors import Named, check_memory

#: By the id of a parameter: itself, what reduces its gradient, and how that is called.
_owners: dict[int, tuple[ref[torch.Tensor], ref[Any], str]] = {}


class GradientReduction:
    """Reduces the gradients of some parameters.

    Parameters
    ----------
    replicas : TorchReplicas
    named : callable
        ``named()`` returns the (name, parameter) pairs that there are now, in the same order on all ranks.
    op : str
        ``"mean"`` or ``"sum"``.
    owner : str
        What it belongs to, for messages.
    passes : int
        How many backward passes are accumulated before gradients are reduced.
    staging : str, optional
        ``"host"`` has tensors of a device pass through host memory.
    sparse_as_dense : bool
    compression : Compression, optional

    Attributes
    ----------
    rows : float or None
        How many rows the loss of this replica is the mean of.  Then the mean over replicas, of which all say it, is
        weighted by rows.  It holds for the next reduction.
    is_held : bool
        Whether gradients are only accumulated for now.
    joining : Joining or None
        Where replicas may run out of rows.
    comparison : StepComparison or None
        What else is compared with each reduction, where no replica runs out of rows.
    """

    def __init__(
        self,
        replicas: TorchReplicas,
        named: Callable[[], Sequence[Named]],
        op: str,
        owner: str,
        passes: int = 1,
        staging: str | None = None,
        sparse_as_dense: bool = False,
        compression: Compression | None = None,
    ) -> None:
        if compression is not None and not isinstance(compression, Compression):
            raise TypeError(f"compression={compression!r}: pass None, or a stage such as mpidist.compression.Float16()")
        if passes < 1:
            raise ValueError(f"backward_passes_per_step={passes}: it is 1 or more")
        self.rows: float | None = None
        self.is_held = False
        self.joining: Joining | None = None
        self.comparison: StepComparison | None = None
        self.replicas, self.op, self.owner = replicas, op, owner
        self._named, self._passes, self._staging = named, passes, staging
        self._sparse_as_dense, self._compression = sparse_as_dense, compression
        self._list: GradientList | None = None
        self._sparse: frozenset[int] = frozenset()
        self._hooked: dict[int, ref[torch.Tensor]] = {}
        self._seen = 0  # backward passes since gradients were reduced last
        self._is_reduced = False  # since the last step
        self._last: tuple[str, float | None] = (op, None)
        self._crossed = crossing.count()
        self._mark: tuple[Any, int] | None = None  # a gradient as it was when it had been reduced
        self._bind(self._trainable())

    def _trainable(self) -> list[Named]:
        return [pair for pair in self._named() if pair[1].requires_grad]

    def _bind(self, named: Sequence[Named]) -> GradientList:
        """Return the list of these parameters, which are watched from now on."""
        if not named:
            raise ValueError(f"{self.owner} has no parameter that requires a gradient")
        check_memory(named, self._staging)
        new = [pair for pair in named if not self._is_hooked(pair[1])]
        for name, parameter in new:
            _own(name, parameter, self)
            self._hooked[id(parameter)] = ref(parameter)
        call_at_the_end([parameter for _, parameter in new], WeakMethod(self.end_of_backward))
        names, parameters = zip(*named, strict=True)
        if self._list is not None and names != tuple(self._list.names):
            self._sparse = frozenset()  # numbers of another list
        self._list = GradientList(
            self.replicas, names, parameters, self._sparse, self._sparse_as_dense, self._compression
        )
        return self._list

    def _is_hooked(self, parameter: torch.Tensor) -> bool:
        found = self._hooked.get(id(parameter))
        return found is not None and found() is parameter

    def listed(self) -> list[Named]:
        """Return the named parameters whose gradients are reduced.  Local."""
        assert self._list is not None
        return list(zip(self._list.names, self._list.parameters, strict=True))

    def _current(self) -> GradientList:
        """Return the list of the parameters as they are now: some may have been added, or frozen."""
        now, bound = self._trainable(), self._list
        assert bound is not None
        if len(now) == len(bound.parameters) and all(map(is_, [each for _, each in now], bound.parameters)):
            return bound
        if new := [pair for pair in now if not self._is_hooked(pair[1])]:
            check_equal(self.replicas, self.owner, new)
        return self._bind(now)

    def adopt(self) -> None:
        """Reduce, from now on, the gradients of the parameters that there are now.  Collective."""
        self._current()

    # -- when ---------------------------------------------------------------------------------------------------------

    def end_of_backward(self) -> None:
        """Reduce the gradients if this was the last pass before a step."""
        self._seen += 1
        if self.is_held or self._seen < self._passes:
            return
        if self.op == "sum" and self._is_added_to_reduced():
            raise RuntimeError(
                f"{self.owner}: a backward pass has added to gradients that were summed over the replicas already. "
                f"Ask for backward_passes_per_step={self._passes + 1} or more, or set gradients to zero in between"
            )
        self.reduce()

    def before_step(self) -> None:
        """Reduce the gradients if that was not done since the last step: others have made a backward pass.  Collective.

        Gradients that were reduced before count once.
        """
        if not self._is_reduced:
            self.reduce(is_stale=self._seen == 0 and self._is_mark_untouched())

    def after_step(self) -> None:
        """Take note that the step is over.  Local."""
        self._is_reduced = False

    def reduce(self, is_stale: bool = False, is_joined: bool = False) -> None:
        """Reduce the gradients, whatever has been done before.  Collective: every rank calls it in the same order.

        Parameters
        ----------
        is_stale : bool
            Whether they are those that were reduced before.
        is_joined : bool
            Whether this replica has run out of rows, and follows others.
        """
        if self.joining is not None and not is_joined:
            self.joining.announce(GRADIENTS)
        bound, compared = self._current(), None
        if self.joining is None and self.comparison is not None:
            compared = self.comparison
            compared.compare_parameters()
        op, scale = self._last = self._weight(is_stale)
        with torch.no_grad():
            sparse = bound.reduce(op, scale, self._staging is None, compared)
        if sparse != self._sparse:
            self._sparse = self._sparse | sparse
            self._bind(self.listed())
        self._seen, self._is_reduced = 0, True
        self._mark = self._marked(bound)

    def reduced_loss(self, loss: float) -> float:
        """Return the loss of all replicas, reduced as the gradients were last.

        Collective: every rank calls it in the same order.
        """
        op, scale = self._last
        value = numpy.array([loss if scale is None else loss * scale if scale else 0.0], numpy.float64)
        self.replicas.reduce(op, [value], "loss")
        return float(value[0])

    def _weight(self, is_stale: bool) -> tuple[str, float | None]:
        """Return by what this replica's gradients are multiplied, and what is done with all of them.

        Collective where rows are weighted.
        """
        rows, self.rows = self.rows, None
        crossed, self._crossed = self._crossed, crossing.count()
        if self.joining is not None and not self.joining.by_all and self.op == "mean":
            return "sum", 1.0 / len(self.joining.active)
        if rows is None or self.op == "sum":
            return self.op, 1.0 / self.replicas.size if is_stale and self.op == "sum" else None
        if crossed != self._crossed:
            raise RuntimeError(
                f"{self.owner}: rows={rows} weights gradients of which some come from other replicas' losses, by "
                "SyncBatchNorm. Divide each loss by the rows of the global batch (compute_average_loss), with op='sum'"
            )
        total = numpy.array([rows], numpy.float64)
        self.replicas.reduce("sum", [total], "rows")
        return "sum", float(rows / total[0]) if total[0] else 0.0

    # -- gradients that were reduced before ---------------------------------------------------------------------------

    def _marked(self, bound: GradientList) -> tuple[Any, int] | None:
        """Return a gradient by which is told later whether all were set to zero."""
        found = next((each.grad for each in bound.parameters if each.grad is not None), None)
        return None if found is None else (ref(found), found._version)

    def _is_added_to_reduced(self) -> bool:
        """Return whether the marked gradient was changed once since, as by a backward pass without ``zero_grad``."""
        found = None if self._mark is None else self._mark[0]()
        return found is not None and self._mark is not None and found._version == self._mark[1] + 1

    def _is_mark_untouched(self) -> bool:
        found = None if self._mark is None else self._mark[0]()
        return found is not None and self._mark is not None and found._version == self._mark[1]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Only accumulate gradients for the time of a ``with`` block.  Local."""
        before, self.is_held = self.is_held, True
        try:
            yield
        finally:
            self.is_held = before


class GradientOwner:
    """What a module and an optimizer whose gradients are reduced have in common."""

    _reduction: GradientReduction

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients in the passes of a ``with`` block; the next pass behind it reduces all.  Local."""
        with self._reduction.held():
            yield

    @property
    def rows(self) -> float | None:
        """How many rows the next loss is the mean of: set before ``backward()``, it weights the mean over replicas.

        Every rank sets it, or none does.
        """
        return self._reduction.rows

    @rows.setter
    def rows(self, rows: float) -> None:
        if not rows >= 0:
            raise ValueError(f"rows={rows}: a number of rows is 0 or more")
        self._reduction.rows = float(rows)


def _own(name: str, parameter: torch.Tensor, reduction: GradientReduction) -> None:
    """Take note who reduces a parameter's gradient; ValueError if somebody else does already."""
    other = _owner_of(parameter)
    if other is not None:
        gc.collect()  # it may have been dropped
        other = _owner_of(parameter)
    if other is not None:
        raise ValueError(
            f"{reduction.owner}: the gradient of {name!r} is reduced by {other} already; use one of the two"
        )
    key = id(parameter)
    _owners[key] = ref(parameter, lambda _: _owners.pop(key, None)), ref(reduction), reduction.owner


def _owner_of(parameter: torch.Tensor) -> str | None:
    found = _owners.get(id(parameter))
    is_owned = found is not None and found[0]() is parameter and found[1]() is not None
    return found[2] if found is not None and is_owned else None
