"""`DistributedDataParallel`: a module whose backward pass reduces its gradients over all replicas."""

from __future__ import annotations

import inspect
import json
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch

from mpidist.compression import Compression
from mpidist.errors import listed
from mpidist.frameworks.replicas import Replicas
from mpidist.frameworks.torch import comm_hook
from mpidist.frameworks.torch.broadcast import broadcast_optimizer_state, broadcast_tensors
from mpidist.frameworks.torch.comparison import StepComparison, check_alike
from mpidist.frameworks.torch.contents import Contents
from mpidist.frameworks.torch.join import BUFFERS, Joining, sole_block
from mpidist.frameworks.torch.marks import digest_of
from mpidist.frameworks.torch.reduction import GradientOwner, GradientReduction
from mpidist.frameworks.torch.replicas import replicas_of
from mpidist.frameworks.torch.row_norms import refuse_row_norms
from mpidist.frameworks.torch.steps import watch_steps
from mpidist.frameworks.torch.tensors import Named, trainable
from mpidist.options import ReduceOp

#: What PyTorch's own class puts before the names of the module's tensors.
_PREFIX = "module."


class DistributedDataParallel(GradientOwner, torch.nn.Module):
    """A module that trains on all replicas: at the end of ``backward()`` its gradients are those of all.

    Names and meaning are those of `torch.nn.parallel.DistributedDataParallel`, without process group and devices.  All
    replicas begin with the parameters and buffers of rank 0.  Unlike there, ``state_dict`` is that of the bare module;
    ``load_state_dict`` takes either, also as a part of a module around this one.  Parameters that a backward pass does
    not reach need no mention; those that are thawed, or come before a forward pass, are reduced with the others.

    Collective: every rank makes it in the same order, and makes its backward passes in the same order.

    Parameters
    ----------
    module : torch.nn.Module
    broadcast_buffers : bool
        Whether all replicas get rank 0's buffers before each forward pass in training mode.
    find_unused_parameters : bool
        Accepted: a parameter without a gradient is counted as zeros where other replicas have one, and left without a
        gradient where none has.
    init_sync : bool
        Whether all replicas begin with the parameters and buffers of rank 0.
    op : ReduceOp or str
        ``"mean"``, as PyTorch does, or ``"sum"``.
    staging : str, optional
        ``"host"`` has gradients of a device pass through host memory, with two copies; without it those on a CUDA
        device are reduced there, and those on others are an error.
    check_every : int
        With so many backward passes each, the parameters of all replicas are compared; 0 never.
    compression : Compression, optional
        How gradients are coded on the wire, such as `mpidist.compression.Float16`; by default not at all.
        What error feedback keeps is in no ``state_dict``: a resumed job lacks it, with ``TopK(ratio)`` the gradients of
        up to about ``1 / (2 * ratio)`` steps.
    mixed_precision : object, optional
        PyTorch's settings with a `reduce_dtype` alone, which is such a compression.
    overlap : str
        ``"auto"``: over several nodes, sums of long models begin in the backward pass.  ``"none"``: all after it.
    strategy : Strategy, optional
        By default the one in force, or all ranks of the job where there is none.
    device_ids, output_device, dim, bucket_cap_mb, gradient_as_bucket_view, static_graph
        Accepted and without effect: a rank is one device, and gradients go through memory in short pieces anyway.

    Attributes
    ----------
    module : torch.nn.Module
        The bare module.

    Raises
    ------
    RuntimeError
        No parameter requires a gradient.  Of a later pass, on all ranks: an optimizer's step inside of ``backward()``.
    ValueError
        Gradients that are reduced by something else already, or parameters on several devices, without `staging`.
        Both `compression` and `mixed_precision`.
    CollectiveMismatchError
        On all ranks: their parameters or buffers differ in number, name, shape or dtype.
    NotImplementedError
        Parameters on a device that is not CUDA's, without `staging`.  Mixed precision that casts parameters or buffers.
    MissingDependencyError
        Parameters on a CUDA device without CuPy.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        op: ReduceOp | str = ReduceOp.MEAN,
        staging: str | None = None,
        check_every: int = 50,
        compression: Compression | None = None,
        mixed_precision: Any = None,
        overlap: str = "auto",
        strategy: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"DistributedDataParallel takes a torch.nn.Module, got a {type(module).__name__}")
        if process_group is not None:
            raise ValueError("process_group: mpidist knows its ranks from MPI; leave it out")
        if not any(each.requires_grad for each in module.parameters()):
            raise RuntimeError("DistributedDataParallel is not needed: no parameter of the module requires a gradient")
        if mixed_precision is not None:
            if compression is not None:
                raise ValueError("compression and mixed_precision both say how gradients are coded; give one of them")
            compression = comm_hook.of_mixed_precision(mixed_precision)
        self.module, self.broadcast_buffers, self._has_hook = module, broadcast_buffers, False
        replicas = replicas_of(strategy)
        check_alike(replicas, "DistributedDataParallel", trainable(module.named_parameters()))
        refuse_row_norms(replicas, module)

        def named() -> list[Named]:
            return list(module.named_parameters())

        self._reduction = GradientReduction(
            replicas,
            named,
            ReduceOp.of_gradients(op).verb,
            f"DistributedDataParallel({type(module).__name__})",
            staging=staging,
            compression=compression,
            overlap=overlap,
            comparison=StepComparison(replicas, named, check_every),
        )
        self._contents = Contents(module)
        self._versions: tuple[MutableMapping[str, Any], dict[str, Any]] = {}, {}
        self.register_load_state_dict_post_hook(_end_of_load)
        if init_sync:
            broadcast_module(replicas, module)
        watch_steps(self._reduction)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        if torch.is_grad_enabled():
            if self.broadcast_buffers and self.training and not self._reduction.is_held:
                self._share_buffers()
            if not self._contents.are_as_noted():
                self._watch_new()
        return self.module(*args, **kwargs)

    def _watch_new(self) -> None:
        """Watch what came; tensors that are no parameters stand there for this pass only, as by `functional_call`."""
        if all(isinstance(each, torch.nn.Parameter) for each in self.module.parameters()):
            self._contents.note(self.module)
            self._reduction.ownership.watch()

    def _share_buffers(self) -> None:
        """Give all replicas the buffers of the first that has rows.  Collective."""
        joining, replicas = self._reduction.joining, self._reduction.replicas
        if joining is None:
            broadcast_buffers(replicas, self.module)
        elif any(True for _ in self.module.buffers()):
            joining.announce(BUFFERS)
            broadcast_buffers(replicas, self.module, joining.active[0])

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Let replicas have different numbers of batches in a ``with`` block: those that run out follow the others.

        Behind the block all replicas have the parameters, buffers and gradients of those that had rows last, and so
        have their optimizers the states, but for one that has made no step at all: a RuntimeWarning tells of it.  A
        GradScaler is not known here: give all ranks the state of that of a rank that had rows last, before the next
        pass.  One small all-reduce more is made for each forward and backward pass.

        Collective: every rank enters it in the same order.

        Parameters
        ----------
        divide_by_initial_world_size : bool
            Whether a mean of gradients divides by all replicas, not by those that still have rows.
        enable : bool
            False does nothing.
        throw_on_early_termination : bool
            Whether a replica that runs out before others is a RuntimeError on all.

        Raises
        ------
        RuntimeError
            A block inside of another, of whichever model.  On all ranks: gradients that were reduced are changed in
            place, to other values on other ranks, when the block ends and a replica has run out before.  Or, in a mean
            over all, a pass adds to gradients that were reduced before, or to some, and a replica has run out.
        """
        if not enable:
            yield
            return
        reduction = self._reduction
        with sole_block():
            if reduction.replicas.size == 1:
                yield
                return
            joining = Joining(reduction.replicas, throw_on_early_termination, divide_by_initial_world_size)
            reduction.join(joining)
            try:
                yield
                self._follow(joining)
            finally:
                reduction.join(None)

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuse PyTorch's ``with Join([model, ...])``, which works on a process group.  Local.

        Raises
        ------
        NotImplementedError
            Always: `join` is the same for this model.
        """
        raise NotImplementedError(
            "torch.distributed.algorithms.join.Join needs a process group, and mpidist has none: write `with "
            "model.join():` in place of `with Join([model]):`, with the same arguments"
        )

    def register_comm_hook(self, state: None, hook: Callable[..., Any]) -> None:
        """Have gradients coded on the wire as one of PyTorch's default hooks does.

        Collective: every rank calls it in the same order, before its first backward pass.

        Parameters
        ----------
        state : None
        hook : callable
            ``allreduce_hook``, ``fp16_compress_hook`` or ``bf16_compress_hook`` of PyTorch's ``default_hooks``, or
            `mpidist.torch.comm_hook`: no compression, `Float16`, `BFloat16`, and no compression.

        Raises
        ------
        NotImplementedError
            Another hook.
        RuntimeError
            A hook, or a compression, is there already.
        ValueError
            `state` is something.
        """
        compression = comm_hook.of_hook(state, hook)
        if self._has_hook or self._reduction.compression is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once")
        self._has_hook = True
        self._reduction.compress(compression)

    def _follow(self, joining: Joining) -> None:
        """Take part in what others do, and end with what they have.  Collective."""
        reduction = self._reduction

        def take_buffers() -> None:
            broadcast_buffers(reduction.replicas, self.module, joining.active[0])

        steps = partial(reduction.follow, False), partial(reduction.follow, True), partial(reduction.reduced_loss, None)
        root = joining.follow((take_buffers, *steps))
        broadcast_module(reduction.replicas, self.module, root)
        self._share_states(root)
        if joining.followers:
            reduction.catch_up(root, joining.followers)
            self._share_frozen(root, joining.followers)

    def _share_frozen(self, root: int, followers: Sequence[int]) -> None:
        """Give followers the gradients of frozen parameters that rank `root` has: optimizers take them.  Collective."""
        replicas = self._reduction.replicas
        frozen = {name: each for name, each in self.module.named_parameters() if not each.requires_grad}
        own = {name: digest_of([each]).decode() for name, each in frozen.items() if each.grad is not None}
        told = [json.loads(each) for each in replicas.communicator.exchange(json.dumps(own).encode(), "frozen")]
        for name, parameter in frozen.items():
            if len({each.get(name) for each in told}) == 1:
                continue
            gradient = None
            if name in told[root]:
                is_own = replicas.rank == root and parameter.grad is not None
                gradient = parameter.grad.to_dense() if is_own else torch.zeros_like(parameter)
                broadcast_tensors(replicas, [(name, gradient)], root)
            if replicas.rank in followers:
                parameter.grad = gradient

    def _share_states(self, root: int) -> None:
        """Give the states of rank `root`'s optimizers to replicas that have made fewer steps.  Collective."""
        reduction = self._reduction
        replicas, optimizers = reduction.replicas, reduction.origins.optimizers()
        own = reduction.steps, [_has_state(each) for each in optimizers]
        raw = replicas.communicator.exchange(json.dumps(own).encode(), "steps inside of join()")
        told = [json.loads(each) for each in raw]
        if len({steps for steps, _ in told}) == 1:
            return
        for number, has_state in enumerate(told[root][1]):
            lacking = [rank for rank, (_, each) in enumerate(told) if len(each) <= number]
            if has_state and not lacking:
                broadcast_optimizer_state(optimizers[number], root, replicas=replicas)
            elif has_state and replicas.rank == root:
                warnings.warn(
                    f"join: rank {listed(map(str, lacking))} has made no step, so its optimizer is not known here, and "
                    f"has not the state of rank {root}'s {type(optimizers[number]).__name__}. To train on, call "
                    f"mpidist.torch.broadcast_optimizer_state(optimizer, {root}) on all ranks",
                    RuntimeWarning,
                    stacklevel=5,
                )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the bare module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state of the bare module, or one that PyTorch's own class has saved.  Local."""
        if self._is_of_pytorch(state_dict.keys()):
            versions = getattr(state_dict, "_metadata", None)
            state_dict = OrderedDict((name.removeprefix(_PREFIX), value) for name, value in state_dict.items())
            if versions is not None:
                state_dict._metadata = _moved(versions, _PREFIX, "")  # type: ignore[attr-defined]
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _is_of_pytorch(self, names: Set[str]) -> bool:
        """Return whether a state with these names is one that PyTorch's own class has saved."""
        own, without = self.module.state_dict().keys(), {name.removeprefix(_PREFIX) for name in names}
        return all(name.startswith(_PREFIX) for name in names) and len(own & without) > len(own & names)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Have the modules below find the state of a module around this one, which has the bare names in it."""
        names = {each.removeprefix(prefix) for each in state_dict if each.startswith(prefix)}
        if not self._is_of_pytorch(names):
            found = {f"{prefix}{_PREFIX}{name}": state_dict.pop(prefix + name) for name in names}
            state_dict.update(found)
            versions = _versions_being_loaded()
            self._versions = versions, dict(versions)
            versions.update(_moved(versions, prefix, prefix + _PREFIX))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a DistributedDataParallel belongs to its job: save or copy its `module`, or `state_dict()`")


def _moved(versions: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return what a state says of the layers whose names begin with one prefix, by names with another."""
    dotted = {f"{name}.": each for name, each in versions.items()}
    return {f"{new}{name.removeprefix(old)}"[:-1]: each for name, each in dotted.items() if name.startswith(old)}


def _versions_being_loaded() -> MutableMapping[str, Any]:
    """Return what the state that is being loaded says of all layers: PyTorch tells each layer its own part only."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == torch.nn.Module.__module__ and "metadata" in frame.f_locals:
            return frame.f_locals["metadata"] or {}
        frame = frame.f_back
    return {}


def _end_of_load(model: Any, keys: Any) -> None:
    """Leave the state that was loaded as it was."""
    versions, before = model._versions
    versions.clear()
    versions.update(before)
    model._versions = {}, {}


def broadcast_buffers(replicas: Replicas, module: torch.nn.Module, root: int = 0) -> None:
    """Give all replicas the buffers of rank `root`'s module, such as averages of batch normalization.  Collective."""
    if replicas.size > 1 and (named := list(module.named_buffers())):
        broadcast_tensors(replicas, named, root, is_checked=True)


def broadcast_module(replicas: Replicas, module: torch.nn.Module, root: int = 0) -> None:
    """Give all replicas the parameters and buffers of rank `root`'s module.  Collective."""
    broadcast_tensors(replicas, [*module.named_parameters(), *module.named_buffers()], root)


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer keeps anything from step to step."""
    kept = [each.values() if isinstance(each, dict) else [each] for each in optimizer.state.values()]
    return any(value is not None for each in kept for value in each)
