"""`StoredVariable`: a variable on its server."""

from __future__ import annotations

from typing import Any

from mpidist.parameter_server.layout import VariableSpec


class StoredVariable:
    """A variable, or a shard of one, on its server: what rules need of it.

    `storage` is the value of a table; of a variable among others, in whichever copy it was made.
    """

    def __init__(self, spec: VariableSpec, storage: Any) -> None:
        self.spec = spec
        self.storage = storage
        self.name, self.shape, self.dtype = spec.name, spec.shape, spec.dtype

    @property
    def whole_name(self) -> str:
        """The name of the variable of which this may be a shard."""
        return self.name.removesuffix(f"/part_{self.spec.key[1]}")
