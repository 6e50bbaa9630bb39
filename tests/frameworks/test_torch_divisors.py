"""A loss that divides by tokens or by weights of classes, which ranks have in other numbers than rows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import mpidist.torch  # noqa: E402

pytestmark = pytest.mark.mpi

WEIGHT = torch.linspace(0.5, 2, 9)


def texts():
    """12 texts of 2 to 5 tokens, padded by 0; in any part of them another number."""
    tokens = torch.randint(1, 9, (12, 5), generator=torch.manual_seed(0))
    return torch.where(torch.arange(5) < torch.tensor([2, 2, 3, 3, 3, 3, 4, 4, 5, 5, 5, 5])[:, None], tokens, 0)


def trained(tokens, weight, kind):
    """Return the parameters after three steps, by PyTorch's own optimizer for None as the kind."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9)).double()
    if kind == "model":
        model = mpidist.torch.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if kind == "optimizer":
        optimizer = mpidist.torch.DistributedOptimizer(optimizer, model.named_parameters())
    x, y = tokens[:, :-1], tokens[:, 1:]
    for _ in range(3):
        optimizer.zero_grad()
        if kind:
            holder = model if kind == "model" else optimizer
            holder.rows = ((y != 0) if weight is None else weight[y] * (y != 0)).sum()
        logits = model(x).mT
        torch.nn.functional.cross_entropy(logits, y, weight=weight, ignore_index=0).backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.parametrize("weight", [None, WEIGHT.double()], ids=["tokens", "class weights"])
@pytest.mark.parametrize("kept", [12, 1], ids=["all", "one text"])
def test_rows_are_what_the_loss_divides_by(kind, weight, kept):
    """The parameters of one process on all texts; with one text other ranks have a mean of no tokens, NaN."""
    rank, size = mpidist.torch.rank(), mpidist.torch.size()
    tokens = torch.where(torch.arange(12)[:, None] < kept, texts(), 0)
    own = tokens[12 * rank // size : 12 * (rank + 1) // size]
    expected = trained(tokens, weight, None)
    for found, one in zip(trained(own, weight, kind), expected, strict=True):
        torch.testing.assert_close(found, one)
