"""What is where in a module: whether parameters or layers have come, gone, or been replaced since somebody looked."""

from __future__ import annotations

from typing import Any

import torch

from mpidist.frameworks.torch.tensors import are_same


class Contents:
    """The parameters and layers in the tables of a module and of its layers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.note(module)

    def note(self, module: torch.nn.Module) -> None:
        """Take note of what is where now.  Local."""
        tables: list[Any] = [each for part in module.modules() for each in (part._parameters, part._modules)]
        self._full, self._empty = [each for each in tables if len(each)], [each for each in tables if not len(each)]
        self._noted = self._current()

    def forget(self) -> None:
        """Keep nothing of the module.  Local."""
        self._full, self._empty, self._noted = [], [], []

    def are_as_noted(self) -> bool:
        """Return whether nothing has changed since.  Local."""
        return are_same(self._current(), self._noted) and not any(self._empty)

    def _current(self) -> list[Any]:
        return [each for table in self._full for each in table.values()]
