"""`PlannedList`: what goes to each server of the gradients of one list of variables; `Plans`: those of a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy

from mpidist.collectives.reductions.plan_cache import PlanCache
from mpidist.parameter_server.client.part import PushPart, Residues
from mpidist.parameter_server.client.server_end import ServerEnd
from mpidist.parameter_server.layout import Key, PushPlan, VariableSpec, dtype_name, in_order
from mpidist.variables import IndexedSlices


class PlannedList:
    """What goes to each server of the gradients of one list of variables.

    No cycle of references leads back to it: when the client drops it, its parts say so to their servers.
    """

    def __init__(self, key: Any, parts: list[tuple[ServerEnd, PushPart]]) -> None:
        self.key = key
        self.parts = parts
        # a server that gathers has memory for the mean of a list's gradients
        self.nbytes = sum(part.plan.own_nbytes + part.nbytes * end.gathers for end, part in parts)
        self.last_call = 0


class Plans:
    """What a client plans for the lists of variables that it pushes, and what rounding loses of their gradients."""

    def __init__(
        self,
        servers: Sequence[ServerEnd],
        specs: Mapping[Key, VariableSpec],
        number_of: Callable[[Key], int],
        push_dtype: Any,
    ) -> None:
        self._servers, self._specs, self._number_of = servers, specs, number_of
        self._push_dtype = None if push_dtype is None else numpy.dtype(push_dtype)
        self._count = 0
        self.forget()

    def forget(self) -> None:
        """Forget all plans and residues, since a server is gone."""
        #: The lists that were pushed last.
        self.lists = PlanCache()
        self.residues = Residues()

    def find(self, keys: tuple[Key, ...], gradients: Sequence[Any], has_rows: bool = False) -> PlannedList:
        """Return what goes to each server, made anew for a list that is not among those pushed last.

        To be held weakly, since other lists may need the room; void when the client's `generation` grows.
        """
        key = keys, tuple([isinstance(each, IndexedSlices) for each in gradients]) if has_rows else ()
        found = self.lists.find(key)
        return PlannedList(key, self._made(keys, gradients)) if found is None else found

    def _made(self, keys: Sequence[Key], gradients: Sequence[Any]) -> list[tuple[ServerEnd, PushPart]]:
        """Make the plans for one list of variables, and tell the servers."""
        if len(set(keys)) != len(keys):
            raise ValueError(f"a variable has two gradients in one push: {keys}")
        place_of = {key: place for place, key in enumerate(keys)}
        parts: list[tuple[ServerEnd, PushPart]] = []
        kinds = sorted((key, isinstance(gradients[place], IndexedSlices)) for key, place in place_of.items())
        whole = sha256(repr(kinds).encode()).hexdigest()
        for end in self._servers:
            own = in_order(self._specs[key] for key in keys if self._number_of(key) == end.number)
            is_sparse = {spec: isinstance(gradients[place_of[spec.key]], IndexedSlices) for spec in own}
            # a server that has none of them counts the step all the same: all go by one number of steps
            dense = tuple(spec for spec in own if not is_sparse[spec])
            sparse = tuple(spec for spec in own if is_sparse[spec])
            plan = PushPlan(dense, sparse, self._push_dtype, whole if end.gathers else "")
            self._count += 1
            places, rows = ([place_of[spec.key] for spec in some] for some in (dense, sparse))
            part = PushPart(self._count, plan, places, rows, self.residues, end.forgotten)
            parts.append((end, part))
            narrow = None if plan.push_dtype is None else dtype_name(plan.push_dtype)
            its = {"dense": [spec.key for spec in dense], "sparse": [spec.key for spec in sparse]}
            end.tell_plan(part, push_dtype=narrow, digest=plan.digest, **its)
        return parts
