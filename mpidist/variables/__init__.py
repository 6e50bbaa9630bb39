"""Variables: arrays that every replica holds a copy of; one noun a file."""

from mpidist.variables.aggregating_variable import AggregatingVariable
from mpidist.variables.arenas import Arenas
from mpidist.variables.indexed_slices import IndexedSlices
from mpidist.variables.one_copy import OneCopy
from mpidist.variables.snapshots import read_only
from mpidist.variables.split_variable import SplitVariable, sums_over_parts
from mpidist.variables.variable import DistributedValues, DistributedVariable, Variable, begin_writing, note_changes

__all__ = [
    "AggregatingVariable",
    "Arenas",
    "DistributedValues",
    "DistributedVariable",
    "IndexedSlices",
    "OneCopy",
    "SplitVariable",
    "Variable",
    "begin_writing",
    "note_changes",
    "read_only",
    "sums_over_parts",
]
