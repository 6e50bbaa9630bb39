"""`StoredVariable`: a variable on its server."""

from __future__ import annotations

from typing import Any

import numpy

from mpidist.parameter_server.layout import VariableSpec


class StoredVariable:
    """A variable, or a shard of one, on its server: what optimizers need of it.

    `storage` is the value of a table; of a variable among others, in whichever copy it was made.
    """

    #: Its slots are laid out by the server.
    block_slice = None

    def __init__(self, spec: VariableSpec, storage: Any) -> None:
        self.spec = spec
        self.storage = storage

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> Any:
        return self.spec.dtype

    @property
    def saved_shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def own_part(self, whole: Any) -> Any:
        return whole

    def joined(self, part: Any) -> Any:
        return part

    def empty_slot(self, dtype: Any) -> Any:
        return numpy.empty(self.spec.size, dtype)
