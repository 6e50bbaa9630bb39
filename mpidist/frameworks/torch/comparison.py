"""Comparison of tensors and hyperparameters between replicas: errors on all of them that name what differs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref
from zlib import crc32

import numpy
import torch

from mpidist.collectives.call import FactsAndAdvice
from mpidist.collectives.mismatch import fact
from mpidist.errors import CollectiveMismatchError, listed
from mpidist.frameworks.replicas import Replicas
from mpidist.frameworks.torch import cuda
from mpidist.frameworks.torch.tensors import Named, bytes_of, expanded_axes, flat_of, integers_of

#: Values whose differences are at most so many times the last bit of the largest one may come from rounding: processors
#: of different kinds compute the same step.
_ROUNDING = 16

#: How many sums stand for a tensor on a device.
_COLUMNS = 512

#: Entries that say how PyTorch computes a step, not what; ranks of different kinds may differ in them.
_WAYS = {"foreach", "fused", "capturable", "differentiable"}

#: By which digests of several optimizers are put together.
_ODD = 0x9E3779B97F4A7C15

_ADVICE = (
    "All replicas must step with the same hyperparameters: change them alike on all ranks, such as by a scheduler that "
    "gets the mean of the loss over all ranks (mpidist.torch.allreduce)"
)


def check_alike(replicas: Replicas, what: str, named: Sequence[Named]) -> None:
    """Raise CollectiveMismatchError on all ranks unless all have such tensors; the first that differs is named.

    Collective.
    """
    replicas.check(what, [described(name, tensor) for name, tensor in named])
    if shapeless := [name for name, tensor in named if _is_shapeless(tensor)]:
        raise ValueError(
            f"{', '.join(map(repr, shapeless[:8]))}: no shape yet; make one forward pass first, from which lazy "
            "modules take it"
        )


def check_equal(replicas: Replicas, what: str, named: Sequence[Named]) -> None:
    """Raise CollectiveMismatchError on all ranks unless all have the same values in new parameters; names one.

    Collective.
    """
    check_alike(replicas, f"{what}: new parameters", named)
    if replicas.size == 1:
        return
    sums = _sums_by_rank(replicas, named, what)
    for number, (name, _) in enumerate(named):
        if others := [rank for rank, each in enumerate(sums) if each[number] != sums[0][number]]:
            where = listed(map(str, others))
            raise CollectiveMismatchError(
                f"{what}: the new parameter {name!r} has other values on rank {where} than on rank 0. Give all ranks "
                "those of one (broadcast_parameters) when it is made; add_param_group of a DistributedOptimizer does"
            )


def described(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    """Return a tensor as a call describes it."""
    dtype = str(tensor.dtype).replace("torch.", "")
    if _is_shapeless(tensor):
        return name, f"lazy {dtype}", ()
    if tensor.layout is not torch.strided:
        dtype += f" {tensor.layout}".replace("torch.", "")
    elif tensor.is_meta:
        dtype += " meta"
    elif cuda.has(tensor):
        dtype += " on CUDA"
    elif axes := expanded_axes(tensor):
        dtype += f" expanded in axis {', '.join(map(str, axes))}"
    return name, dtype, tuple(tensor.shape)


def _is_shapeless(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)


class StepComparison:
    """Compares, with the reductions of gradients, what must stay the same on all replicas without being sent.

    Hyperparameters are compared with every reduction, by a digest for which no message is sent; parameters once in
    `every` reductions, 0 never.  ``named()`` returns the (name, parameter) pairs that there are now.  Of `optimizer`
    the entries of its ``param_groups`` that PyTorch knows (``defaults``) are compared; without one, those of the
    optimizers of which `note` was told before the last reduction.
    """

    def __init__(
        self,
        replicas: Replicas,
        named: Callable[[], Sequence[Named]],
        every: int,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"check_every={every!r}: it is a number of reductions, or 0 for never")
        self._replicas, self._named, self._every, self._count = replicas, named, every, 0
        self._is_in_doubt = False  # parameters were found to differ, and no step was made since
        self._is_of_one = optimizer is not None
        self._known: WeakKeyDictionary[torch.optim.Optimizer, _Groups] = WeakKeyDictionary()
        # since the last reduction, and before it: then ranks are known to have made the same steps
        self._noted: dict[torch.optim.Optimizer, _Groups] = {}
        self._kept: dict[torch.optim.Optimizer, _Groups] = {}  # also those that the user has dropped since
        self._ready: list[_Groups] = [] if optimizer is None else [_Groups(optimizer)]

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note that an optimizer has made a step with the gradients.  Local."""
        if not self._is_of_one and optimizer not in self._noted:
            if optimizer not in self._known:
                self._known[optimizer] = _Groups(optimizer)
            self._noted[optimizer] = self._known[optimizer]

    def _digest(self) -> int:
        """Return 64 bits that stand for the hyperparameters; 0 where none are known."""
        digest = 0
        for groups in self._ready:
            digest = (digest * _ODD + groups.digest()) % 2**64
        return digest

    def are_compared(self) -> None:
        """Take note that a reduction, with which hyperparameters were compared, has come to its end.  Local."""
        if not self._is_of_one:
            self._kept, self._noted = self._noted, {}
            self._ready = [*self._kept.values()]

    def compare_groups(self, bound: Any = None) -> None:
        """Have the hyperparameters compared with a bound collective; where it cannot, compare them now.  Collective."""
        if self._replicas.size == 1:
            self._noted.clear()
            return
        communicator, call = self._replicas.communicator, getattr(bound, "call", None)
        own = communicator.call("param_groups") if call is None else call
        own.compare_too(self._digest(), partial(_facts_of, self._ready))
        if call is None:
            communicator.check(own)

    def compare_parameters(self) -> None:
        """Compare the parameters, if it is time to; what differs in a backward pass may be alike behind the step.

        Collective.  CollectiveMismatchError, on all ranks: a parameter differs, as it did the last time, and no step
        was made since.
        """
        self._count += 1
        if self._every == 0 or self._count % self._every or self._replicas.size == 1:
            return
        is_first, differing = not self._is_in_doubt, self._differing()
        self._is_in_doubt = bool(differing)
        if differing:
            finite = bytes(bool(_wide(cuda.awaited(each).detach()).isfinite().all()) for _, each, _ in differing)
            # what is no number on one rank is none on all behind the step
            if len({*self._replicas.communicator.exchange(finite, "parameters that are finite")}) > 1 or not is_first:
                self.settle()

    def settle(self) -> None:
        """Compare the parameters again where they were found to differ.  Differences of rounding are mended.

        Collective: every rank calls it in the same order, behind a step.  CollectiveMismatchError, on all ranks, where
        a parameter differs.
        """
        if self._is_in_doubt:
            self._is_in_doubt = False
            for name, tensor, sums in self._differing():
                self._settle(name, tensor, sums)

    def _differing(self) -> list[tuple[str, torch.Tensor, tuple[int, ...]]]:
        """Return the parameters that differ, each with its sums on all ranks.  Collective."""
        named = [pair for pair in self._named() if pair[1].layout is torch.strided]
        by_rank = _sums_by_rank(self._replicas, named, "sums of the parameters")
        if all(each == by_rank[0] for each in by_rank):
            return []
        if len({*map(len, by_rank)}) > 1:
            check_alike(self._replicas, "parameters", named)
        pairs = zip(named, zip(*by_rank, strict=True), strict=True)
        return [(name, tensor, own) for (name, tensor), own in pairs if len({*own}) > 1]

    def _settle(self, name: str, tensor: torch.Tensor, sums: Sequence[int]) -> None:
        """Give all replicas the values that most have, where the others differ by rounding only.  Collective."""
        expected = Counter(sums).most_common(1)[0][0]
        root = sums.index(expected)
        with torch.no_grad():
            own = cuda.awaited(tensor).detach().cpu().resolve_conj().resolve_neg()
            theirs = own.clone(memory_format=torch.contiguous_format)
            self._replicas.communicator.broadcast(bytes_of(theirs), root)
            apart, room = _apart(own, theirs)
            told = numpy.array([apart, apart <= room], numpy.float64)  # not so where one is no number
            answers = [
                numpy.frombuffer(each)
                for each in self._replicas.communicator.exchange(told.tobytes(), f"{name!r} elsewhere")
            ]
            if all(each[1] for each in answers):
                tensor.copy_(theirs)
                return
        others = [rank for rank, each in enumerate(sums) if each != expected]
        raise CollectiveMismatchError(
            f"rank {self._replicas.rank} of {self._replicas.size}: the parameter {name!r} has other values on rank "
            f"{listed(map(str, others))} than on rank {root}, by up to {max(answers[each][0] for each in others):g}. "
            "Change parameters, and the optimizer's state, on all ranks alike, or broadcast them afterwards "
            "(broadcast_parameters, broadcast_optimizer_state); check_every=0 compares nothing"
        )


def _sums_by_rank(replicas: Replicas, named: Sequence[Named], what: str) -> list[list[int]]:
    """Return the sums of the tensors on each rank.  Collective."""
    own = numpy.array(_sums_of([each for _, each in named]), numpy.uint32)
    return [numpy.frombuffer(each, own.dtype).tolist() for each in replicas.communicator.exchange(own.tobytes(), what)]


def _sums_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each tensor that stands for all its values.

    Those on a device are added up there, and the sums are read together: that waits for the device once.
    """
    with torch.no_grad():
        columns = [_column_sums(each) if cuda.has(each) else each.detach() for each in tensors]
        there = [number for number, each in enumerate(tensors) if cuda.has(each)]
        near = tensors[there[0]].device if there else None
        if there:
            together = cuda.awaited(torch.cat([columns[number].to(near) for number in there])).cpu()
            for number, part in zip(there, together.split([len(columns[number]) for number in there]), strict=True):
                columns[number] = part
    return [crc32(bytes_of(each.cpu())) for each in columns]


def _column_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of a tensor's bits, taken for integers, over the columns of a matrix; the rest as it is."""
    bits = integers_of(flat_of(tensor)).reshape(-1)
    rest = bits[len(bits) // _COLUMNS * _COLUMNS :].to(torch.int64)
    whole = bits[: len(bits) - len(rest)].view(-1, _COLUMNS)
    return torch.cat([whole.sum(0, dtype=torch.int64), rest]) if len(whole) else rest


def _apart(own: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference between two tensors, and how large it may be by rounding."""
    mine, other = _wide(own), _wide(theirs)
    apart = torch.where((mine == other) | (mine.isnan() & other.isnan()), 0.0, (mine - other).abs()).max().item()
    if not (own.is_floating_point() or own.is_complex()):
        return apart, 0.0
    most = torch.where(other.isfinite(), other.abs(), 0.0).max().item()
    return apart, _ROUNDING * torch.finfo(own.dtype).eps * most


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


class _Groups:
    """The hyperparameters of an optimizer as they are compared."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = ref(optimizer)
        self._keys = sorted({*optimizer.defaults} - {"params", *_WAYS})
        self._values: list[Any] = []
        self._types: list[type] = []
        self._told: list[str] = []
        self._is_fixed, self._digest = False, 0

    def digest(self) -> int:
        """Return 64 bits that stand for all values; those that cannot change by themselves are looked at once."""
        optimizer = self._optimizer()
        assert optimizer is not None  # it owns what calls this
        values = [group.get(key) for group in optimizer.param_groups for key in self._keys]
        types = list(map(type, values))
        if self._is_fixed and types == self._types:
            if values == self._values:
                return self._digest
            pairs = zip(values, self._values, self._told, strict=True)
            self._told = [told if value is before else _told(value) for value, before, told in pairs]
        else:
            self._told = list(map(_told, values))
        self._values, self._types, self._is_fixed = values, types, all(map(_is_fixed, values))
        raw = "\0".join(self._told).encode()
        self._digest = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
        return self._digest

    def facts(self, name: str) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return all values as they were when the digest was made, each with what it is."""
        names = ((number, key) for number in range(len(self._told) // max(1, len(self._keys))) for key in self._keys)
        told = zip(names, self._told, strict=True)
        return [fact(f"{key!r} of group {number}{name}", value) for (number, key), value in told]


def _facts_of(told: Sequence[_Groups]) -> FactsAndAdvice:
    """Return the hyperparameters of optimizers, and what to do where they differ."""
    several = len(told) > 1
    named = [(f" of optimizer {number}" if several else "", each) for number, each in enumerate(told)]
    return [each for name, groups in named for each in groups.facts(name)], _ADVICE


def _is_fixed(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return value is None or isinstance(value, (bool, int, float, complex, str))


def _told(value: Any) -> str:
    """Return a value as it is compared: equal numbers alike, whatever has them; objects of other kinds not at all."""
    if isinstance(value, torch.Tensor):
        value = cuda.awaited(value).detach().cpu().resolve_conj().resolve_neg()
        value = (
            value.item() if value.numel() == 1 else value.double().tolist() if value.numel() <= 64 else bytes_of(value)
        )
    if isinstance(value, numpy.ndarray):
        return f"{crc32(numpy.ascontiguousarray(value).tobytes()):x}"
    if isinstance(value, int) and abs(value) > 2**53:
        return str(value)
    if isinstance(value, (bool, int, float, numpy.floating, numpy.integer, numpy.bool_)):
        return repr(float(value))
    if value is None or isinstance(value, (str, complex)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_told, value))})"
    return "-"
