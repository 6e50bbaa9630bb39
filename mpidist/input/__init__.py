"""Input: data sets, and each replica's exact part of every global batch."""

from __future__ import annotations

from mpidist.input.dataset import ArraySpec, Dataset
from mpidist.input.distributed import DistributedDataset, DistributedIterator

__all__ = ["ArraySpec", "Dataset", "DistributedDataset", "DistributedIterator"]
