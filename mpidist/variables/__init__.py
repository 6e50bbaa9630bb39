"""Variables: arrays that every replica holds a copy of; one noun a file."""

from mpidist.variables.indexed_slices import IndexedSlices
from mpidist.variables.split_variable import SplitVariable, sums_over_parts
from mpidist.variables.variable import DistributedValues, DistributedVariable, Variable, read_only

__all__ = [
    "DistributedValues",
    "DistributedVariable",
    "IndexedSlices",
    "SplitVariable",
    "Variable",
    "read_only",
    "sums_over_parts",
]
