"""Wire compression: how values are coded while they travel between ranks; one stage a file.

A *stage* turns numbers into bytes and back; users write their own by subclassing `Compression`.  The all-reduce bound
by `all_reduce_init`, or with ``compression=`` of a framework's adapter, sends what the stage makes.
"""

from __future__ import annotations

from mpidist.compression.base import Compression
from mpidist.compression.compressed import CompressedAllReduce
from mpidist.compression.floats import BFloat16, Float16
from mpidist.compression.replicas import all_reduce_init
from mpidist.compression.top_k import TopK
from mpidist.hints import public_module

__all__ = ["BFloat16", "CompressedAllReduce", "Compression", "Float16", "TopK", "all_reduce_init"]

public_module(__name__)
