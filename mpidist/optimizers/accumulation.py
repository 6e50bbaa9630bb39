"""Gradient accumulation: gradients of several micro-batches are added up on each rank, and reduced once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from mpidist import arrays
from mpidist.device.memory import kept, kept_empty
from mpidist.errors import listed
from mpidist.optimizers.saved_slots import ACCUMULATED, SavedSlots, accumulated_in, bind_by_name, described
from mpidist.optimizers.slices import compute_dtype
from mpidist.options import ReduceOp
from mpidist.variables import IndexedSlices

#: What the sums in a checkpoint are: 1, without a key, were those of a `Trainer` times the number of its ranks.
_VERSION = 2


class Accumulation:
    """This rank's sums of gradients since the last update.

    `count` micro-batches make one update; `micro_step` were added since the last one.
    """

    def __init__(self, count: int) -> None:
        if not isinstance(count, (int, numpy.integer)) or count < 1:
            raise ValueError(f"gradient_accumulation_steps must be a whole number of 1 or more, got {count}")
        self.count = count
        self.micro_step = 0
        self._sums: list[Any] = []
        self._names: list[str] = []
        self._variables: list[Any] = []
        # What was restored, until it is known of which variables it is.
        self._restored: list[SavedSlots] = []
        # Whether the sums are those of all replicas already, the same on each.
        self._are_sums = False
        # Whether they are so, and of whole variables, as after `restore`.
        self._is_total = False

    def add(self, gradients: Sequence[Any], variables: Sequence[Any], *, are_sums: bool = False) -> list[Any] | None:
        """Add a micro-batch; return the sums when it was the last one of an update, None before.  Local.

        With `are_sums` the gradients are sums over all replicas already, the same on each.

        ValueError where its variables are not those of the micro-batches before, or its gradients are sums over the
        replicas and theirs were not, or the other way round.
        """
        names = [variable.name for variable in variables]
        if self.micro_step == 0:
            self._names, self._variables, self._is_total = names, list(variables), False
            self._are_sums = are_sums
            before = self._sums if len(self._sums) == len(gradients) else [None] * len(gradients)
            self._sums = [_copied(each, old) for each, old in zip(gradients, before, strict=True)]
        else:
            self._take_restored(variables)
            self._require_same(names)
            self._keep_own_part(are_sums)
            self._require_same_aggregation(are_sums)
            self._sums = [_plus(total, each) for total, each in zip(self._sums, gradients, strict=True)]
        self.micro_step = (self.micro_step + 1) % self.count
        return None if self.micro_step else self._sums

    def state(self, paths: Mapping[int, str]) -> dict[str, Any]:
        """Return the sums over all replicas, in the middle of an update; nothing between updates.

        Collective in the middle of an update: every rank calls it in the same order.
        """
        if not self.micro_step:
            return {}
        sums, saved = [_dense(total) for total in self._sums], self._restored
        if not saved:
            saved = [SavedSlots(variable.name, variable=variable) for variable in self._variables]
        if not self._is_total:
            if not self._are_sums:
                sums = self._variables[0].strategy.extended.reduce_arrays(ReduceOp.SUM, sums)
            sums = [variable.joined(total) for variable, total in zip(self._variables, sums, strict=True)]
        arrays_by_key = {f"accumulated/{number}": total for number, total in enumerate(sums)}
        counts = {"micro_step": self.micro_step, "gradient_accumulation_steps": self.count}
        counts["accumulated_version"] = _VERSION
        return {**counts, **described(saved, ACCUMULATED, paths), **arrays_by_key}

    def saved_in(self, state: Mapping[str, Any], variables: Mapping[str, Any]) -> list[SavedSlots]:
        """Return the sums of a state, none between two updates; ValueError if it has others.  Local."""
        micro_step, count = int(state.get("micro_step", 0)), state.get("gradient_accumulation_steps")
        if not micro_step:
            return []
        version = int(state.get("accumulated_version", 1))
        if version != _VERSION:
            raise ValueError(
                f"the checkpoint was saved after micro-batch {micro_step} of an update, by another version of mpidist: "
                f"its sums of gradients are of version {version}, expected {_VERSION}. Those of version 1 depend on "
                "the number of ranks. Restore a checkpoint that was saved between two updates"
            )
        if micro_step >= self.count or count not in (None, self.count):
            raise ValueError(
                f"it was saved after {micro_step} of {count or 'several'} micro-batches, this optimizer has "
                f"gradient_accumulation_steps={self.count}; finish the update with as many as it was begun with"
            )
        return accumulated_in(state, variables)

    def restore(self, state: Mapping[str, Any], saved: list[SavedSlots]) -> None:
        """Take over what `state` gave, with the sums that are `saved_in` it.  Local."""
        self.micro_step = int(state.get("micro_step", 0))
        self._restored = saved
        found = [array for each in saved for array in each.arrays.values()]
        self._sums = [numpy.array(arrays.in_memory_of(numpy.empty(0), array)) for array in found]
        self._is_total = True

    def _take_restored(self, variables: Sequence[Any]) -> None:
        """Put what was restored into the order of the variables; ValueError where it is of others."""
        if not self._restored:
            return
        bind_by_name(self._restored, variables)
        total_of = {id(each.variable): total for each, total in zip(self._restored, self._sums, strict=True)}
        if total_of.keys() == set(map(id, variables)):
            self._sums = [total_of[id(variable)] for variable in variables]
            self._variables, self._restored = list(variables), []
        unclaimed = [each if each.variable is None else each.variable for each in self._restored]
        self._names = [each.name for each in unclaimed or self._variables]

    def _keep_own_part(self, are_sums: bool) -> None:
        """After `restore`, keep of each variable the part that this rank holds.

        Unless more sums over the replicas follow, the first replica alone keeps anything.  The variables tell both, so
        this waits until they are known.
        """
        if not self._is_total:
            return
        pairs = list(zip(self._variables, self._sums, strict=True))
        parts = [(variable, numpy.array(variable.own_part(total))) for variable, total in pairs]
        self._sums = [kept(arrays.in_memory_of(variable.live, part)) for variable, part in parts]
        if not are_sums and self._variables[0].strategy.extended.replica_id != 0:
            for total in self._sums:
                total[...] = 0
        self._is_total, self._are_sums = False, are_sums

    def _require_same(self, names: list[str]) -> None:
        if names != self._names:
            differing = sorted(set(names) ^ set(self._names)) or names
            raise ValueError(
                f"micro-batch {self.micro_step + 1} of {self.count} has gradients for other variables than the first, "
                f"or in another order: {listed(map(repr, differing))}; give all {self.count} the same list"
            )

    def _require_same_aggregation(self, are_sums: bool) -> None:
        if are_sums != self._are_sums and self._variables[0].strategy.extended.num_replicas > 1:
            raise ValueError(
                f"micro-batch {self.micro_step + 1} of {self.count} has skip_gradients_aggregation={are_sums}, the "
                f"micro-batches before had {self._are_sums}; give all {self.count} the same"
            )


def _copied(gradient: Any, before: Any) -> Any:
    """Return a copy that can be added to, in the array from before if it fits; 16-bit floats in float32."""
    if isinstance(gradient, IndexedSlices):
        return gradient
    dtype = compute_dtype(gradient.dtype)
    if not (type(before) is type(gradient) and before.shape == gradient.shape and before.dtype == dtype):
        before = kept_empty(gradient.shape, dtype, gradient)
    before[...] = gradient
    return before


def _plus(total: Any, gradient: Any) -> Any:
    if isinstance(total, IndexedSlices) and isinstance(gradient, IndexedSlices):
        library = arrays.namespace(total.values)
        values = library.concatenate([total.values, gradient.values])
        return IndexedSlices(values, library.concatenate([total.indices, gradient.indices]), total.dense_shape)
    if isinstance(total, IndexedSlices):
        return _plus(_copied(total.to_dense(), None), gradient)
    gradient = _dense(gradient)
    if type(total) is not type(gradient):  # a sum from a checkpoint is on the host
        total = _copied(gradient, None) * 0 + arrays.namespace(gradient).asarray(total)
    total += gradient
    return total


def _dense(gradient: Any) -> Any:
    return gradient.to_dense() if isinstance(gradient, IndexedSlices) else gradient
