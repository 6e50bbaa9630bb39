"""`RunOptions`: what `Strategy.run` accepts for TensorFlow's sake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`: they concern compilation for TPUs, and change nothing here.

    Parameters
    ----------
    experimental_enable_dynamic_batch_size, experimental_bucketizing_dynamic_shape : bool
    experimental_xla_options : object, optional
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
