"""What all replicas get from one: parameters, buffers, and the state of an optimizer."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from mpidist.collectives.exchange.objects import broadcast_object
from mpidist.collectives.exchange.plain import checked_rank
from mpidist.errors import ObjectError
from mpidist.frameworks.replicas import Replicas
from mpidist.frameworks.torch import cuda
from mpidist.frameworks.torch.comparison import check_alike, described
from mpidist.frameworks.torch.replicas import replicas_of
from mpidist.frameworks.torch.tensors import Named, array_of, as_bytes, expanded_axes, flat_of

#: Tensors of up to so many bytes are sent together, up to so many bytes in one piece.
_SHORT_BYTES, _PIECE_BYTES = 1 << 20, 1 << 23


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any] | torch.Tensor],
    root_rank: int = 0,
    replicas: Replicas | None = None,
) -> None:
    """Give all replicas the tensors of one, in place.

    Collective: every rank calls it in the same order.

    Parameters
    ----------
    params : dict, or iterable of (name, tensor) or of tensors
        As ``model.state_dict()``, ``model.named_parameters()`` and ``model.parameters()`` give them.  Names, shapes and
        dtypes are compared.
    root_rank : int
    replicas : Replicas, optional
        By default those of the strategy in force, or all ranks.

    Raises
    ------
    ValueError
        Something that is no tensor.
    CollectiveMismatchError
        On all ranks: their tensors differ in number, name, shape or dtype; the first that differs is named.
    """
    replicas = replicas_of() if replicas is None else replicas
    given: Iterable[Any] = params.items() if isinstance(params, Mapping) else params
    named: list[Any] = [
        (f"tensor {number}", each) if isinstance(each, torch.Tensor) else each for number, each in enumerate(given)
    ]
    for pair in named:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[1], torch.Tensor | None)):
            is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
            shown = f"{pair[0]!r} of {type(pair[1]).__name__}" if is_pair else f"a {type(pair).__name__}"
            raise ValueError(
                f"broadcast_parameters takes a state_dict, tensors, or pairs of a name and a tensor; got {shown}. "
                "Other objects are sent by broadcast_object"
            )
    broadcast_tensors(replicas, [(str(name), each) for name, each in named if each is not None], root_rank)


def broadcast_tensors(
    replicas: Replicas,
    named: Sequence[Named],
    root: int = 0,
    is_checked: bool = False,
    what: str = "broadcast_parameters",
) -> None:
    """Give all replicas the tensors of rank `root`, in place.  Collective.

    `is_checked`: they have been compared already.  `what` is being done, for messages.
    """
    if not is_checked:
        check_alike(replicas, what, named)
        for name, each in named:
            _check_movable(name, each)
    root = checked_rank(root, replicas.size, "root_rank")
    if replicas.size == 1:
        return
    for piece in _pieces(named):
        _broadcast_piece(replicas, piece, root)


def _check_movable(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor without elements of its own in memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else tensor.layout
        raise ValueError(f"{name!r} is a {kind} tensor, which is not sent to other ranks; make it a dense one first")


def _pieces(named: Iterable[Named]) -> list[list[Named]]:
    """Return the tensors in lists that are sent together."""
    pieces: list[list[Named]] = []
    room = 0
    for name, tensor in named:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes > _SHORT_BYTES or nbytes > room or not pieces:
            pieces.append([])
            room = _PIECE_BYTES
        pieces[-1].append((name, tensor))
        room = 0 if nbytes > _SHORT_BYTES else room - nbytes
    return pieces


def _broadcast_piece(replicas: Replicas, named: Sequence[Named], root: int) -> None:
    # that of the first tensor if all are CUDA's, else the host
    place = named[0][1].device if all(cuda.has(each) for _, each in named) else torch.device("cpu")
    with torch.no_grad(), cuda.in_order_of(named[0][1]) if place.type != "cpu" else nullcontext():
        # `data` has no part in the versions of a tensor, which a pass that is going on may have noted
        copies = [flat_of(each.data.to(place)) for _, each in named]
        whole = [as_bytes(each) for each in copies]
        together = whole[0] if len(whole) == 1 else torch.cat(whole)
        replicas.communicator.broadcast(array_of(together), root)
        if len(whole) > 1:
            for part, values in zip(whole, together.split([len(each) for each in whole]), strict=True):
                part.copy_(values)
        for (name, tensor), copy in zip(named, copies, strict=True):
            if copy.data_ptr() != tensor.data_ptr():
                _put(name, tensor, copy)


def _put(name: str, tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Put values in place of a tensor's own; of those that `expand` has put in one place, one."""
    target, source = tensor.detach(), values
    for axis in expanded_axes(tensor):
        target, source = target.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
    try:
        target.copy_(source)
    except RuntimeError as error:
        raise RuntimeError(f"{name!r} cannot be given the values of another rank: {error}") from error


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None, *, replicas: Replicas | None = None
) -> None:
    """Give all replicas the state and the hyperparameters of one replica's optimizer, in the dtypes that it has there.

    Collective: every rank calls it in the same order.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    root_rank : int
    model : torch.nn.Module, optional
        Without effect.
    replicas : Replicas, optional
        By default those of the strategy in force, or all ranks.

    Raises
    ------
    CollectiveMismatchError
        On all ranks: the parameters of their optimizers differ in number, shape or dtype.
    ObjectError
        On all ranks: a state that cannot be pickled.
    """
    replicas = replicas_of() if replicas is None else replicas
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"broadcast_optimizer_state takes a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    replicas.check(
        "broadcast_optimizer_state",
        [
            described(f"parameter {number} of group {group_number}", each)
            for group_number, group in enumerate(optimizer.param_groups)
            for number, each in enumerate(group["params"])
        ],
    )
    root_rank = checked_rank(root_rank, replicas.size, "root_rank")
    payload, trouble = b"", None
    if replicas.rank == root_rank:
        try:
            buffer = io.BytesIO()
            torch.save(optimizer.state_dict(), buffer)
            payload = buffer.getvalue()
        except Exception as error:
            trouble = error  # told to all first
    content = broadcast_object(replicas.communicator, payload, root_rank)
    if not content:
        raise ObjectError(
            f"broadcast_optimizer_state: the state_dict of rank {root_rank}'s {type(optimizer).__name__} cannot be "
            f"pickled, such as a function in param_groups{'' if trouble is None else f': {trouble}'}"
        ) from trouble
    if replicas.rank != root_rank:
        own = [each for group in optimizer.param_groups for each in group["params"] if cuda.has(each)]
        near = own[0].device if own else torch.device("cpu")  # from where it goes to each parameter's device

        def place(storage: Any, location: str) -> Any:
            return storage if location == "cpu" or near.type == "cpu" else storage.cuda(near)

        state = torch.load(io.BytesIO(content), weights_only=False, map_location=place)
        optimizer.load_state_dict(state)
        _restore_dtypes(optimizer, state)


def _restore_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put back what `load_state_dict` has cast to the dtypes of parameters, such as their float32 masters."""
    own = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [each for group in state["param_groups"] for each in group["params"]]
    for parameter, number in zip(own, numbers, strict=False):
        if parameter in optimizer.state and number in state["state"]:
            optimizer.state[parameter] = _as_saved(optimizer.state[parameter], state["state"][number])


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Return what was loaded, with each tensor of another dtype as it was saved."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype is saved.dtype else saved.to(loaded.device)
    if type(loaded) is not type(saved):
        return loaded
    if type(loaded) is dict:
        return {key: _as_saved(each, saved.get(key)) for key, each in loaded.items()}
    if type(loaded) in (list, tuple):
        return type(loaded)(map(_as_saved, loaded, saved))
    return loaded
