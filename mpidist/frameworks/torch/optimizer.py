"""`DistributedOptimizer`: an optimizer of PyTorch whose step takes the gradients of all replicas."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch

from mpidist.compression import Compression
from mpidist.errors import quoted
from mpidist.frameworks.replicas import Replicas
from mpidist.frameworks.torch.broadcast import broadcast_optimizer_state, broadcast_tensors
from mpidist.frameworks.torch.comparison import StepComparison, check_alike
from mpidist.frameworks.torch.reduction import GradientOwner, GradientReduction
from mpidist.frameworks.torch.replicas import replicas_of
from mpidist.frameworks.torch.row_norms import refuse_row_norms
from mpidist.frameworks.torch.steps import prepare_step, watch_others
from mpidist.frameworks.torch.tensors import Named, trainable
from mpidist.frameworks.torch.unowned_parameters import module_of
from mpidist.options import ReduceOp


class DistributedOptimizer(GradientOwner, torch.optim.Optimizer):
    """An optimizer whose gradients are reduced over all replicas, before its step sees them.

    It is the optimizer that was given, of a class made of its own and this one.  So ``isinstance``, ``param_groups``,
    ``state_dict``, schedulers of the learning rate and ``torch.amp.GradScaler`` work with it as before.  Gradients are
    reduced in place at the end of ``backward()``; clipping and unscaling find the reduced ones.

    Collective: every rank makes it in the same order, and makes its steps in the same order.  All replicas begin with
    the parameters, and the optimizer's state, of rank 0.  Buffers of a model are not known here: `Strategy.distribute`
    with model and optimizer, and `DistributedDataParallel`, give all replicas those of rank 0.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    named_parameters : iterable of (name, parameter), optional
        ``model.named_parameters()``: all of them come from rank 0, those too that the optimizer does not have, and
        messages name them.  Parameters that the model gets later, and that nobody reduces, are found.  By default
        parameters are numbered, and those of the optimizer come from rank 0.
    compression : Compression, optional
        How gradients are coded on the wire, such as `mpidist.compression.Float16`; by default not at all.
        What error feedback keeps is in no ``state_dict``: a resumed job lacks it, with ``TopK(ratio)`` the gradients of
        up to about ``1 / (2 * ratio)`` steps.
    backward_passes_per_step : int
        How many backward passes are accumulated before gradients are reduced.
    op : ReduceOp or str
        ``"mean"``, or ``"sum"`` where each loss is divided by the rows of the global batch.
    gradient_predivide_factor : float
        Accepted for a mean, and without effect: sums are made in 32 bits or more, so a mean needs no two divisions.
    num_groups, groups
        Accepted and without effect: all gradients are reduced in one collective.
    sparse_as_dense : bool
        Whether sparse gradients are reduced as dense ones.
    process_set : None
        All replicas.  Some of them are a world of their own, `mpidist.new_world`.
    overlap : str
        ``"auto"``: over several nodes, sums of long models begin in the backward pass.  ``"none"``: all after it.
    staging : str, optional
        ``"host"`` has gradients of a device pass through host memory, with two copies; without it those on a CUDA
        device are reduced there, and those on others are an error.
    check_every : int
        With so many reductions each, the parameters of all replicas are compared; 0 never.  The hyperparameters in
        ``param_groups`` are compared in every step.
    strategy : Strategy, optional
        By default the one in force, or all ranks of the job where there is none.

    Raises
    ------
    TypeError
        What is given is no optimizer of PyTorch; or an argument that there is not, which is named.
    ValueError
        Names that are not those of the optimizer's parameters; gradients that are reduced by something else already; or
        parameters on several devices, without `staging`.
    CollectiveMismatchError
        On all ranks: their parameters differ in number, name, shape or dtype.  Of a later step: their hyperparameters
        or parameters have other values; the first that differs is named, and the ranks.  Or the model has a new, or
        thawed, parameter with a gradient that nobody reduces.
    RuntimeError
        On all ranks: a step inside of ``backward()``, as by a hook of a parameter.
    NotImplementedError
        Parameters on a device that is not CUDA's, without `staging`.
    MissingDependencyError
        Parameters on a CUDA device without CuPy.
    """

    def __new__(cls, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> DistributedOptimizer:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"DistributedOptimizer takes a torch.optim.Optimizer, got a {type(optimizer).__name__}")
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError("this optimizer is a DistributedOptimizer already")
        if not hasattr(optimizer, "_optimizer_step_pre_hooks") or not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"{type(optimizer).__name__}.__init__ does not call that of torch.optim.Optimizer, so its steps "
                "are not seen. Have it call super().__init__(params, defaults); where it wraps another optimizer, "
                f"give that one: {type(optimizer).__name__}(DistributedOptimizer(inner))"
            )
        try:
            inspect.signature(DistributedOptimizer.__init__).bind(None, optimizer, *args, **kwargs)
        except TypeError as error:  # as long as the optimizer is as it was
            raise TypeError(
                f"DistributedOptimizer: {error}; help(mpidist.torch.DistributedOptimizer) has all"
            ) from None
        kind: Any = type(optimizer)
        # for the methods: a class that is made of its own and this one
        optimizer.__class__ = type(
            kind.__name__, (DistributedOptimizer, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
        )
        assert isinstance(optimizer, DistributedOptimizer)
        return optimizer

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[Named] | None = None,
        compression: Compression | None = None,
        backward_passes_per_step: int = 1,
        op: ReduceOp | str = ReduceOp.MEAN,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: None = None,
        *,
        overlap: str = "auto",
        staging: str | None = None,
        check_every: int = 50,
        strategy: Any = None,
    ) -> None:
        try:
            _check_asked(op, gradient_predivide_factor, process_set)
            replicas = replicas_of(strategy)
            module = module_of(named_parameters)
            others = None if named_parameters is None else list(named_parameters)
            self._listing = _listing_of(self, _names(others, self.param_groups))
            check_alike(replicas, "DistributedOptimizer", trainable(self._listing()))
            if module is not None:
                refuse_row_norms(replicas, module)
            self._reduction = GradientReduction(
                replicas,
                self._listing,
                ReduceOp.of_gradients(op).verb,
                f"DistributedOptimizer({type(self).__name__})",
                *(backward_passes_per_step, staging, sparse_as_dense, compression, overlap),
                comparison=StepComparison(replicas, self._listing, check_every, self),
            )
            self._reduction.look_after([] if module is None else [module])
        except BaseException:
            self.__class__ = type(self).__bases__[1]  # what was given is as it was
            raise
        self._begin(replicas, others or [])

    def _begin(self, replicas: Replicas, others: Sequence[Named]) -> None:
        """Begin with rank 0's parameters and state, and reduce before each step.  Collective."""
        own = {id(each) for _, each in self._listing()}
        broadcast_tensors(replicas, [*self._listing(), *(pair for pair in others if id(pair[1]) not in own)])
        has_state = replicas.communicator.exchange(b"1" if self.state else b"0", "DistributedOptimizer")
        if b"1" in has_state:
            broadcast_optimizer_state(self, replicas=replicas)
        self._reduction.comparison.compare_groups()
        # hooks, so that they run also where a scheduler has put a function of its own in the place of `step`
        self.register_step_pre_hook(lambda own, args, kwargs: prepare_step(own._reduction, own, args, kwargs))
        self.register_step_post_hook(lambda own, args, kwargs: own._reduction.after_step(own))
        watch_others(self._reduction)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which all replicas have from rank 0.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        param_group : dict
            As in PyTorch.
        """
        super().add_param_group(param_group)
        known = {id(each) for group in self.param_groups[:-1] for each in group["params"]}
        broadcast_tensors(
            self._reduction.replicas,
            [pair for pair in self._listing() if id(pair[1]) not in known],
            what="add_param_group",
        )
        self._reduction.adopt()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate so many backward passes before gradients are reduced, from the next step on.

        Local: every rank calls it, between the same steps.
        """
        self._reduction.accumulate(passes)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Have copies and pickles be optimizers as they were given, which reduce nothing."""
        return _plain, (type(self).__bases__[1],), self.__getstate__()


def _listing_of(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Callable[[], Sequence[Named]]:
    """Return what lists the named parameters that an optimizer has then."""
    found = ref(optimizer)

    def listing() -> Sequence[Named]:
        owner = found()
        assert owner is not None  # it owns what calls this
        return [
            (names.get(id(each)) or f"parameter {number} of group {group_number}", each)
            for group_number, group in enumerate(owner.param_groups)
            for number, each in enumerate(group["params"])
        ]

    return listing


def _plain(cls: Any) -> Any:
    return cls.__new__(cls)


def _check_asked(op: Any, predivide: float, process_set: Any) -> None:
    """Raise for what is not there."""
    if not predivide > 0:
        raise ValueError(f"gradient_predivide_factor={predivide}: it is more than 0")
    if predivide != 1.0 and ReduceOp.of_gradients(op) is not ReduceOp.MEAN:
        raise ValueError(f"gradient_predivide_factor={predivide} divides a mean; with op={quoted(op)} leave it out")
    if process_set is not None:
        raise NotImplementedError(
            f"process_set={process_set!r}: gradients are reduced over all ranks of a world. Make a world of some "
            "ranks, world = mpidist.new_world(comm), and make the optimizer inside `with world:`; for all "
            "ranks leave it out"
        )


def _names(named: Sequence[Named] | None, groups: Sequence[dict[str, Any]]) -> dict[int, str]:
    """Return the names by the ids of parameters; ValueError unless all of the optimizer's, or none, have one each."""
    if named is None:
        return {}
    for pair in named:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError("named_parameters takes pairs of a name and a parameter: model.named_parameters()")
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"named_parameters has {', '.join(twice)} more than once: each parameter needs a name of its own"
        )
    names_by_id = {id(parameter): name for name, parameter in named}
    missing = [each for group in groups for each in group["params"] if id(each) not in names_by_id]
    if missing:
        shapes = ", ".join(str(tuple(each.shape)) for each in missing[:3])
        raise ValueError(
            f"named_parameters has no name for {len(missing)} of the optimizer's parameters, of shapes {shapes}; pass "
            "the names of all, or none"
        )
    return names_by_id
