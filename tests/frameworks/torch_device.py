"""A pretended CUDA device for PyTorch: tensors of the host whose arrays refuse to be read by the host.

What is pretended is what `mpidist.frameworks.torch.cuda` says of tensors, and what PyTorch does in order to copy one to
the host.
"""

from __future__ import annotations

from contextlib import contextmanager
from time import perf_counter

import numpy
import torch

from mpidist.frameworks.torch import cuda, tensors
from mpidist.testing.device import DeviceArray

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8]


class Device:
    """What is pretended, and how often the host had to wait for it."""

    def __init__(self, monkeypatch):
        self.copies, self.depth, self.arrays = 0, 0, 0
        self._on_host = []  # kept, so that no other memory has their addresses
        self._cpu = torch.Tensor.cpu
        for dtype in DTYPES:  # made of tensors of the host
            tensors.is_known(dtype)
        monkeypatch.setattr(cuda, "has", self.has)
        monkeypatch.setattr(cuda, "require_cupy", lambda: None)
        monkeypatch.setattr(cuda, "array_of", self.array_of)
        monkeypatch.setattr(cuda, "tensor_of", self.tensor_of)
        monkeypatch.setattr(cuda, "in_order_of", self.in_order_of)
        monkeypatch.setattr(cuda, "now", lambda tensor: perf_counter())
        monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: self.to_host(tensor))

    def has(self, tensor):
        address = _address(tensor)
        return address == 0 or all(address != _address(each) for each in self._on_host)

    def to_host(self, tensor):
        if self.has(tensor):
            self.copies += 1
            tensor = tensor.detach().clone()
            self._on_host.append(tensor)
        return tensor

    def array_of(self, tensor, dtype, is_kept=True):
        self.arrays += 1
        bits = tensor.detach().view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor.detach()
        return DeviceArray(bits.numpy().view(dtype))

    def tensor_of(self, array):
        assert self.depth, "a tensor was made of an array outside of the order of PyTorch's stream"
        return torch.from_numpy(array._hidden.view(numpy.int16) if array.dtype.name == "bfloat16" else array._hidden)

    @contextmanager
    def in_order_of(self, tensor):
        assert self.has(tensor)
        self.depth += 1
        yield
        self.depth -= 1


def _address(tensor):
    return (tensor._values() if tensor.is_sparse else tensor).untyped_storage().data_ptr()
