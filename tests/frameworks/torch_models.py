"""Models, rows and training in one process that the tests of PyTorch hold the ranks against."""

from __future__ import annotations

import copy

import numpy
import torch

from mpidist.world import world_communicator

COLUMNS, CLASSES = 6, 3

cross_entropy = torch.nn.functional.cross_entropy


def world():
    return world_communicator()


def last():
    return world().size - 1


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def tanh_model(seed=0, dtype=torch.float64):
    """Return a model without kinks: rounding stays rounding."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, 17), torch.nn.Tanh(), torch.nn.Linear(17, CLASSES))
    return model.to(dtype)


def rows(count, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, COLUMNS, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, CLASSES, (count,), generator=generator)


def cuts(count, kind):
    """Return where each rank's part of a batch begins, and one more for the end."""
    size = world().size
    if kind == "even":
        assert count % size == 0
        return [count * rank // size for rank in range(size + 1)]
    if kind == "uneven":
        return [*(count * rank // (size + 2) for rank in range(size)), count]
    assert kind == "empty"  # all rows are rank 0's
    return [0, *[count] * size]


def part(batch, kind):
    at = cuts(len(batch[0]), kind)
    start, stop = at[world().rank], at[world().rank + 1]
    return tuple(each[start:stop] for each in batch)


def trained_alone(model, make_optimizer, batches, loss_fn=cross_entropy, before_step=None):
    """Return a copy of a model that was trained in this process on whole batches."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        if before_step is not None:
            before_step(model)
        optimizer.step()
    return model


def batches(count, size, dtype=torch.float64):
    return [rows(size, dtype, seed) for seed in range(count)]


def _cleared_by(write):
    def clear(model):
        for each in model.parameters():
            write(each)

    return clear


def _clipped_and_cleared(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    _cleared_by(lambda each: each.grad.data.zero_())(model)


#: How users set the gradients of a model to zero; PyTorch counts no change where memory is written behind its back.
CLEARED = {
    "zero_grad": lambda model: model.zero_grad(set_to_none=False),
    "foreach": lambda model: torch._foreach_zero_([each.grad for each in model.parameters()]),
    "multiplied": _cleared_by(lambda each: each.grad.mul_(0)),
    "data": _cleared_by(lambda each: each.grad.data.zero_()),
    "numpy": _cleared_by(lambda each: each.grad.numpy().fill(0)),
    "other zeros": _cleared_by(lambda each: setattr(each, "grad", torch.zeros_like(each))),
    "clipped, data": _clipped_and_cleared,
}


def one_row_model():
    """Return a model of one parameter, most of whose gradient is zeros."""
    torch.manual_seed(3)
    table = torch.nn.Embedding(64, CLASSES)

    class OneRow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = table

        def forward(self, x):
            return self.table(torch.full((len(x),), 3)) + x[:, :CLASSES]

    return OneRow().double()


def assert_same_bits(*tensors):
    """On all ranks."""
    raw = b"".join(each.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for each in tensors)
    assert len({*world().exchange(raw)}) == 1


def assert_alike(model, expected, tolerance=1e-12):
    for (name, found), (other, wanted) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
        assert name == other
        numpy.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=tolerance, atol=tolerance, err_msg=name)
    assert_same_bits(*model.parameters())
