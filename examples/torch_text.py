"""PyTorch on MPI ranks: a recurrent net learns to write like Python's own documentation, character by character.

    python examples/torch_text.py
    mpidist run -n 4 examples/torch_text.py

The text is a module of the standard library.  The batches are the global ones, the same on every rank; each rank takes
its part of each, and losses are divided by the rows of the global batch, as in TensorFlow's guide.  So all numbers of
ranks train to the same loss, also where the parts differ in length.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).parent))
import needed

needed.packages("torch", install="pip install '.[torch]'")

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402

import mpidist  # noqa: E402
import mpidist.torch  # noqa: E402

ROWS, LENGTH, WIDTH = 30, 48, 96


class Writer(torch.nn.Module):
    """Gives scores for the next character."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(symbols, 32)
        self.recurrent = torch.nn.GRU(32, WIDTH, batch_first=True)
        self.scores = torch.nn.Linear(WIDTH, symbols)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of shape (rows, length, symbols)."""
        found: torch.Tensor = self.scores(self.recurrent(self.table(x))[0])
        return found


def text() -> tuple[torch.Tensor, str]:
    """Return the numbers of all characters, and the characters by number."""
    whole = "".join(topics[name] for name in sorted(topics))
    symbols = "".join(sorted(set(whole)))
    number = {symbol: position for position, symbol in enumerate(symbols)}
    return torch.tensor([number[symbol] for symbol in whole]), symbols


def batch(numbers: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch of a step: characters, and those that follow them."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(numbers) - LENGTH - 1, (ROWS, 1), generator=generator)
    rows = numbers[starts + torch.arange(LENGTH + 1)]
    return rows[:, :-1], rows[:, 1:]


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the mean loss of the last steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    strategy = mpidist.MultiWorkerMirroredStrategy()
    rank, size = strategy.extended.replica_id, strategy.num_replicas_in_sync
    numbers, symbols = text()
    model = Writer(len(symbols))
    model, optimizer = strategy.distribute(model, torch.optim.Adam(model.parameters(), lr=5e-3))
    losses = []
    for step in range(options.steps):
        x, y = (each[ROWS * rank // size : ROWS * (rank + 1) // size] for each in batch(numbers, step))
        optimizer.zero_grad()
        by_row = functional.cross_entropy(model(x).mT, y, reduction="none").mean(1)
        loss = mpidist.torch.compute_average_loss(by_row, global_batch_size=ROWS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(strategy.reduce("sum", loss.item(), axis=None)))
        if step % 50 == 49 and strategy.extended.is_chief:
            print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
    return sum(losses[-10:]) / len(losses[-10:])


if __name__ == "__main__":
    main()
