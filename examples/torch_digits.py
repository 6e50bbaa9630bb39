"""PyTorch on MPI ranks: a convolutional net learns the handwritten digits.

    python examples/torch_digits.py
    mpidist run -n 4 examples/torch_digits.py

It is a loop as for one process; three lines of it know of ranks, and are marked.  Each rank reads its rows of the data.
The accuracy is that of all test rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import needed

needed.packages("torch", install="pip install '.[torch,examples]'")

import digits  # noqa: E402
import torch  # noqa: E402
from torch.nn import functional  # noqa: E402

import mpidist  # noqa: E402
import mpidist.torch  # noqa: E402

BATCH = 96


def net() -> torch.nn.Module:
    """Return a small convolutional net."""
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8)),
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 16, digits.CLASSES),
    )


def loaded() -> tuple[torch.utils.data.TensorDataset, torch.utils.data.TensorDataset]:
    """Return the training and the test rows."""
    train, test = (
        torch.utils.data.TensorDataset(torch.from_numpy(rows.images), torch.from_numpy(rows.labels).argmax(1))
        for rows in digits.load()
    )
    return train, test


def accuracy(model: torch.nn.Module, rows: torch.utils.data.TensorDataset, strategy: mpidist.Strategy) -> float:
    """Return the part of all test rows that are told right; each rank looks at some of them."""
    rank, size = strategy.extended.replica_id, strategy.num_replicas_in_sync
    x, y = (each[rank::size] for each in rows.tensors)
    model.eval()
    with torch.no_grad():
        right = float((model(x).argmax(1) == y).sum())
    return float(strategy.reduce("sum", right, axis=None)) / len(rows)


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    strategy = mpidist.MultiWorkerMirroredStrategy()
    train, test = loaded()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    size = strategy.num_replicas_in_sync
    optimizer = mpidist.torch.DistributedOptimizer(optimizer, model.named_parameters())  # reduces the gradients
    sampler = mpidist.torch.DistributedSampler(train, padding=False, drop_last=True)  # this rank's rows
    loader = torch.utils.data.DataLoader(train, batch_size=max(1, BATCH // size), sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)  # other rows in another order
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = accuracy(model, test, strategy)
    if strategy.extended.is_chief:
        print(f"{size} ranks, {options.epochs} epochs: accuracy {found:.4f}")
    return found


if __name__ == "__main__":
    main()
